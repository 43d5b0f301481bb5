"""SiameseNorm in its two published wirings, post-pre and hybrid-pre, and hybrid-pre beside Depth-Attention."""

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
Pair = Literal["post-pre", "pre-pre", "post-post"]
ATTENTIONS = ("attention", "cross_attention")


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
class Siamese(Placement):
    """The options that all wirings share, and their defaults."""

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
class SiameseNorm(Siamese):
    """SiameseNorm post-pre: a Post-Norm-like stream x and a Pre-Norm-like stream y share every sublayer.

        x ---+--------------------- + -> N_x --> x
             |                      ^ / c
             +-> + -> N_in -> F ----+
                 ^                  v
             +- N_y                 |
             |                      |
        y ---+--------------------- + ---------> y

    The same junction stands N + 1 times, the first and the last included. ``siamese(depth_scale=paper,read_out=paper,
    embedding_norm=false,input_norm=false)`` is the paper's Algorithm 1 with its depth scale. With ``pair`` the streams
    are of other kinds: a post stream is normed after each addition, a pre stream where it is read.

    >>> first, inner, last = SiameseNorm().junctions(dim=4, n_layers=1, sublayers=("attention", "feed_forward"))
    >>> round(inner.join.scale, 4)
    0.7071
    """

    name: ClassVar[str] = "siamese"
    title: ClassVar[str] = "SiameseNorm (post-pre)"
    equation: ClassVar[str] = (
        "x <- N_x(x + o/c), y <- y + o;  z = N_in(x + N_y(y));  c = sqrt(2(l+1));  "
        "start: x = N_x(e), y = e;  final: N(x + N_y(y))"
    )
    code: ClassVar[str] = "Qwen-Applications/SiameseNorm:deit-model-siamesenorm.py"
    differs: ClassVar[str] = (
        "paper: c = sqrt(l+1), raw embedding on x, read-out x + N(y), input norm as an add-on; "
        "the defaults are the code's"
    )

    pair: Pair = "post-pre"
    """Kinds of the streams x and y."""

    def first(self, build: Build) -> nn.Module:
        norms = self._norms(build, "post") if self.embedding_norm else (None, None)
        return SiameseStart(*norms)

    def read(self, slot: Slot, build: Build) -> Read:
        return self._read(build, self.input_norm)

    def join(self, slot: Slot, build: Build) -> Join:
        norm_x, norm_y = self._norms(build, "post")
        return SiameseJoin(norm_x, depth_scale(self.depth_scale, slot), build.drop(slot), norm_y)

    def last_read(self, build: Build) -> Read:
        return self._read(build, self.read_out == "code")

    def _read(self, build: Build, input_norm: bool) -> Read:
        norm_x, norm_y = self._norms(build, "pre")
        return SiameseRead(norm_y, build.input_norm() if input_norm else None, norm_x)

    def _norms(self, build: Build, kind: str) -> tuple[nn.Module | None, nn.Module | None]:
        """A norm for each stream of that kind."""
        x, y = self.pair.split("-")
        return build.norm() if x == kind else None, build.norm() if y == kind else None


@register
@dataclass(frozen=True)
class SiameseNormHybridPre(Siamese):
    """SiameseNorm hybrid-pre, the wiring of the paper's language models.

    Attention reads z = c1 * x + N_y(y) without an input norm (per-head norms on Q, K and V take its place) and leaves
    x normed for the feed-forward, which reads z = N_in(x + N_y(y)) and leaves x as a raw sum. Cross-attention reads as
    attention does, with a c1 of its own, and x is still normed once a block, before the feed-forward.

    With ``first_block=pre`` the first block is as in HybridNorm*: attention reads z = N(x) + N_y(y), without c1, the
    feed-forward z = N_in(N_ff(x) + N_y(y)), and x stays a raw sum throughout.

    >>> row = SiameseNormHybridPre().junctions(dim=4, n_layers=2)
    >>> [junction.join.norm_x is not None for junction in row]
    [False, True, False, True, True]
    """

    name: ClassVar[str] = "siamese_hybrid_pre"
    title: ClassVar[str] = "SiameseNorm (hybrid-pre)"
    equation: ClassVar[str] = (
        "attention: z = c1*x + N_y(y), x <- N_x(x + o/c), y <- y + o;  "
        "feed-forward: z = N_in(x + N_y(y)), x <- x + o/c, y <- y + o;  c = sqrt(2(l+1));  "
        "final: N(x + N_y(y))"
    )
    code: ClassVar[str] = "Qwen-Applications/SiameseNorm:OLMo_model_hybrid_pre.py"
    differs: ClassVar[str] = (
        "paper: one formula for every sublayer, c = sqrt(l+1), read-out x + N(y); the defaults are the code's, whose "
        "own way to a first block as in HybridNorm* crashes (first_block=pre is what it intends)"
    )
    inner: ClassVar[Inner] = replace(NOTHING_INNER, qk="model", v="model")
    init: ClassVar[InitScheme] = "megatron_full"

    embedding_norm: bool = False
    first_block: Literal["plain", "pre"] = "plain"
    """Wiring of the first block: plain, as all others; pre, with norms on x where it is read, as in HybridNorm*."""

    def _is_pre(self, slot: Slot) -> bool:
        return self.first_block == "pre" and slot.layer == 0

    def read(self, slot: Slot, build: Build) -> Read:
        norm_y = build.norm()
        norm_x = build.norm() if self._is_pre(slot) else None
        if slot.kind in ATTENTIONS:
            return HybridPreRead(build.dim, norm_y) if norm_x is None else SiameseRead(norm_y, None, norm_x)
        return SiameseRead(norm_y, build.input_norm() if self.input_norm else None, norm_x)

    def join(self, slot: Slot, build: Build) -> Join:
        stays_raw = slot.following in ATTENTIONS or (self._is_pre(slot) and slot.following is not None)
        norm_x = None if stays_raw else build.norm()
        return SiameseJoin(norm_x, depth_scale(self.depth_scale, slot), build.drop(slot))


@register
@dataclass(frozen=True)
class SiameseDepthAttention(SiameseNormHybridPre):
    """SiameseNorm hybrid-pre beside Depth-Attention, as ported to OLMo 3 by InternLM's archspace.

    The junctions are hybrid-pre's. Attention mixes into its values those of earlier layers at the same position;
    queries and keys are normed over the whole projection, as in OLMo 3, and values are not.

    >>> SiameseDepthAttention.inner.link, SiameseDepthAttention.inner.qk_statistics, SiameseDepthAttention.inner.v
    ('depth', 'all_heads', 'none')
    """

    name: ClassVar[str] = "siamese_depth_attention"
    title: ClassVar[str] = "SiameseNorm (hybrid-pre) with Depth-Attention"
    paper: ClassVar[str] = "SiameseNorm, arXiv 2602.08064; InternLM/archspace#19"
    code: ClassVar[str] = "franksfc/archspace:Megatron-LM/src/modeling/olmo3_siamese_depth.py"
    differs: ClassVar[str] = (
        "against the released hybrid-pre: no norm on the values, Q and K normed over all heads together, each with a "
        "full-width gain, matrices that start without depth scaling (in the port from a truncated normal, here uncut)"
    )
    inner: ClassVar[Inner] = replace(
        NOTHING_INNER, qk="model", qk_statistics="all_heads", qk_gain="per_head", link="depth"
    )
    init: ClassVar[InitScheme] = "plain"
