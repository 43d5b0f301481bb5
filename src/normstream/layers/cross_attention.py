"""Cross-attention: from the decoder's positions to those of the encoder's output.

Shape suffixes: B batch, T queries, M positions of the memory, D width, H heads, G key-value heads, K head_dim.
"""

from jaxtyping import Float
from torch import Tensor, nn

from normstream.layers.attention import Attention
from normstream.layers.context import Context


class CrossAttention(Attention):
    """``o = W_o softmax(N_q(W_q z) N_k(W_k m)^T / sqrt(K)) N_v(W_v m)`` with the memory m of the context.

    The memory is the encoder's final hidden vectors. Nothing is rotated and no position bias is added, since distances
    between positions of two sequences say nothing, and every query sees every position of the memory that
    ``memory_mask`` does not hide. With a cache, keys and values are computed once per sequence. Linked scores are
    those of earlier layers' cross-attention.

    The arguments are those of ``Attention``; ``norm_after_rope`` and ``linked_values`` change nothing here.

    Raises ValueError without a memory.

    Shape: ``(B, T, D)`` and a memory ``(B, M, D)`` to ``(B, T, D)``.

    Source: Vaswani et al. 2017, arXiv 1706.03762.

    >>> import torch
    >>> attention = CrossAttention(8, n_heads=2, n_kv_heads=1, head_dim=4, layer=0)
    >>> attention(torch.zeros(1, 3, 8), Context(memory=torch.zeros(1, 5, 8))).shape
    torch.Size([1, 3, 8])
    """

    def forward(self, z_BTD: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T D"]:
        q_BHTK = _heads(self.wq(z_BTD), self.n_heads, self.q_norm)
        if context.cache is None:
            k_BGMK, v_BGMK = self._keys_and_values(context)
        else:
            k_BGMK, v_BGMK = context.cache.memory(self.layer, lambda: self._keys_and_values(context))
        links = None if context.links is None else context.links.cross
        return self.update(
            q_BHTK, k_BGMK, v_BGMK, context._replace(mask=context.memory_mask, causal=False, links=links)
        )

    def _keys_and_values(self, context: Context) -> tuple[Tensor, Tensor]:
        if context.memory is None:
            raise ValueError("cross-attention needs the encoder's output; give Context(memory=...)")
        keys = _heads(self.wk(context.memory), self.n_kv_heads, self.k_norm)
        return keys, _heads(self.wv(context.memory), self.n_kv_heads, self.v_norm)


def _heads(x_BTX: Tensor, n_heads: int, norm: nn.Module | None) -> Tensor:
    """The heads of a projection, normed where there is a norm."""
    x_BTHK = x_BTX.unflatten(-1, (n_heads, -1))
    return (x_BTHK if norm is None else norm(x_BTHK)).transpose(1, 2)
