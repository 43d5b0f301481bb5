"""Attention scores in plain steps: for what the fused kernels cannot do, and to watch the largest logit of each head.

Shape suffixes: B batch, T queries, S keys, H heads, G key-value heads, K width of a query, V width of a value.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from normstream.norms import precise_dtype


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``: close to x near 0, never beyond the cap. Source: Gemma 2, arXiv 2408.00118.

    >>> soft_cap(torch.tensor([0.0, 1e9]), 50.0)
    tensor([ 0., 50.])
    """
    return cap * torch.tanh(x / cap)


def repeat_heads(x_BGSK: Float[Tensor, "B G S K"], n_heads: int) -> Float[Tensor, "B H S K"]:
    """Each key-value head as often as there are query heads that share it.

    >>> repeat_heads(torch.tensor([1.0, 2.0]).view(1, 2, 1, 1), 4).flatten().tolist()
    [1.0, 1.0, 2.0, 2.0]
    """
    times = n_heads // x_BGSK.shape[1]
    return x_BGSK if times == 1 else x_BGSK.repeat_interleave(times, dim=1)


def masked(scores_BHTS: Float[Tensor, "B H T S"], mask: Tensor | None, *, causal: bool) -> Float[Tensor, "B H T S"]:
    """The scores with minus infinity where a query may not attend; a mask of numbers is added.

    Without a mask, ``causal`` is for as many queries as keys; what a cache needs comes as a mask.

    >>> masked(torch.zeros(1, 1, 2, 2), None, causal=True)[0, 0].tolist()
    [[0.0, -inf], [0.0, 0.0]]
    """
    if mask is None and causal:
        mask = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=scores_BHTS.device).tril()
    if mask is None:
        return scores_BHTS
    return scores_BHTS.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores_BHTS + mask


def attention_in_steps(
    q_BHTK: Float[Tensor, "B H T K"],
    k_BGSK: Float[Tensor, "B G S K"],
    v_BGSV: Float[Tensor, "B G S V"],
    *,
    scale: float,
    mask: Tensor | None,
    causal: bool,
    cap: float | None,
    previous_BHTS: Tensor | None,
) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T S"]]:
    """``s = scale q k^T + s_previous`` and ``softmax(mask(cap(s))) v``; returns the heads and s.

    >>> one = torch.ones(1, 1, 1, 1)
    >>> heads, scores = attention_in_steps(
    ...     one, one, 2 * one, scale=0.5, mask=None, causal=True, cap=None, previous_BHTS=one
    ... )
    >>> heads.item(), scores.item()
    (2.0, 1.5)
    """
    n_heads = q_BHTK.shape[1]
    scores_BHTS = q_BHTK @ repeat_heads(k_BGSK, n_heads).mT * scale
    if previous_BHTS is not None:
        scores_BHTS = scores_BHTS + previous_BHTS
    capped = scores_BHTS if cap is None else soft_cap(scores_BHTS, cap)
    weights = masked(capped, mask, causal=causal).softmax(-1, dtype=precise_dtype(v_BGSV)).to(v_BGSV.dtype)
    return weights @ repeat_heads(v_BGSV, n_heads), scores_BHTS


@torch.no_grad()
def record_max_logits(
    record_H: Tensor,
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    *,
    scale: float,
    mask: Tensor | None,
    causal: bool,
    chunk: int = 128,
) -> None:
    """Raises each head's entry of ``record_H`` to its largest ``scale q k`` over the batch and the pairs that attend.

    Computed in float32 (float64 for float64), for ``chunk`` queries at a time. Biases, caps and linked scores are left
    out: this is the part that grows with the weights of queries and keys.

    >>> record, one = torch.full((1,), -torch.inf), torch.ones(1, 1, 1, 1)
    >>> record_max_logits(record, one, 3 * one, scale=2.0, mask=None, causal=True)
    >>> record
    tensor([6.])
    """
    high = precise_dtype(q_BHTK)
    n_queries, n_keys = q_BHTK.shape[2], k_BGSK.shape[2]
    k_BHSK = repeat_heads(k_BGSK, q_BHTK.shape[1]).to(high)
    keys = torch.arange(n_keys, device=q_BHTK.device)
    if mask is None and causal:
        allowed = (keys[n_keys - n_queries :, None] >= keys)[None, None]
    else:
        allowed = ~torch.isneginf(mask) if mask is not None and mask.is_floating_point() else mask
    if allowed is not None:
        allowed = allowed.expand(-1, -1, n_queries, -1)  # a mask of padding is one row for all queries
    for start in range(0, n_queries, chunk):
        rows = slice(start, start + chunk)
        with torch.autocast(q_BHTK.device.type, enabled=False):
            logits = q_BHTK[:, :, rows].to(high) @ k_BHSK.mT * scale
        if allowed is not None:
            logits = logits.masked_fill(~allowed[:, :, rows], -torch.inf)
        record_H.copy_(torch.maximum(record_H, logits.amax((0, 2, 3)).to(record_H)))
