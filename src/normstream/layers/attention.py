"""Causal self-attention with grouped queries, rotary positions and optional per-head norms on Q, K and V.

Shape suffixes: B batch, T queries, S keys, D width, H heads, G key-value heads, K head_dim.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normstream.layers.context import Context, rotate


class KVCache:
    """Keys and values of all earlier positions, one pair a layer, appended to by each forward pass.

    >>> KVCache().length
    0
    """

    def __init__(self) -> None:
        self._keys_values: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """Number of positions seen."""
        return self._keys_values[0][0].shape[2] if self._keys_values else 0

    def extend(self, layer: int, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the new keys and values of one layer and returns all of them."""
        if layer in self._keys_values:
            old_k, old_v = self._keys_values[layer]
            k_BGTK, v_BGTK = torch.cat((old_k, k_BGTK), dim=2), torch.cat((old_v, v_BGTK), dim=2)
        self._keys_values[layer] = k_BGTK, v_BGTK
        return k_BGTK, v_BGTK


class Attention(nn.Module):
    """``o = W_o softmax(R(N_q(W_q z)) R(N_k(W_k z))^T / sqrt(K)) N_v(W_v z)`` with rotary R and causal mask.

    Args:
        dim: width D of input and update.
        n_heads, n_kv_heads: numbers of query heads and of key-value heads; each of the latter serves
            ``n_heads / n_kv_heads`` consecutive query heads.
        head_dim: width K of a head.
        layer: index of the block, its place in the KV cache.
        bias: whether the four matrices have biases.
        q_norm, k_norm, v_norm: norms of width K, applied to each head before the rotation, or None.

    Shape: ``(B, T, D)`` to ``(B, T, D)``.

    Source: Vaswani et al. 2017; grouped queries Ainslie et al. 2023, arXiv 2305.13245; per-head Q, K and V norms
    HybridNorm, arXiv 2503.04598.

    >>> from normstream.layers.context import rope_table
    >>> attention = Attention(8, n_heads=2, n_kv_heads=1, head_dim=4, layer=0)
    >>> context = Context(rope=rope_table(torch.arange(3)[None], 4, 1e4, torch.float32))
    >>> attention(torch.zeros(1, 3, 8), context).shape
    torch.Size([1, 3, 8])
    """

    branch_outputs = ("wo",)
    """Matrices that write to the residual stream; initializations scale them with depth."""

    def __init__(
        self,
        dim: int,
        *,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        layer: int,
        bias: bool = False,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        v_norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim, self.layer = n_heads, n_kv_heads, head_dim, layer
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=bias)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=bias)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=bias)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=bias)
        self.q_norm, self.k_norm, self.v_norm = q_norm, k_norm, v_norm

    def forward(self, z_BTD: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T D"]:
        q_BTHK = self.wq(z_BTD).unflatten(-1, (self.n_heads, self.head_dim))
        k_BTGK = self.wk(z_BTD).unflatten(-1, (self.n_kv_heads, self.head_dim))
        v_BTGK = self.wv(z_BTD).unflatten(-1, (self.n_kv_heads, self.head_dim))
        if self.q_norm is not None:
            q_BTHK = self.q_norm(q_BTHK)
        if self.k_norm is not None:
            k_BTGK = self.k_norm(k_BTGK)
        if self.v_norm is not None:
            v_BTGK = self.v_norm(v_BTGK)

        q_BHTK = rotate(q_BTHK.transpose(1, 2), context.rope)
        k_BGSK = rotate(k_BTGK.transpose(1, 2), context.rope)
        v_BGSK = v_BTGK.transpose(1, 2)
        if context.cache is not None:
            k_BGSK, v_BGSK = context.cache.extend(self.layer, k_BGSK, v_BGSK)
        o_BHTK = F.scaled_dot_product_attention(
            q_BHTK,
            k_BGSK,
            v_BGSK,
            attn_mask=context.mask,
            is_causal=context.mask is None,
            enable_gqa=self.n_heads != self.n_kv_heads,
        )
        return self.wo(o_BHTK.transpose(1, 2).flatten(-2))
