"""From the queries, keys and values of all heads to the update: what ordinary and latent attention share.

Shape suffixes: B batch, T queries, S keys, D width, H heads, G key-value heads, K width of a query, V of a value.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normstream.layers.context import Context
from normstream.layers.head_norm import HeadScale
from normstream.layers.inner import HeadScale as HeadScalePlace
from normstream.layers.scores import attention_in_steps, record_max_logits


class Heads(nn.Module):
    """``o = W_o N(gamma softmax(cap(scale q k^T)) v)`` with an optional norm N of the merged heads.

    Args:
        n_heads: number of query heads.
        layer: index of the block.
        scale: factor on the products of queries and keys.
        cap: soft cap of the scores, or None.
        linked_scores: whether the scores of the previous such layer are added to these (RealFormer, arXiv 2012.11747).
        context_norm: the norm N of width H V, or None.
        head_scale: a learned factor for each head, ``before_output`` on the heads (NormFormer's paper), or
            ``after_output`` on H slices of what ``wo`` gives (its released code), or ``none``.

    Subclasses have the output matrix ``wo``. While ``max_logits`` is a tensor (H,), each forward pass raises its
    entries to the largest ``scale q k`` of the head over the batch and all pairs that attend; doing so again with the
    same input changes nothing.
    """

    branch_outputs = ("wo",)
    """Matrices that write to the residual stream; initializations scale them with depth."""

    wo: nn.Linear

    def __init__(
        self,
        *,
        n_heads: int,
        layer: int,
        scale: float,
        cap: float | None = None,
        linked_scores: bool = False,
        context_norm: nn.Module | None = None,
        head_scale: HeadScalePlace = "none",
    ) -> None:
        super().__init__()
        self.n_heads, self.layer, self.scale, self.cap = n_heads, layer, scale, cap
        self.linked_scores, self.head_scale_place = linked_scores, head_scale
        self.max_logits: Tensor | None = None
        self.context_norm = context_norm
        self.head_scale = None if head_scale == "none" else HeadScale(n_heads)

    def update(
        self,
        q_BHTK: Float[Tensor, "B H T K"],
        k_BGSK: Float[Tensor, "B G S K"],
        v_BGSV: Float[Tensor, "B G S V"],
        context: Context,
    ) -> Float[Tensor, "B T D"]:
        """The update, from queries and keys that are normed and rotated already."""
        mask = context.mask
        if mask is not None and mask.is_floating_point():
            mask = mask.to(q_BHTK.dtype)
        if self.max_logits is not None:
            record_max_logits(self.max_logits, q_BHTK, k_BGSK, scale=self.scale, mask=mask, causal=context.causal)
        if self.cap is None and not self.linked_scores:
            o_BHTV = F.scaled_dot_product_attention(
                q_BHTK,
                k_BGSK,
                v_BGSV,
                attn_mask=mask,
                is_causal=mask is None and context.causal,
                scale=self.scale,
                enable_gqa=q_BHTK.shape[1] != k_BGSK.shape[1],
            )
        else:
            o_BHTV = self._in_steps(q_BHTK, k_BGSK, v_BGSV, mask, context)
        return self._output(o_BHTV.transpose(1, 2))

    def _in_steps(
        self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, mask: Tensor | None, context: Context
    ) -> Tensor:
        links = context.links if self.linked_scores else None
        o_BHTV, scores_BHTS = attention_in_steps(
            q_BHTK,
            k_BGSK,
            v_BGSV,
            scale=self.scale,
            mask=mask,
            causal=context.causal,
            cap=self.cap,
            previous_BHTS=None if links is None else links.previous_scores(self.layer),
        )
        if links is not None:
            links.keep_scores(self.layer, scores_BHTS)
        return o_BHTV

    def _output(self, heads_BTHV: Tensor) -> Tensor:
        if self.head_scale is not None and self.head_scale_place == "before_output":
            heads_BTHV = self.head_scale(heads_BTHV)
        merged = heads_BTHV.flatten(-2)
        if self.context_norm is not None:
            merged = self.context_norm(merged)
        update_BTD = self.wo(merged)
        if self.head_scale is not None and self.head_scale_place == "after_output":
            update_BTD = self.head_scale(update_BTD.unflatten(-1, (self.n_heads, -1))).flatten(-2)
        return update_BTD
