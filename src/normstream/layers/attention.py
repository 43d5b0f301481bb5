"""Self-attention with grouped queries, rotary positions and optional norms on queries, keys and values.

Shape suffixes: B batch, T queries, S keys, D width, H heads, G key-value heads, K head_dim.
"""

import math
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from normstream.layers.context import Context
from normstream.layers.heads import Heads
from normstream.layers.positions import rotate


class Attention(Heads):
    """``o = W_o softmax(R(N_q(W_q z)) R(N_k(W_k z))^T / sqrt(K)) N_v(W_v z)`` with rotary R.

    Args:
        dim: width D of input and update.
        n_heads, n_kv_heads: numbers of query heads and of key-value heads; each of the latter serves
            ``n_heads / n_kv_heads`` consecutive query heads.
        head_dim: width K of a head.
        layer: index of the block, its place in the KV cache.
        bias: whether the matrices of queries, keys and values have biases.
        output_bias: whether the output matrix has one.
        scale: factor on the products of queries and keys; None means 1 / sqrt(K).
        q_norm, k_norm, v_norm: norms of heads, ``(B, T, heads, K)`` to the same, or None.
        norm_after_rope: whether queries and keys are rotated first and normed then.
        linked_values: whether values are mixed with those of earlier layers (depth attention).
        options: of ``Heads``.

    Shape: ``(B, T, D)`` to ``(B, T, D)``.

    Source: Vaswani et al. 2017; grouped queries Ainslie et al. 2023, arXiv 2305.13245; per-head Q, K and V norms
    HybridNorm, arXiv 2503.04598.

    >>> import torch
    >>> from normstream.layers.positions import rope_table
    >>> attention = Attention(8, n_heads=2, n_kv_heads=1, head_dim=4, layer=0)
    >>> context = Context(rope=rope_table(torch.arange(3)[None], 4, 1e4, torch.float32))
    >>> attention(torch.zeros(1, 3, 8), context).shape
    torch.Size([1, 3, 8])
    """

    value_matrices = ("wv",)
    """Matrices that make the values; DeepNorm scales them like those that write to the stream."""

    def __init__(
        self,
        dim: int,
        *,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        layer: int,
        bias: bool = False,
        output_bias: bool = False,
        scale: float | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        v_norm: nn.Module | None = None,
        norm_after_rope: bool = False,
        linked_values: bool = False,
        **options: Any,
    ) -> None:
        scale = 1 / math.sqrt(head_dim) if scale is None else scale
        super().__init__(n_heads=n_heads, layer=layer, scale=scale, **options)
        self.n_kv_heads, self.head_dim = n_kv_heads, head_dim
        self.norm_after_rope, self.linked_values = norm_after_rope, linked_values
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=bias)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=bias)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=bias)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=output_bias)
        self.q_norm, self.k_norm, self.v_norm = q_norm, k_norm, v_norm

    def forward(self, z_BTD: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T D"]:
        q_BTHK = self.wq(z_BTD).unflatten(-1, (self.n_heads, self.head_dim))
        k_BTGK = self.wk(z_BTD).unflatten(-1, (self.n_kv_heads, self.head_dim))
        v_BTGK = self.wv(z_BTD).unflatten(-1, (self.n_kv_heads, self.head_dim))
        q_BHTK = self._normed_and_rotated(q_BTHK, self.q_norm, context)
        k_BGSK = self._normed_and_rotated(k_BTGK, self.k_norm, context)
        v_BGSK = (v_BTGK if self.v_norm is None else self.v_norm(v_BTGK)).transpose(1, 2)
        if self.linked_values and context.links is not None:
            v_BGSK = context.links.mix_depth(self.layer, q_BHTK, k_BGSK, v_BGSK)
        if context.cache is not None:
            k_BGSK, v_BGSK = context.cache.extend(self.layer, k_BGSK, v_BGSK)
        return self.update(q_BHTK, k_BGSK, v_BGSK, context)

    def _normed_and_rotated(self, x_BTHK: Tensor, norm: nn.Module | None, context: Context) -> Tensor:
        if norm is None:
            return rotate(x_BTHK.transpose(1, 2), context.rope)
        if self.norm_after_rope:
            return norm(rotate(x_BTHK.transpose(1, 2), context.rope).transpose(1, 2)).transpose(1, 2)
        return rotate(norm(x_BTHK).transpose(1, 2), context.rope)
