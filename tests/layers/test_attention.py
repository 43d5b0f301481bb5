"""Attention against a plain loop, rotary positions as complex rotations, grouped heads, masks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream.layers import Attention, Context
from normstream.layers.context import attention_mask, rope_table
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
    cos, sin = rope_table(torch.tensor([[3]]), 4, 1e4, torch.float64)
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
