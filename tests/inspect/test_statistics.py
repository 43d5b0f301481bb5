"""Statistics of residual streams against brute force, closed forms and streams made to order."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from normstream.inspect.measures.statistics import (
    angular_distance,
    growth,
    growth_law,
    half_ulp_bf16,
    influences,
    massive_activations,
    rms,
    stream_ratios,
    sublayer_rows,
)
from normstream.inspect.measures.streams import LayerTrace, StackTrace, Stretch, SublayerTrace, Trace


def made(streams: list[Tensor], **other: list[Tensor]) -> Trace:
    """A trace of layers with one sublayer each, whose stream x is given at every border (and other streams)."""
    borders = {"x": streams} | other
    layers = []
    for index in range(len(streams) - 1):
        before = {name: values[index] for name, values in borders.items()}
        after = {name: values[index + 1] for name, values in borders.items()}
        update = {name: after[name] - before[name] for name in borders}
        name = f"layers.{index}.ffn"
        part = SublayerTrace(name, "main", index, "ffn", before, before, before["x"], update["x"], update, after)
        stretches = {name_: (Stretch(before[name_], after[name_], (name,), continues=False),) for name_ in borders}
        layers.append(LayerTrace("main", index, before, after, (part,), stretches))
    return Trace((StackTrace("main", tuple(borders), tuple(layers), streams[-1]),), None)


def all_bf16() -> Tensor:
    """Every finite number of bfloat16 from 0 up, in order."""
    bits = torch.arange(0x7F80, dtype=torch.int32)
    return (bits << 16).view(torch.float32).to(torch.bfloat16)


def test_half_an_ulp_of_every_bfloat16_number() -> None:
    """By brute force: half the distance to the next number in the list of all; the last one has no next."""
    numbers = all_bf16()
    steps = numbers[1:].double() - numbers[:-1].double()
    assert torch.equal(half_ulp_bf16(numbers[:-1]), steps / 2)
    assert torch.equal(half_ulp_bf16(-numbers[:-1]), steps / 2)


def test_updates_below_half_an_ulp_are_lost_and_those_above_are_not() -> None:
    """By adding in bfloat16: away from zero, an update just below the half changes nothing, one just above does."""
    numbers = all_bf16()[0x3000:0x5000]
    half = half_ulp_bf16(numbers)
    below, above = (0.99 * half).to(torch.bfloat16), (1.02 * half).to(torch.bfloat16)
    assert torch.equal(numbers + below, numbers)
    assert not (numbers + above == numbers).any()


def test_the_share_of_lost_updates() -> None:
    """A stream of 256 has steps of 2 in bfloat16 (below 256: of 1): updates below 1 are lost."""
    before = torch.full((1, 1, 4), 256.0)
    (row,) = sublayer_rows(made([before, before + torch.tensor([0.5, 0.99, 1.01, -300.0])]))
    assert row.lost_in_bf16 == 0.5


def test_sizes_of_a_sublayer() -> None:
    before, after = torch.tensor([[[3.0, 0.0], [0.0, 1.0]]]), torch.tensor([[[3.0, 4.0], [0.0, -6.0]]])
    (row,) = sublayer_rows(made([before, after]))
    assert (row.name, row.stack, row.stream, row.layer, row.kind) == ("layers.0.ffn", "main", "x", 0, "ffn")
    assert row.rms == pytest.approx(math.sqrt((9 + 16 + 36) / 4))
    assert row.update_rms == pytest.approx(math.sqrt((16 + 49) / 4))
    assert (row.max_abs, row.update_max_abs) == (6.0, 7.0)
    assert row.headroom_fp16 == pytest.approx(65504 / 6)
    assert row.cosine == pytest.approx((0 - 1) / 2)  # [3, 0] and [0, 4]; [0, 1] and [0, -7]
    assert row.angular_distance == pytest.approx((math.acos(3 / 5) / math.pi + 1) / 2)


def test_no_numbers_about_updates_that_do_not_explain_the_stream() -> None:
    found = made([torch.ones(1, 3, 4), torch.full((1, 3, 4), 2.0)])
    (layer,) = found.stacks[0].layers
    wrong = Stretch(layer.before["x"] * 1.001, layer.after["x"], ("layers.0.ffn",), continues=False)
    layer.stretches["x"] = (wrong,)
    with pytest.raises(ValueError, match="layer 0 of stack 'main', stream x"):
        sublayer_rows(found)


def test_angular_distance_in_the_plane() -> None:
    angles = torch.linspace(0, math.pi, 7, dtype=torch.float64)
    turned = torch.stack((angles.cos(), angles.sin()), dim=-1)
    for angle, vector in zip(angles, turned, strict=True):
        found = angular_distance(torch.tensor([[2.0, 0.0]]), 5 * vector[None])
        assert found == pytest.approx(angle.item() / math.pi, abs=1e-7)


def test_influence_is_that_of_the_layer_on_each_stream() -> None:
    right, up = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]])
    one, two = influences(made([right, up, up])).values()
    assert (one["x"], two["x"]) == pytest.approx((0.5, 0.0), abs=1e-7)
    found = influences(made([right, up], y=[right, right]))
    assert found["main", 0] == pytest.approx({"x": 0.5, "y": 0.0}, abs=1e-7)


LAWS: dict[str, Any] = {
    "constant": (lambda layer: 3.0, (3.0,)),
    "linear": (lambda layer: 2.0 + 0.5 * layer, (2.0, 0.5)),
    "exponential": (lambda layer: 0.1 * math.exp(0.3 * layer), (0.1, 0.3)),
}


@pytest.mark.parametrize("law", LAWS)
def test_growth_of_streams_made_to_order(law: str) -> None:
    """Gaussian streams scaled to the wanted RMS, 13 borders."""
    function, coefficients = LAWS[law]
    streams = []
    for layer in range(13):
        h = torch.randn(1, 5, 8, dtype=torch.float64)
        streams.append(h * function(layer) / rms(h))
    (found,) = growth(made(streams))
    assert found.law == law
    assert found.sizes == pytest.approx([function(layer) for layer in range(13)])
    assert found.coefficients == pytest.approx(coefficients, rel=1e-9)
    assert found.errors[law] < 1e-9


@pytest.mark.parametrize("law", LAWS)
def test_growth_with_noise(law: str) -> None:
    """Five per cent of noise: the law is found, and its error is about the noise."""
    function, coefficients = LAWS[law]
    noise = 1 + 0.05 * torch.randn(25, dtype=torch.float64)
    found = growth_law("main", "x", [function(layer) * noise[layer].item() for layer in range(25)])
    assert found.law == law
    assert found.coefficients == pytest.approx(coefficients, rel=0.1)
    assert found.errors[law] == pytest.approx(0.05, rel=0.4)


def test_growth_of_streams_that_start_at_zero_or_overflow() -> None:
    assert growth_law("main", "x", [0.0, 1.0, 2.0, 3.0]).coefficients == pytest.approx((0.0, 1.0), abs=1e-9)
    assert growth_law("main", "x", [2.0, 2.0, math.inf, math.nan]).law == "constant"
    assert growth_law("main", "x", [0.0, 0.0]).coefficients == (0.0,)


def test_planted_massive_activations() -> None:
    """Around 1, two entries above 1000 times the median, one large below it, one far above a tiny median but small."""
    h = torch.ones(1, 5, 9)
    h[0, 2, 4], h[0, 0, 7], h[0, 3, 3] = -2000.0, 1500.0, 900.0
    tiny = torch.full((1, 5, 9), 1e-4)
    tiny[0, 1, 1] = 50.0
    one, two = massive_activations(made([tiny, h, tiny]), texts=list("abcde"))
    assert (one.layer, one.token, one.text, one.channel, one.value, one.ratio) == (0, 2, "c", 4, -2000.0, 2000.0)
    assert (two.layer, two.token, two.text, two.channel, two.value, two.ratio) == (0, 0, "a", 7, 1500.0, 1500.0)


def test_the_ratio_of_two_streams() -> None:
    three, four = torch.full((1, 2, 2), 3.0), torch.full((1, 2, 2), -4.0)
    (row,) = stream_ratios(made([three, three], y=[four, four]))
    assert (row.stack, row.layer, row.ratio) == ("main", 0, 0.75)
    assert stream_ratios(made([three, three])) == ()
