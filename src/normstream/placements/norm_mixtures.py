"""Pre-Norm and Post-Norm in one model: Mix-LN by depth, HybridNorm within each block."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from normstream.junctions import Join, PostNormJoin, PostNormRead, PreNormJoin, PreNormRead, Read
from normstream.layers.inner import NOTHING_INNER, Inner
from normstream.placements.placement import Build, InitScheme, Slot
from normstream.placements.registry import register
from normstream.placements.single_stream import SingleStream


@register
@dataclass(frozen=True)
class MixLN(SingleStream):
    """Mix-LN: the first floor(alpha L) blocks are Post-Norm, the others Pre-Norm; the final norm is always there.

        block < alpha L:  x ---+----------- + -> N ---> x      others:  x ---+--------------- + ---> x
                               |            ^                                |                ^
                               +---> F -----+                                +-> N -> F ------+

    >>> row = MixLN(alpha=0.5).junctions(dim=2, n_layers=2)
    >>> [junction.join.__class__.__name__ for junction in row]
    ['Start', 'PostNormJoin', 'PostNormJoin', 'PreNormJoin', 'PreNormJoin']
    """

    name: ClassVar[str] = "mix_ln"
    title: ClassVar[str] = "Mix-LN"
    equation: ClassVar[str] = (
        "block < floor(alpha L): x <- N(x + o), z = x;  others: x <- x + o, z = N(x);  final: N(x)"
    )
    paper: ClassVar[str] = "Li et al. 2024, arXiv 2412.13795"
    code: ClassVar[str] = "pixeli99/MixLN:peft_pretraining/modeling_llama.py"
    differs: ClassVar[str] = (
        "the code counts Post-Norm blocks (POST_NUM) and keeps the final norm even if all blocks are Post-Norm; "
        "its embedding starts at std sqrt(2/5)"
    )

    alpha: float = 0.25
    """Share of the blocks that are Post-Norm, from the first on; 0 is Pre-Norm, 1 is post(final_norm=true)."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"mix_ln(alpha=...) must be a share of the blocks, 0 to 1, got {self.alpha}")

    def _is_post(self, slot: Slot) -> bool:
        # 0.29 * 100 is 28.999...96 in binary: without the 1e-9, alpha L would lose a block to rounding.
        return slot.layer < math.floor(self.alpha * slot.n_layers + 1e-9)

    def read(self, slot: Slot, build: Build) -> Read:
        return PostNormRead() if self._is_post(slot) else PreNormRead(build.input_norm())

    def join(self, slot: Slot, build: Build) -> Join:
        return PostNormJoin(build.norm(), build.drop(slot)) if self._is_post(slot) else PreNormJoin(build.drop(slot))


@register
@dataclass(frozen=True)
class HybridNorm(SingleStream):
    """HybridNorm: norms on queries, keys and values instead of before attention, Post-Norm before the feed-forward.

        x ---+------------------------ + -> N ---+---------- + ---> x
             |                         ^         |           ^
             +-> attention (Q, K, V) --+         +---> F ----+

    The norm's output is both the feed-forward's input and what its update is added to; a block's output is a raw sum.
    The norm sits in the join of whatever sublayer comes before a feed-forward: cross-attention, between attention and
    feed-forward, reads the raw stream as attention does, with norms on its own queries, keys and values.

    >>> [junction.join.__class__.__name__ for junction in HybridNorm().junctions(dim=2, n_layers=1)]
    ['Start', 'PostNormJoin', 'PreNormJoin']
    """

    name: ClassVar[str] = "hybridnorm"
    title: ClassVar[str] = "HybridNorm"
    equation: ClassVar[str] = (
        "attention: z = x, norms on Q, K, V, x <- N(x + o);  feed-forward: z = x, x <- x + o;  final: N(x)"
    )
    paper: ClassVar[str] = "Zhuo et al. 2025, arXiv 2503.04598"
    code: ClassVar[str] = "BryceZhuo/HybridNorm:dense_model/olmo/model.py"
    differs: ClassVar[str] = (
        "code: the Q, K and V norms act on each head, before the rotation, with one gain for all heads, the default; "
        "the MoE configuration sets attention_layer_norm and use_query_norm, which the model itself forbids"
    )
    inner: ClassVar[Inner] = replace(NOTHING_INNER, qk="model", v="model")
    init: ClassVar[InitScheme] = "megatron_full"

    def read(self, slot: Slot, build: Build) -> Read:
        return PostNormRead()

    def join(self, slot: Slot, build: Build) -> Join:
        drop = build.drop(slot)
        return PostNormJoin(build.norm(), drop) if self._ends_with_norm(slot) else PreNormJoin(drop)

    def _ends_with_norm(self, slot: Slot) -> bool:
        return slot.following == "feed_forward"


@register
@dataclass(frozen=True)
class HybridNormStar(HybridNorm):
    """HybridNorm*: HybridNorm whose first block is Pre-Norm, with the norms on queries, keys and values.

        block 0:  x ---+------------------------------ + ---+---------------- + ---> x
                       |                               ^    |                 ^
                       +-> N -> attention (Q, K, V) ---+    +--> N -> F ------+

    >>> row = HybridNormStar().junctions(dim=2, n_layers=2)
    >>> [junction.join.__class__.__name__ for junction in row]
    ['Start', 'PreNormJoin', 'PreNormJoin', 'PostNormJoin', 'PreNormJoin']
    """

    name: ClassVar[str] = "hybridnorm_star"
    title: ClassVar[str] = "HybridNorm*"
    equation: ClassVar[str] = (
        "block 0: z = N(x), x <- x + o;  others: attention z = x, x <- N(x + o), feed-forward z = x, x <- x + o;  "
        "norms on Q, K, V;  final: N(x)"
    )

    def read(self, slot: Slot, build: Build) -> Read:
        return PreNormRead(build.input_norm()) if slot.layer == 0 else PostNormRead()

    def _ends_with_norm(self, slot: Slot) -> bool:
        return slot.layer > 0 and super()._ends_with_norm(slot)
