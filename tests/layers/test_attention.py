"""Attention against a plain loop, rotary positions as complex rotations, grouped heads, masks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream.layers import Attention, Context
from normstream.layers.masks import attention_mask
from normstream.layers.positions import rope_table
from normstream.norms import RMSNorm

DIM, HEADS, HEAD_DIM, LENGTH = 24, 4, 6, 7


def build(n_kv_heads: int = HEADS, norms: bool = False, bias: bool = False) -> Attention:
    def norm() -> nn.Module | None:
        return RMSNorm(HEAD_DIM, eps=1e-5) if norms else None

    attention = Attention(
        DIM,
        n_heads=HEADS,
        n_kv_heads=n_kv_heads,
        head_dim=HEAD_DIM,
        layer=0,
        bias=bias,
        output_bias=bias,
        q_norm=norm(),
        k_norm=norm(),
        v_norm=norm(),
    ).double()
    generator = torch.Generator().manual_seed(0)
    for p in attention.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / p.shape[-1] ** 0.25)
    return attention


def context(positions: Tensor, mask: Tensor | None = None) -> Context:
    return Context(rope=rope_table(positions, HEAD_DIM, 1e4, torch.float64), mask=mask)


def inputs(batch: int = 2) -> Tensor:
    return torch.randn(batch, LENGTH, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rotate_by_hand(x: Tensor, position: int) -> Tensor:
    """The first half of a head is the real part, the second half the imaginary part."""
    half = HEAD_DIM // 2
    angles = position * 1e4 ** (-torch.arange(half, dtype=torch.float64) * 2 / HEAD_DIM)
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag])


def attention_by_hand(a: Attention, z: Tensor, positions: list[int], documents: list[int]) -> Tensor:
    """One row (T, D), one query and one key at a time."""

    def heads(linear: nn.Linear, norm: Any, count: int) -> Tensor:
        x = (z @ linear.weight.T + (0 if linear.bias is None else linear.bias)).view(len(z), count, HEAD_DIM)
        if norm is not None:
            x = norm.weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return x

    q, k, v = heads(a.wq, a.q_norm, HEADS), heads(a.wk, a.k_norm, a.n_kv_heads), heads(a.wv, a.v_norm, a.n_kv_heads)
    rows = []
    for t in range(len(z)):
        outs = []
        for head in range(HEADS):
            group = head // (HEADS // a.n_kv_heads)
            allowed = [s for s in range(t + 1) if documents[s] == documents[t]]
            scores = torch.stack(
                [
                    rotate_by_hand(q[t, head], positions[t])
                    @ rotate_by_hand(k[s, group], positions[s])
                    / math.sqrt(HEAD_DIM)
                    for s in allowed
                ]
            )
            outs.append(torch.softmax(scores, 0) @ v[allowed, group])
        rows.append(torch.cat(outs))
    return torch.stack(rows) @ a.wo.weight.T + (0 if a.wo.bias is None else a.wo.bias)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_against_a_plain_loop(n_kv_heads, norms, bias, packed):
    attention, z = build(n_kv_heads, norms, bias), inputs(batch=1)
    documents = [0, 0, 0, 1, 1, 2, 2] if packed else [0] * LENGTH
    positions = [0, 1, 2, 0, 1, 0, 1] if packed else list(range(LENGTH))
    mask = attention_mask(torch.tensor([documents]), LENGTH, LENGTH, z.device) if packed else None
    with torch.no_grad():
        got = attention(z, context(torch.tensor([positions]), mask))[0]
        expected = attention_by_hand(attention, z[0], positions, documents)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


def test_rotary_table_by_hand():
    cos, sin, _ = rope_table(torch.tensor([[3]]), 4, 1e4, torch.float64)
    angles = [3.0, 0.03, 3.0, 0.03]
    assert cos.flatten().tolist() == pytest.approx([math.cos(a) for a in angles], abs=1e-12)
    assert sin.flatten().tolist() == pytest.approx([math.sin(a) for a in angles], abs=1e-12)


@pytest.mark.parametrize("shift", [1, 17, 1000])
def test_only_distances_between_positions_matter(shift):
    attention, z = build(), inputs()
    positions = torch.arange(LENGTH)[None]
    with torch.no_grad():
        here, there = attention(z, context(positions)), attention(z, context(positions + shift))
        stretched = attention(z, context(2 * positions))
    torch.testing.assert_close(here, there, rtol=0, atol=1e-10)
    assert (here - stretched).abs().max() > 1e-3


@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_grouped_heads_are_repeated_heads(n_kv_heads):
    """Each key-value head serves consecutive query heads."""
    grouped, full = build(n_kv_heads), build(HEADS)
    for name in ("wq", "wo"):
        getattr(full, name).weight.data.copy_(getattr(grouped, name).weight)
    for name in ("wk", "wv"):
        heads = getattr(grouped, name).weight.data.view(n_kv_heads, HEAD_DIM, DIM)
        getattr(full, name).weight.data.copy_(heads.repeat_interleave(HEADS // n_kv_heads, dim=0).flatten(0, 1))
    z, ctx = inputs(), context(torch.arange(LENGTH)[None])
    torch.testing.assert_close(grouped(z, ctx), full(z, ctx), rtol=0, atol=1e-12)


def test_head_norms_are_one_gain_of_head_dim_shared_by_all_heads():
    attention: Any = build(n_kv_heads=2, norms=True)
    assert attention.wk.weight.shape == (2 * HEAD_DIM, DIM)
    assert [n.weight.shape for n in (attention.q_norm, attention.k_norm, attention.v_norm)] == [(HEAD_DIM,)] * 3


def test_mask_of_a_chunk_after_cached_keys():
    mask = attention_mask(None, 2, 5, torch.device("cpu"))
    assert mask is not None
    assert mask.flatten(0, 2).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_low_precision_keeps_its_dtype():
    attention = build(n_kv_heads=2, norms=True).bfloat16()
    rope = rope_table(torch.arange(LENGTH)[None], HEAD_DIM, 1e4, torch.bfloat16)
    assert rope[0].dtype == torch.float32
    assert attention(inputs().bfloat16(), Context(rope=rope)).dtype == torch.bfloat16


# --- options --------------------------------------------------------------------------------------------------------


def with_options(**options: Any) -> Attention:
    made = Attention(DIM, n_heads=HEADS, n_kv_heads=HEADS, head_dim=HEAD_DIM, layer=0, **options).double()
    plain = build()
    for name in ("wq", "wk", "wv", "wo"):
        getattr(made, name).weight.data.copy_(getattr(plain, name).weight)
    return made


def heads_of(attention: Attention, z: Tensor, ctx: Context) -> Tensor:
    """What the output matrix reads, (B, T, H, K)."""
    seen = []
    hook = attention.wo.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    attention(z, ctx)
    hook.remove()
    return seen[0].unflatten(-1, (HEADS, HEAD_DIM))


def test_query_scale():
    """Twice the scale is twice the queries."""
    z, ctx = inputs(), context(torch.arange(LENGTH)[None])
    doubled = build()
    doubled.wq.weight.data.mul_(2)
    scaled = with_options(scale=2 / math.sqrt(HEAD_DIM))
    torch.testing.assert_close(scaled(z, ctx), doubled(z, ctx), rtol=0, atol=1e-12)


def test_a_high_cap_changes_nothing_and_a_low_one_averages():
    z, ctx = inputs(), context(torch.arange(LENGTH)[None])
    torch.testing.assert_close(with_options(cap=1e9)(z, ctx), build()(z, ctx), rtol=0, atol=1e-9)
    low = with_options(cap=1e-9)
    values = low.wv(z).cumsum(1) / torch.arange(1, LENGTH + 1)[:, None]
    torch.testing.assert_close(low(z, ctx), low.wo(values), rtol=0, atol=1e-7)


def test_without_causality_order_does_not_matter_but_for_positions():
    attention, z, order = build(), inputs(), torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    got = attention(z[:, order], Context(causal=False))
    torch.testing.assert_close(got, attention(z, Context(causal=False))[:, order], rtol=0, atol=1e-12)
    assert (attention(z, Context())[:, 0] - attention(z, Context(causal=False))[:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize("shared", [True, False])
def test_norm_before_or_after_the_rotation(shared):
    """A rotation keeps lengths: only a gain that differs within a pair tells the orders apart."""

    def made(after: bool) -> Attention:
        norms = {name: RMSNorm(HEAD_DIM, eps=1e-5) for name in ("q_norm", "k_norm")}
        attention: Any = with_options(norm_after_rope=after, **norms)
        gain = torch.tensor([2.0, 0.5, 1.0] * 2) if shared else torch.linspace(0.5, 2.0, HEAD_DIM)
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.data.copy_(gain)
        return attention

    z, ctx = inputs(), context(torch.arange(LENGTH)[None])
    difference = (made(True)(z, ctx) - made(False)(z, ctx)).abs().max()
    assert difference < 1e-12 if shared else difference > 1e-3


def test_head_scale_before_the_output_matrix():
    scaled, z, ctx = with_options(head_scale="before_output"), inputs(), context(torch.arange(LENGTH)[None])
    gamma = torch.tensor([2.0, -1.0, 0.5, 0.0], dtype=torch.float64)
    assert scaled.head_scale is not None
    scaled.head_scale.weight.data.copy_(gamma)
    plain = build()
    expected = plain.wo((heads_of(plain, z, ctx) * gamma[:, None]).flatten(-2))
    torch.testing.assert_close(scaled(z, ctx), expected, rtol=0, atol=1e-12)


def test_head_scale_after_the_output_matrix():
    scaled, z, ctx = with_options(head_scale="after_output"), inputs(), context(torch.arange(LENGTH)[None])
    gamma = torch.tensor([2.0, -1.0, 0.5, 0.0], dtype=torch.float64)
    assert scaled.head_scale is not None
    scaled.head_scale.weight.data.copy_(gamma)
    expected = build()(z, ctx) * gamma.repeat_interleave(DIM // HEADS)
    torch.testing.assert_close(scaled(z, ctx), expected, rtol=0, atol=1e-12)


def test_context_norm_over_all_heads():
    normed = with_options(context_norm=RMSNorm(HEADS * HEAD_DIM, eps=1e-3))
    z, ctx = inputs(), context(torch.arange(LENGTH)[None])
    plain = build()
    merged = heads_of(plain, z, ctx).flatten(-2)
    expected = plain.wo(merged / torch.sqrt(merged.square().mean(-1, keepdim=True) + 1e-3))
    torch.testing.assert_close(normed(z, ctx), expected, rtol=0, atol=1e-12)


def test_largest_logits_are_recorded_on_request_only():
    attention, z, ctx = build(n_kv_heads=2), inputs(), context(torch.arange(LENGTH)[None])
    attention(z, ctx)
    assert attention.max_logits is None
    attention.max_logits = torch.full((HEADS,), -math.inf, dtype=torch.float64)
    attention(z, ctx)
    first = attention.max_logits.clone()
    attention.wq.weight.data[HEAD_DIM : 2 * HEAD_DIM] *= 3
    attention(z, ctx)
    torch.testing.assert_close(attention.max_logits, first * torch.tensor([1.0, 3.0, 1.0, 1.0]), rtol=0, atol=1e-12)
    assert not attention.max_logits.requires_grad
    assert "max_logits" not in attention.state_dict()
