"""Attention in steps against the fused kernel and a plain loop; the largest logit of each head."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normstream.layers.masks import alibi_mask, attention_mask
from normstream.layers.scores import attention_in_steps, record_max_logits, soft_cap

HEADS, GROUPS, LENGTH, DIM = 4, 2, 6, 8
CPU = torch.device("cpu")


def qkv(n_queries: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, n_queries, DIM), (GROUPS, LENGTH, DIM), (GROUPS, LENGTH, 5)
    q, k, v = (torch.randn(2, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


def masks() -> dict[str, tuple[Tensor | None, bool]]:
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2]])
    boolean = attention_mask(documents, LENGTH, LENGTH, CPU, window=2)
    return {
        "causal": (None, True),
        "full": (None, False),
        "boolean": (boolean, True),
        "numbers": (alibi_mask(boolean, HEADS, LENGTH, LENGTH, CPU, torch.float64), True),
    }


@pytest.mark.parametrize("name", masks())
def test_steps_equal_the_fused_kernel(name):
    (mask, causal), (q, k, v) = masks()[name], qkv()
    got, _ = attention_in_steps(q, k, v, scale=0.3, mask=mask, causal=causal, cap=None, previous_BHTS=None)
    expected = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None and causal, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_cap_and_previous_scores_by_hand():
    q, k, v = qkv()
    previous = torch.randn(2, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got, scores = attention_in_steps(q, k, v, scale=0.5, mask=None, causal=True, cap=2.0, previous_BHTS=previous)
    for h in range(HEADS):
        for t in range(LENGTH):
            s = torch.stack([0.5 * q[1, h, t] @ k[1, h // 2, j] + previous[1, h, t, j] for j in range(LENGTH)])
            torch.testing.assert_close(scores[1, h, t], s, rtol=0, atol=1e-12)
            capped = torch.tensor([2 * math.tanh(x / 2) for x in s[: t + 1].tolist()], dtype=torch.float64)
            expected = torch.softmax(capped, 0) @ v[1, h // 2, : t + 1]
            torch.testing.assert_close(got[1, h, t], expected, rtol=0, atol=1e-12)


def test_pb_relaxed_attention_is_the_same_function():
    """CogView: softmax(alpha (q k / (alpha sqrt(K)) - row maximum)) with alpha = 32, on logits of some hundreds."""
    q, k, v = qkv()
    q = 100 * q
    got, scores = attention_in_steps(q, k, v, scale=DIM**-0.5, mask=None, causal=False, cap=None, previous_BHTS=None)
    k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
    relaxed = (q / (32 * math.sqrt(DIM))) @ k.transpose(-1, -2)
    weights = (32 * (relaxed - relaxed.amax(-1, keepdim=True))).softmax(-1)
    assert scores.max() > 200
    torch.testing.assert_close(got, weights @ v, rtol=0, atol=1e-12)


def test_soft_cap():
    x = torch.tensor([-100.0, -1.0, 0.0, 1e-3, 100.0], dtype=torch.float64)
    assert soft_cap(x, 30.0).tolist() == pytest.approx([30 * math.tanh(v / 30) for v in x.tolist()], abs=1e-12)


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("chunk", [1, 4, 128])
def test_largest_logits(name, chunk):
    (mask, causal), (q, k, _) = masks()[name], qkv()
    record = torch.full((HEADS,), -math.inf, dtype=torch.float64)
    record_max_logits(record, q, k, scale=0.3, mask=mask, causal=causal, chunk=chunk)
    documents = [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2]]
    for h in range(HEADS):
        best = -math.inf
        for b in range(2):
            for t in range(LENGTH):
                for s in range(LENGTH):
                    attends = s <= t or name == "full"
                    if name in ("boolean", "numbers"):
                        attends = attends and t - s < 2 and documents[b][t] == documents[b][s]
                    if attends:
                        best = max(best, 0.3 * (q[b, h, t] @ k[b, h // 2, s]).item())
        assert record[h].item() == pytest.approx(best, abs=1e-12)


def test_the_record_only_rises():
    q, k, _ = qkv()
    record = torch.tensor([1e9, -math.inf, -math.inf, 1e9], dtype=torch.float64)
    for _ in range(2):
        record_max_logits(record, q, k, scale=0.3, mask=None, causal=True)
        seen = record.clone()
    assert record[[0, 3]].tolist() == [1e9, 1e9]
    assert torch.equal(record, seen)
    record_max_logits(record, 2 * q, k, scale=0.3, mask=None, causal=True)
    torch.testing.assert_close(record[1:3], 2 * seen[1:3])


def test_queries_after_cached_keys():
    q, k, _ = qkv()
    whole, parts = (torch.full((HEADS,), -math.inf, dtype=torch.float64) for _ in range(2))
    record_max_logits(whole, q, k, scale=1.0, mask=None, causal=True)
    record_max_logits(parts, q[:, :, :4], k[:, :, :4], scale=1.0, mask=None, causal=True)
    late = attention_mask(None, 2, LENGTH, CPU)
    record_max_logits(parts, q[:, :, 4:], k, scale=1.0, mask=late, causal=True)
    assert torch.equal(whole, parts)
