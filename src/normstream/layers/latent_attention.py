"""Multi-head latent attention: keys and values from one low-rank vector a position.

Shape suffixes: B batch, T queries, S keys, D width, H heads, N width of a head without positions, R its rotated part,
K = N + R, L width of the latent vector, V width of a value.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normstream.checks import check_types
from normstream.layers.context import Context
from normstream.layers.heads import Heads
from normstream.layers.positions import rotate


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of multi-head latent attention (MLA); off with kv_rank 0.

    Source: DeepSeek-V2, arXiv 2405.04434.

    >>> LatentConfig(kv_rank=512).query_dim
    192
    """

    kv_rank: int = 0
    """Width of the vector that keys and values are made of; 0 means ordinary attention."""
    q_rank: int = 0
    """Width of the vector that queries are made of; 0 means queries straight from the input (DeepSeek-V2-Lite)."""
    nope_head_dim: int = 128
    """Part of a query or key head without positions."""
    rope_head_dim: int = 64
    """Part of a query head that is rotated; its key is shared by all heads."""
    v_head_dim: int = 128
    """Width of a value head."""

    def __post_init__(self) -> None:
        check_types(self, "latent.")
        for name, least in (("kv_rank", 0), ("q_rank", 0), ("nope_head_dim", 1), ("v_head_dim", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"latent.{name} must be at least {least}, got {getattr(self, name)}")
        if self.rope_head_dim < 2 or self.rope_head_dim % 2:
            raise ValueError(f"latent.rope_head_dim must be even and at least 2, got {self.rope_head_dim}")
        if self.q_rank and not self.kv_rank:
            raise ValueError(
                f"latent.q_rank is {self.q_rank}, but latent.kv_rank is 0, so there is no latent attention"
            )

    @property
    def query_dim(self) -> int:
        """Width of a query or key head, both parts together."""
        return self.nope_head_dim + self.rope_head_dim


class LatentAttention(Heads):
    """Multi-head latent attention (MLA).

        c = N_kv(W_kv_down z), k_rope = R(W_k_rope z), q = W_q z or W_q N_q(W_q_down z)
        k_h = [W_k_h c; k_rope], v_h = W_v_h c, q_h = [q_nope_h; R(q_rope_h)],  o = W_o softmax(q k^T / sqrt(K)) v

    Rows of the matrices, for head h = 0 ... H - 1 (what QK-Clip scales):

    ============== ====================================== ========================================================
    wq             h K ... h K + N - 1: q_nope_h          h K + N ... (h + 1) K - 1: q_rope_h
    wkv_up         h (N + V) ... h (N + V) + N - 1: k_h   h (N + V) + N ... (h + 1) (N + V) - 1: v_h
    wkv_down       0 ... L - 1: c                         L ... L + R - 1: k_rope, shared by all heads
    ============== ====================================== ========================================================

    Args:
        dim: width D of input and update.
        n_heads: number of heads.
        sizes: the other sizes.
        layer: index of the block, its place in the KV cache, which keeps c and k_rope.
        kv_norm: the norm N_kv of width L.
        q_norm: the norm N_q of the queries' latent vector; None where queries come straight from z.
        bias: whether the matrices that make the latent vectors have biases.
        output_bias: whether the output matrix has one.
        scale: factor on the products of queries and keys; None means 1 / sqrt(K).
        options: of ``Heads``.

    Shape: ``(B, T, D)`` to ``(B, T, D)``.

    Source: DeepSeek-V2, arXiv 2405.04434; DeepSeek-V3, arXiv 2412.19437.

    >>> from normstream.layers.positions import rope_table
    >>> sizes = LatentConfig(kv_rank=4, nope_head_dim=4, rope_head_dim=2, v_head_dim=3)
    >>> attention = LatentAttention(8, n_heads=2, sizes=sizes, layer=0, kv_norm=nn.RMSNorm(4))
    >>> context = Context(rope=rope_table(torch.arange(3)[None], 2, 1e4, torch.float32, "interleaved"))
    >>> attention(torch.zeros(1, 3, 8), context).shape
    torch.Size([1, 3, 8])
    """

    value_matrices = ("wkv_up",)
    """Matrices that make the values, here with rows for keys too: rows N ... N + V - 1 of each head's N + V."""

    def __init__(
        self,
        dim: int,
        *,
        n_heads: int,
        sizes: LatentConfig,
        layer: int,
        kv_norm: nn.Module,
        q_norm: nn.Module | None = None,
        bias: bool = False,
        output_bias: bool = False,
        scale: float | None = None,
        **options: Any,
    ) -> None:
        scale = 1 / math.sqrt(sizes.query_dim) if scale is None else scale
        super().__init__(n_heads=n_heads, layer=layer, scale=scale, **options)
        self.sizes = sizes
        self.wq_down = nn.Linear(dim, sizes.q_rank, bias=bias) if sizes.q_rank else None
        self.q_norm = q_norm
        self.wq = nn.Linear(sizes.q_rank or dim, n_heads * sizes.query_dim, bias=False)
        self.wkv_down = nn.Linear(dim, sizes.kv_rank + sizes.rope_head_dim, bias=bias)
        self.kv_norm = kv_norm
        self.wkv_up = nn.Linear(sizes.kv_rank, n_heads * (sizes.nope_head_dim + sizes.v_head_dim), bias=False)
        self.wo = nn.Linear(n_heads * sizes.v_head_dim, dim, bias=output_bias)

    def forward(self, z_BTD: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T D"]:
        sizes = self.sizes
        q_BHTK = self._latent_query(z_BTD).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        q_nope, q_rope = q_BHTK.split((sizes.nope_head_dim, sizes.rope_head_dim), dim=-1)
        q_BHTK = torch.cat((q_nope, rotate(q_rope, context.rope)), dim=-1)

        c_BTL, k_rope_BTR = self.wkv_down(z_BTD).split((sizes.kv_rank, sizes.rope_head_dim), dim=-1)
        c_B1SL = self.kv_norm(c_BTL)[:, None]
        k_rope_B1SR = rotate(k_rope_BTR[:, None], context.rope)
        if context.cache is not None:
            c_B1SL, k_rope_B1SR = context.cache.extend(self.layer, c_B1SL, k_rope_B1SR)

        kv_BHSX = self.wkv_up(c_B1SL[:, 0]).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        k_nope, v_BHSV = kv_BHSX.split((sizes.nope_head_dim, sizes.v_head_dim), dim=-1)
        k_BHSK = torch.cat((k_nope, k_rope_B1SR.expand(-1, self.n_heads, -1, -1)), dim=-1)
        return self.update(q_BHTK, k_BHSK, v_BHSV, context)

    def _latent_query(self, z_BTD: Tensor) -> Tensor:
        if self.wq_down is None:
            return self.wq(z_BTD)
        q_BTL = self.wq_down(z_BTD)
        return self.wq(q_BTL if self.q_norm is None else self.q_norm(q_BTL))
