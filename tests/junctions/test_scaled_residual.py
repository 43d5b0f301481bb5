"""Joins of DeepNorm, NormFormer, ResiDual, SpanNorm, GeoNorm and nGPT one by one: equations, dtypes, dropout."""

import math

import pytest
import torch
from torch import nn

from normstream.junctions import (
    DeepNormJoin,
    Drop,
    GeoNormJoin,
    LerpJoin,
    ResiDualJoin,
    ResidualScaleJoin,
    ResiDualStart,
    SpanJoin,
)
from normstream.norms import RMSNorm

X, UPDATE = torch.tensor([[[1.0, 4.0]]]), torch.tensor([[[1.0, -4.0]]])

JOINS = {
    "deepnorm": lambda drop: DeepNormJoin(nn.Identity(), 1.0, drop),
    "residual_scale": lambda drop: ResidualScaleJoin(4, drop),
    "residual": lambda drop: ResiDualJoin(nn.Identity(), 1.0, drop),
    "span": lambda drop: SpanJoin(drop),
}


def start(name: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x, x) if name == "residual" else (x,)


def test_deepnorm():
    """2 x + o = [3, 4]."""
    (x,) = DeepNormJoin(RMSNorm(2, eps=0.0), 2.0, Drop())((X,), UPDATE)
    torch.testing.assert_close(x, torch.tensor([[[0.8485281, 1.1313708]]]))


def test_residual_scale():
    join = ResidualScaleJoin(2, Drop())
    assert torch.equal(join.residual_scale.data, torch.ones(2))
    join.residual_scale.data = torch.tensor([2.0, 0.5])
    assert join((X,), UPDATE)[0].tolist() == [[[3.0, -2.0]]]


def test_residual():
    assert [s.tolist() for s in ResiDualStart(0.25)((), X)] == [[[[1.0, 4.0]]], [[[0.25, 1.0]]]]
    x, d = ResiDualJoin(nn.Identity(), 0.25, Drop())((X, X), UPDATE)
    assert (x.tolist(), d.tolist()) == ([[[2.0, 0.0]]], [[[1.25, 3.0]]])


def test_lerp_by_hand():
    """alpha = (0, 1): the first channel stays, the second is replaced, and the result (1, 1) is brought to length 1."""
    join = LerpJoin(2, start=0.05, drop=Drop())
    join.alpha.data = torch.tensor([0.0, -1 / (0.05 * math.sqrt(2))])
    (x,) = join((torch.tensor([[[1.0, 0.0]]]),), torch.tensor([[[0.0, 7.0]]]))
    torch.testing.assert_close(x, torch.full((1, 1, 2), math.sqrt(0.5)))


def test_lerp_with_a_zero_update():
    (x,) = LerpJoin(4, start=0.05, drop=Drop())((torch.eye(4)[:1],), torch.zeros(1, 4))
    torch.testing.assert_close(x, torch.eye(4)[:1])


@pytest.mark.parametrize("name", JOINS)
def test_small_updates_survive_in_a_float32_stream(name):
    """NVIDIA/Megatron-LM#3504: the bfloat16 update is cast up to the stream, never the stream down."""
    state = start(name, torch.full((1, 1, 4), 256.0))
    update = torch.full((1, 1, 4), 0.5, dtype=torch.bfloat16)
    new = JOINS[name](Drop())(state, update)
    assert all(stream.dtype == torch.float32 for stream in new)
    assert torch.equal(new[-1], torch.full((1, 1, 4), 256.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*JOINS, "geo_norm", "lerp"])
def test_streams_keep_a_low_precision(name, dtype):
    """Parameters in float32 do not lift the stream to their dtype."""
    joins = JOINS | {
        "geo_norm": lambda drop: GeoNormJoin(1.0, 0.5, drop),
        "lerp": lambda drop: LerpJoin(4, 0.05, drop),
    }
    join = joins[name](Drop())
    update = torch.randn(1, 2, 4).to(dtype)
    assert {s.dtype for s in join(start(name, torch.randn(1, 2, 4).to(dtype)), update)} == {dtype}
    assert {s.dtype for s in join.contributions(update)} == {dtype}


def test_one_draw_of_dropout_serves_both_streams():
    join = ResiDualJoin(nn.Identity(), 0.5, Drop(0.5)).train()
    zeros = torch.zeros(4, 8, 16)
    x, d = join((zeros, zeros), torch.ones(4, 8, 16))
    assert sorted(x.unique().tolist()) == [0.0, 2.0]
    assert torch.equal(d, 0.5 * x)


@pytest.mark.parametrize("kind", [GeoNormJoin, LerpJoin])
def test_a_dropped_path_leaves_a_sphere(kind):
    """With the whole update dropped, GeoNorm does not move x and nGPT moves it along itself, which unit() undoes."""
    first = 1.0 if kind is GeoNormJoin else 4
    join = kind(first, 0.5, Drop(0.0, 0.999)).train()
    x = nn.functional.normalize(torch.randn(3, 2, 4), dim=-1)
    torch.manual_seed(0)
    (moved,) = join((x,), torch.randn(3, 2, 4))
    torch.testing.assert_close(moved, x)


def test_lerp_of_zero_rows_has_finite_gradients():
    """A chain of them: dividing by a tiny eps again and again would overflow."""
    joins = torch.nn.ModuleList(LerpJoin(4, start=0.05, drop=Drop()) for _ in range(5))
    state, o = (torch.zeros(1, 4, requires_grad=True),), torch.zeros(1, 4, requires_grad=True)
    (start,) = state
    for join in joins:
        state = join(state, o)
    state[0].sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (start, o, *joins.parameters()))
