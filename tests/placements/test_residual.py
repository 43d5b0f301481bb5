"""ResiDual and SpanNorm: streams followed by hand, options, errors."""

import pytest
import torch
from torch import nn

from normstream import placements
from normstream.norms import NormConfig


def layer_norm(x: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + eps).sqrt()


LAYER = NormConfig(kind="layer", eps=1e-5, bias=True)


@pytest.mark.parametrize("input_norm", [False, True])
@pytest.mark.parametrize(("scale", "alpha"), [(1.0, 1.0), (0.05, 0.3)])
def test_residual_by_hand(input_norm, scale, alpha, run_row):
    name = f"residual(scale={scale},alpha={alpha},input_norm={str(input_norm).lower()})"
    row = nn.ModuleList(placements.get(name).junctions(dim=6, n_layers=2, norm=LAYER)).double()
    embedding, *updates = torch.randn(5, 2, 3, 6, dtype=torch.float64)
    states, inputs = run_row(row, embedding, [lambda z, o=o: o for o in updates])
    x, d = embedding, scale * embedding
    for i, (state, z) in enumerate(zip(states, inputs, strict=True)):
        if i > 0:
            x, d = layer_norm(x + updates[i - 1]), d + scale * updates[i - 1]
        torch.testing.assert_close(state[0], x)
        torch.testing.assert_close(state[1], d)
        read = layer_norm(x) if input_norm else x
        torch.testing.assert_close(z, alpha * x + layer_norm(d, 1e-7) if i == 4 else read)


def test_zero_rows_of_padding_stay_finite(run_row):
    row = nn.ModuleList(placements.get("residual").junctions(dim=4, n_layers=1))
    embedding = torch.zeros(1, 2, 4, requires_grad=True)
    _, inputs = run_row(row, embedding, [torch.zeros_like] * 2)
    inputs[-1].sum().backward()
    assert embedding.grad is not None
    assert inputs[-1].isfinite().all()
    assert embedding.grad.isfinite().all()


def test_the_sum_grows_slower_with_a_scale(run_row):
    """The reason for lambda: with fp16 numbers a sum of large updates overflows, 0.05 of it does not."""
    big = [lambda z: torch.full_like(z, 6000.0, dtype=torch.float16)] * 12
    ends = {}
    for scale in (1.0, 0.05):
        row = nn.ModuleList(placements.get(f"residual(scale={scale})").junctions(dim=4, n_layers=6))
        states, _ = run_row(row, torch.ones(1, 1, 4, dtype=torch.float16), big)
        ends[scale] = states[-1][1]
    assert ends[1.0].isinf().all()
    torch.testing.assert_close(ends[0.05], torch.full((1, 1, 4), 3600.0, dtype=torch.float16), rtol=1e-2, atol=0)


@pytest.mark.parametrize("option", ["scale=nan", "alpha=inf", "dual_eps=nan", "dual_eps=inf", "dual_eps=-1"])
def test_residual_rejects_numbers_that_are_not_finite(option):
    with pytest.raises(ValueError, match="finite"):
        placements.get(f"residual({option})")


def test_span_norm_by_hand(run_row):
    """Y = N1(X + A(X)), X' = N2(X + M(Y)); the first attention reads a normed embedding, its residual is raw."""
    row = nn.ModuleList(placements.get("span_norm").junctions(dim=6, n_layers=2, norm=LAYER)).double()
    embedding, a1, m1, a2, m2 = torch.randn(5, 2, 3, 6, dtype=torch.float64)
    states, inputs = run_row(row, embedding, [lambda z, o=o: o for o in (a1, m1, a2, m2)])
    x1 = layer_norm(embedding + m1)
    x2 = layer_norm(x1 + m2)
    wanted = [layer_norm(embedding), layer_norm(embedding + a1), x1, layer_norm(x1 + a2), x2]
    for z, w in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(z, w)
    for state, x in zip(states, (embedding, embedding, x1, x1, x2), strict=True):
        assert len(state) == 1
        torch.testing.assert_close(state[0], x)


def test_span_norm_is_for_attention_and_feed_forward():
    with pytest.raises(ValueError, match="attention and feed_forward, got feed_forward"):
        placements.get("span_norm").junctions(dim=4, n_layers=1, sublayers=("feed_forward",))


def test_span_norm_beside_post_norm(run_row):
    """At the border of two ranges the state is the stream alone."""
    row = nn.ModuleList(placements.get("span_norm:0,post:1-").junctions(dim=4, n_layers=2))
    states, _ = run_row(row, torch.randn(1, 2, 4), [torch.tanh] * 4)
    assert [len(state) for state in states] == [1] * 5
