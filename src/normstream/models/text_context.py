"""What the sublayers of models of tokens share in one forward pass.

Shape suffixes: T queries, S keys (cached ones included), P = 1 or the batch.
"""

import torch
from torch import Tensor

from normstream.layers import Context
from normstream.layers.links import Links
from normstream.layers.masks import alibi_mask
from normstream.layers.positions import rope_table
from normstream.models.config import TextConfig


def text_context(
    config: TextConfig,
    positions_PT: Tensor,
    mask: Tensor | None,
    n_keys: int,
    dtype: torch.dtype,
    *,
    causal: bool,
    links: Links,
    windowed: bool = False,
    rotated: int | None = None,
) -> Context:
    """Mask and positions of attention, by the configuration's kind of positions.

    Args:
        config: of the model.
        positions_PT: positions of the queries.
        mask: where a query may attend, (P, 1, T or 1, S), or None where ``causal`` says it all.
        n_keys: number of keys S; the queries are the last of them.
        dtype: of the model.
        causal: whether attention without a mask is causal.
        links: the store of the stack.
        windowed: whether it is for windowed layers, which may rotate by other angles, or alone.
        rotated: channels of a head that are rotated; None means as many as the positions' fraction says.

    >>> config = TextConfig(dim=8, n_heads=2)
    >>> text_context(config, torch.arange(3)[None], None, 3, torch.float32, causal=True, links=Links(1)).rope.cos.shape
    torch.Size([1, 1, 3, 4])
    """
    positions, n_queries, rope = config.positions, positions_PT.shape[1], None
    if positions.rotates(windowed):
        rotated = positions.rotated(config.resolved_head_dim) if rotated is None else rotated
        rope = rope_table(positions_PT, rotated, positions.theta_of(windowed), dtype, positions.pairing)
    if positions.kind == "alibi":
        mask = None if mask is None else mask.expand(-1, -1, n_queries, -1)
        mask = alibi_mask(mask, config.n_heads, n_queries, n_keys, positions_PT.device, dtype, causal=causal)
    return Context(rope, mask, causal, links=links)
