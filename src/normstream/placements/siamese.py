"""SiameseNorm in its two published wirings, post-pre and hybrid-pre."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import nn

from normstream.junctions import HybridPreRead, Join, Read, SiameseJoin, SiameseRead, SiameseStart
from normstream.layers.inner import NOTHING_INNER, Inner
from normstream.placements.placement import Build, InitScheme, Placement, Slot
from normstream.placements.registry import register

DepthScale = Literal["code", "paper", "sublayer", "none"]
ReadOut = Literal["code", "paper"]


def depth_scale(kind: DepthScale, slot: Slot) -> float:
    """1 / c, the factor of the x stream's updates, for block l and sublayer s, both counted from 0.

    ``code`` 1/sqrt(2(l+1)), ``paper`` 1/sqrt(l+1), ``sublayer`` 1/sqrt(s+1), ``none`` 1.

    >>> slot = Slot.row([("attention", "feed_forward")] * 2)[2]
    >>> [round(depth_scale(kind, slot), 4) for kind in ("code", "paper", "sublayer", "none")]
    [0.5, 0.7071, 0.5774, 1.0]
    """
    square = {"code": 2 * (slot.layer + 1), "paper": slot.layer + 1, "sublayer": slot.index + 1, "none": 1}
    return 1 / math.sqrt(square[kind])


@dataclass(frozen=True)
class _Siamese(Placement):
    """The options that both wirings share."""

    streams: ClassVar[tuple[str, ...]] = ("x", "y")
    paper: ClassVar[str] = "SiameseNorm, arXiv 2602.08064"

    depth_scale: DepthScale = "code"
    """Scale of the x stream's updates: code 1/sqrt(2(l+1)), paper 1/sqrt(l+1), sublayer 1/sqrt(s+1), none 1."""
    read_out: ReadOut = "code"
    """Final hidden vector: code N(N(x) + N(y)), paper N(x) + N(y), where N(x) is the last join's norm."""
    embedding_norm: bool = True
    """Whether the x stream starts as the normed embedding (released post-pre code) or raw (paper, hybrid-pre)."""
    input_norm: bool = True
    """Whether a norm is on the sum of the streams before a sublayer."""

    def first(self, build: Build) -> nn.Module:
        return SiameseStart(build.norm() if self.embedding_norm else None)

    def last_read(self, build: Build) -> Read:
        return SiameseRead(build.norm(), build.input_norm() if self.read_out == "code" else None)


@register
@dataclass(frozen=True)
class SiameseNorm(_Siamese):
    """SiameseNorm post-pre: a Post-Norm-like stream x and a Pre-Norm-like stream y share every sublayer.

        x ---+--------------------- + -> N_x --> x
             |                      ^ / c
             +-> + -> N_in -> F ----+
                 ^                  v
             +- N_y                 |
             |                      |
        y ---+--------------------- + ---------> y

    The same junction stands N + 1 times, the first and the last included. ``siamese(depth_scale=paper,read_out=paper,
    embedding_norm=false,input_norm=false)`` is the paper's Algorithm 1 with its depth scale.

    >>> first, inner, last = SiameseNorm().junctions(dim=4, n_layers=1, sublayers=("attention", "feed_forward"))
    >>> round(inner.join.scale, 4)
    0.7071
    """

    name: ClassVar[str] = "siamese"
    title: ClassVar[str] = "SiameseNorm (post-pre)"
    equation: ClassVar[str] = "x <- N_x(x + o/c), y <- y + o;  z = N_in(x + N_y(y));  c = sqrt(2(l+1))"
    code: ClassVar[str] = "Qwen-Applications/SiameseNorm:deit-model-siamesenorm.py"
    differs: ClassVar[str] = (
        "paper: c = sqrt(l+1), raw embedding on x, read-out x + N(y), input norm as an add-on; "
        "the defaults are the code's"
    )

    def read(self, slot: Slot, build: Build) -> Read:
        return SiameseRead(build.norm(), build.input_norm() if self.input_norm else None)

    def join(self, slot: Slot, build: Build) -> Join:
        return SiameseJoin(build.norm(), depth_scale(self.depth_scale, slot), build.drop(slot))


@register
@dataclass(frozen=True)
class SiameseNormHybridPre(_Siamese):
    """SiameseNorm hybrid-pre, the wiring of the paper's language models.

    Attention reads z = c1 * x + N_y(y) without an input norm (per-head norms on Q, K and V take its place) and leaves
    x normed for the feed-forward, which reads z = N_in(x + N_y(y)) and leaves x as a raw sum.

    >>> row = SiameseNormHybridPre().junctions(dim=4, n_layers=2)
    >>> [junction.join.norm_x is not None for junction in row]
    [False, True, False, True, True]
    """

    name: ClassVar[str] = "siamese_hybrid_pre"
    title: ClassVar[str] = "SiameseNorm (hybrid-pre)"
    equation: ClassVar[str] = (
        "attention: z = c1*x + N_y(y), x <- N_x(x + o/c), y <- y + o;  "
        "feed-forward: z = N_in(x + N_y(y)), x <- x + o/c, y <- y + o;  c = sqrt(2(l+1))"
    )
    code: ClassVar[str] = "Qwen-Applications/SiameseNorm:OLMo_model_hybrid_pre.py"
    differs: ClassVar[str] = (
        "paper: one formula for every sublayer, c = sqrt(l+1), read-out x + N(y); the defaults are the code's"
    )
    inner: ClassVar[Inner] = replace(NOTHING_INNER, qk="model", v="model")
    init: ClassVar[InitScheme] = "megatron_full"

    embedding_norm: bool = False

    def read(self, slot: Slot, build: Build) -> Read:
        if slot.kind == "attention":
            return HybridPreRead(build.dim, build.norm())
        return SiameseRead(build.norm(), build.input_norm() if self.input_norm else None)

    def join(self, slot: Slot, build: Build) -> Join:
        norm_x = None if slot.following == "attention" else build.norm()
        return SiameseJoin(norm_x, depth_scale(self.depth_scale, slot), build.drop(slot))
