"""GeoNorm: updates as steps along great circles, so that no norm is needed."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from normstream.junctions import GeoNormJoin, Join, PostNormRead, Read
from normstream.placements.placement import Build, Slot
from normstream.placements.registry import register
from normstream.placements.single_stream import SingleStream

Decay = Literal["harmonic", "sqrt", "linear"]


def decay(kind: Decay, slot: Slot) -> float:
    """Factor of the angle in block l of L, l counted from 1: harmonic 1/l, sqrt 1/sqrt(l), linear 1 - (l - 1)/L.

    >>> slot = Slot.row([("attention", "feed_forward")] * 4)[2]
    >>> [round(decay(kind, slot), 4) for kind in ("harmonic", "sqrt", "linear")]
    [0.5, 0.7071, 0.75]
    """
    block = slot.layer + 1
    match kind:
        case "harmonic":
            return 1 / block
        case "sqrt":
            return 1 / math.sqrt(block)
        case "linear":
            return 1 - slot.layer / slot.n_layers


@register
@dataclass(frozen=True)
class GeoNorm(SingleStream):
    """GeoNorm: x moves on a sphere, along the great circle in the direction of the update, by an angle.

        e -> N -> x ---+----------> turn by theta ---> x
                       |                  ^
                       +---> F -----------+

    The norm of the embedding sets the radius, sqrt(D); the length of x never changes after it, so sublayers and head
    read x itself.

    Raises ValueError for a max_angle outside (0, pi/2].

    >>> GeoNorm().junctions(dim=2, n_layers=2)[4].join.decay
    0.5
    """

    name: ClassVar[str] = "geo_norm"
    title: ClassVar[str] = "GeoNorm"
    equation: ClassVar[str] = (
        "x <- cos(theta) x + sin(theta) |x| v/|v|, v = o - <x,o>/|x|^2 x, theta = decay min(|v|/|x|, pi/4);  z = x;  "
        "start: N(e);  final: x"
    )
    paper: ClassVar[str] = "Zheng 2026, arXiv 2601.22095"
    code: ClassVar[str] = "no official code"
    differs: ClassVar[str] = (
        "the bound pi/4, the harmonic default and x + o at x = 0 are those of a third-party port; that the decay "
        "counts blocks from 1 and comes after the bound, and the norm on the embedding, are our choices"
    )

    embedding_norm: bool = True
    final_norm: bool = False
    decay: Decay = "harmonic"
    """How the angle shrinks with the block l: harmonic 1/l, sqrt 1/sqrt(l), linear 1 - (l - 1)/L."""
    max_angle: float = math.pi / 4
    """Bound on the angle before the decay, in radians."""

    def __post_init__(self) -> None:
        if not 0 < self.max_angle <= math.pi / 2:
            raise ValueError(f"max_angle of geo_norm must be in (0, pi/2], got {self.max_angle}")

    def read(self, slot: Slot, build: Build) -> Read:
        return PostNormRead()

    def join(self, slot: Slot, build: Build) -> Join:
        return GeoNormJoin(decay(self.decay, slot), self.max_angle, build.drop(slot))
