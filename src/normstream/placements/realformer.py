"""RealFormer: attention that adds its scores to those of the layer before."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import nn

from normstream.junctions import Join, Read
from normstream.layers.inner import NOTHING_INNER, Inner
from normstream.placements.placement import Build, Placement, Slot
from normstream.placements.registry import register
from normstream.placements.single_stream import PostNorm, PreNorm


@register
@dataclass(frozen=True)
class RealFormer(Placement):
    """RealFormer: Post-Norm whose attention scores have a residual stream of their own, from layer to layer.

        scores ------------------- + ---> scores
                                   ^
                            q k^T / sqrt(K)
                                   ^
        x ---+-------------------> A ---> + -> N ---> x
             +----------------------------^

    Cross-attention has a stream of scores apart from attention's, as the paper has it.

    >>> RealFormer().inner.link
    'scores'
    """

    name: ClassVar[str] = "realformer"
    title: ClassVar[str] = "RealFormer (residual attention)"
    streams: ClassVar[tuple[str, ...]] = ("x",)
    equation: ClassVar[str] = "x <- N(x + o);  z = x;  final: x;  attention scores: s <- s + q k^T / sqrt(K)"
    paper: ClassVar[str] = "He et al. 2020, arXiv 2012.11747"
    code: ClassVar[str] = "google-research/google-research:realformer"
    differs: ClassVar[str] = "the paper's models are Post-Norm, the default; Pre-Norm by realformer(base=pre)"
    inner: ClassVar[Inner] = replace(NOTHING_INNER, link="scores")

    base: Literal["post", "pre"] = "post"
    """Junctions: Post-Norm's or Pre-Norm's."""

    def _junctions(self) -> Placement:
        return PostNorm() if self.base == "post" else PreNorm()

    def first(self, build: Build) -> nn.Module:
        return self._junctions().first(build)

    def read(self, slot: Slot, build: Build) -> Read:
        return self._junctions().read(slot, build)

    def join(self, slot: Slot, build: Build) -> Join:
        return self._junctions().join(slot, build)

    def last_read(self, build: Build) -> Read:
        return self._junctions().last_read(build)
