"""Norms inside attention against formulas: statistics, gains, kinds, casts."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from normstream.layers.head_norm import HeadScale, head_norm, inner_norm
from normstream.norms import NormConfig

HEADS, DIM = 3, 4
SIZES = {"shared": DIM, "per_head": HEADS * DIM, "number": 1, "number_per_head": HEADS, "none": 0}


def heads() -> Tensor:
    return torch.randn(2, 5, HEADS, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def build(inner: Any, statistics: Any, gain: Any, **conventions: Any) -> Any:
    norm = head_norm(inner, NormConfig(**conventions), HEADS, DIM, statistics=statistics, gain=gain)
    assert norm is not None
    norm.double()
    generator = torch.Generator().manual_seed(1)
    for parameter in norm.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return norm


def by_hand(kind: str, statistics: str, gain: str, g: Tensor | None, x: Tensor, eps: float) -> Tensor:
    """One row of heads (H, K), one head at a time."""
    out = torch.empty_like(x)
    for h in range(HEADS):
        seen = x.flatten() if statistics == "all_heads" else x[h]
        if kind == "l2":
            y = x[h] / math.sqrt(sum(v**2 for v in seen.tolist()))
        else:
            mean = seen.mean() if kind == "layer" else 0.0
            y = (x[h] - mean) / torch.sqrt(((seen - mean) ** 2).mean() + eps)
        if g is not None:
            pick = {
                "shared": g,
                "per_head": g[h * DIM : (h + 1) * DIM],
                "number": g,
                "number_per_head": g[h : h + 1],
            }
            y = pick[gain] * y
        out[h] = y
    return out


@pytest.mark.parametrize("kind", ["model", "rms", "layer", "l2"])
@pytest.mark.parametrize("statistics", ["head", "all_heads"])
@pytest.mark.parametrize("gain", SIZES)
def test_every_kind_with_every_statistic_and_gain(kind, statistics, gain):
    norm, x = build(kind, statistics, gain, eps=1e-3), heads()
    assert sum(p.numel() for p in norm.parameters()) == SIZES[gain]
    g = next(norm.parameters(), None)
    official = "rms" if kind == "model" else kind
    got = norm(x)
    for b in range(2):
        for t in range(5):
            expected = by_hand(official, statistics, gain, g, x[b, t], 1e-3)
            torch.testing.assert_close(got[b, t], expected, rtol=0, atol=1e-12)


def test_full_width_over_two_heads():
    """The case that tells statistics over a head from statistics over all of them: [3, 4 | 0, 0]."""
    x = torch.tensor([[[[3.0, 4.0], [0.0, 0.0]]]])
    config = NormConfig(eps=0.0)
    full = head_norm("rms", config, 2, 2, statistics="all_heads", gain="per_head")
    each = head_norm("rms", NormConfig(eps=1e-30), 2, 2, statistics="head", gain="per_head")
    assert full is not None
    assert each is not None
    assert full(x).flatten().tolist() == pytest.approx([1.2, 1.6, 0, 0], abs=1e-6)
    assert each(x).flatten().tolist() == pytest.approx([0.8485281, 1.1313708, 0, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("statistics", "gain", "sizes"), [("head", "shared", (64, 64)), ("all_heads", "per_head", (512, 128))]
)
def test_queries_and_keys_have_gains_of_their_own_head_counts(statistics, gain, sizes):
    norms: list[Any] = [head_norm("rms", NormConfig(), n, 64, statistics=statistics, gain=gain) for n in (8, 2)]
    assert tuple(norm.weight.numel() for norm in norms) == sizes


def test_zero_centered_gains_start_at_zero_and_count_from_one():
    norm: Any = head_norm("model", NormConfig(gain="zero_centered"), HEADS, DIM, gain="per_head")
    assert torch.equal(norm.weight, torch.zeros(HEADS * DIM))
    norm.double().weight.data.fill_(0.5)
    plain: Any = head_norm("model", NormConfig(), HEADS, DIM, gain="per_head")
    plain.double().weight.data.fill_(1.5)
    torch.testing.assert_close(norm(heads()), plain(heads()), rtol=0, atol=1e-14)


def test_a_norm_without_gain_has_none_here_either():
    norm = head_norm("model", NormConfig(gain="none"), HEADS, DIM, statistics="all_heads", gain="per_head")
    assert norm is not None
    assert list(norm.parameters()) == []


@pytest.mark.parametrize("gain", ["shared", "number", "per_head"])
def test_unit_vectors_start_with_the_scale_of_an_rms_norm(gain):
    norm: Any = head_norm("l2", NormConfig(), HEADS, DIM, gain=gain)
    length = norm(heads().float()).norm(dim=-1)
    torch.testing.assert_close(length, torch.full_like(length, math.sqrt(DIM)))


def test_the_casts_of_the_released_models():
    """Before the gain: the normed vector is rounded first, then the product."""
    x, gain = heads().bfloat16(), torch.tensor([1.1, 0.9, 1.3, 0.7]).bfloat16()
    high = x.float() / torch.sqrt(x.float().square().mean((-2, -1), keepdim=True) + 1e-5)
    expectations: dict[Any, Tensor] = {
        "after_gain": (high * gain.float()).bfloat16(),
        "before_gain": high.bfloat16() * gain,
    }
    for cast, expected in expectations.items():
        norm: Any = head_norm("model", NormConfig(cast=cast), HEADS, DIM, statistics="all_heads", gain="shared")
        norm.bfloat16().weight.data.copy_(gain)
        assert torch.equal(norm(x), expected)


def test_layer_norm_biases_follow_the_gain():
    norm: Any = build("model", "head", "per_head", kind="layer", bias=True, eps=1e-3)
    x = heads()
    centred = x - x.mean(-1, keepdim=True)
    plain = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-3)
    expected = plain * norm.weight.view(HEADS, DIM) + norm.bias.view(HEADS, DIM)
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-12)


def test_no_norm_is_none():
    assert inner_norm("none", NormConfig(), 8) is None


def test_head_scale():
    scale, x = HeadScale(HEADS).double(), heads()
    assert torch.equal(scale(x), x)
    scale.weight.data.copy_(torch.tensor([2.0, -1.0, 0.5]))
    torch.testing.assert_close(scale(x), torch.stack([2 * x[:, :, 0], -x[:, :, 1], x[:, :, 2] / 2], dim=2))
