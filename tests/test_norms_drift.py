"""How the cast orders drift apart from the exact function, and from each other, over 20 norm layers.

vllm-project/vllm#42325: a kernel that multiplied by the gain before the cast, where the model casts first, was off by
the last bit in each layer, and after 20 layers almost no output agreed. The bounds here come from rounding alone: each
rounding to bfloat16 makes a relative error of at most 2^-8, and a norm passes relative errors on without making them
larger, taken over a row; it removes what is common to the row.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream.norms import NormConfig

WIDTH, ROWS, DEPTH = 1024, 64, 20
ROUNDING = 2.0**-8
ROUNDINGS = {  # of one layer: to bfloat16 before the gain, and after it
    ("after_gain", torch.bfloat16): 1,
    ("after_gain", torch.float32): 1,
    ("before_gain", torch.bfloat16): 2,
    ("before_gain", torch.float32): 2,
    ("gain_dtype", torch.bfloat16): 2,
    ("gain_dtype", torch.float32): 1,
}
CASES = [(kind, cast, dtype) for kind, (cast, dtype) in itertools.product(("rms", "layer"), ROUNDINGS)]


def gains(generator: torch.Generator) -> list[Tensor]:
    return [(1 + 0.2 * torch.randn(WIDTH, generator=generator)).bfloat16() for _ in range(DEPTH)]


def chain(kind: str, cast: str, gain_dtype: torch.dtype, input_dtype: torch.dtype) -> list[Tensor]:
    """The outputs of 20 norms in a row, in float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator).bfloat16().to(input_dtype)
    outputs = []
    for gain in gains(generator):
        norm: Any = NormConfig(kind=kind, eps=1e-6, cast=cast).build(WIDTH)  # pyright: ignore[reportArgumentType]
        norm.weight = nn.Parameter(gain.to(gain_dtype))
        x = norm(x).detach()
        outputs.append(x.double())
    return outputs


def exact_chain(kind: str) -> list[Tensor]:
    """The formula in float64, on the same bfloat16 input and gains."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator).bfloat16().double()
    outputs = []
    for gain in gains(generator):
        centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
        x = gain.double() * centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        outputs.append(x)
    return outputs


def relative_rms(error: Tensor, exact: Tensor) -> float:
    return (error.norm() / exact.norm()).item()


@pytest.mark.parametrize(("kind", "cast", "gain_dtype"), CASES)
def test_drift_is_a_random_walk_within_the_bound_of_rounding(kind, cast, gain_dtype):
    roundings = ROUNDINGS[cast, gain_dtype]
    outputs, exact = chain(kind, cast, gain_dtype, torch.bfloat16), exact_chain(kind)
    errors = [relative_rms(out - true, true) for out, true in zip(outputs, exact, strict=True)]
    one_rounding = relative_rms(exact[0].bfloat16().double() - exact[0], exact[0])
    assert one_rounding == pytest.approx(1.66e-3, rel=0.02)
    for depth, error in enumerate(errors, start=1):
        assert error == pytest.approx(one_rounding * math.sqrt(roundings * depth), rel=0.1), depth
        assert error <= depth * roundings * ROUNDING


@pytest.mark.parametrize("cast", ["after_gain", "before_gain", "gain_dtype"])
def test_single_elements_stay_within_the_bound_of_rounding(cast):
    """RMSNorm only multiplies: an element's relative error is at most twice that of the roundings so far."""
    roundings = ROUNDINGS[cast, torch.bfloat16]
    outputs, exact = chain("rms", cast, torch.bfloat16, torch.bfloat16), exact_chain("rms")
    for depth, (out, true) in enumerate(zip(outputs, exact, strict=True), start=1):
        largest = ((out - true) / true).abs().max().item()
        assert largest <= 2 * ((1 + ROUNDING) ** (roundings * depth) - 1)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_two_cast_orders_part_layer_by_layer(kind):
    """A quarter of the elements differs after one norm; after 20 most do, by more than a rounding of one layer."""
    after = chain(kind, "after_gain", torch.bfloat16, torch.bfloat16)
    before = chain(kind, "before_gain", torch.bfloat16, torch.bfloat16)
    differing = [(a != b).double().mean().item() for a, b in zip(after, before, strict=True)]
    assert 0.2 < differing[0] < 0.3
    assert differing[-1] > 0.6
    gap = relative_rms(after[-1] - before[-1], exact_chain(kind)[-1])
    independent = 1.66e-3 * math.sqrt(DEPTH * (1 + 2))
    assert 2 * 1.66e-3 < gap <= 1.1 * independent


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("cast", ["after_gain", "before_gain", "gain_dtype"])
def test_in_float32_no_order_drifts(kind, cast):
    outputs, exact = chain(kind, cast, torch.float32, torch.float32), exact_chain(kind)
    assert relative_rms(outputs[-1] - exact[-1], exact[-1]) < DEPTH * 2 * torch.finfo(torch.float32).eps


def test_a_zero_centred_gain_drifts_like_a_plain_one():
    """Gemma: 1 + w is added in float32, so there is one rounding a layer, wherever w is stored in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator).bfloat16()
    true = x.double()
    for depth in range(1, DEPTH + 1):
        offset = (0.2 * torch.randn(WIDTH, generator=generator)).bfloat16()
        norm: Any = NormConfig(gain="zero_centered", eps=1e-6).build(WIDTH)
        norm.weight = nn.Parameter(offset)
        x = norm(x).detach()
        true = (1 + offset.double()) * true / (true.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        assert relative_rms(x.double() - true, true) == pytest.approx(1.66e-3 * math.sqrt(depth), rel=0.1)
