"""SiameseNorm and Hyper-Connections in one: the combination that the SiameseNorm paper leaves to future work."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from normstream.junctions import Join, Read, SiameseHyperJoin, SiameseHyperRead, SiameseHyperStart, SumStreams
from normstream.placements.hyper_connections import HyperConnections, Mode, Version
from normstream.placements.placement import Build, Slot
from normstream.placements.registry import register
from normstream.placements.siamese import Siamese, depth_scale


@register
@dataclass(frozen=True)
class SiameseHyperConnections(Siamese):
    """SiameseNorm post-pre whose y stream is n hyper-connected streams H, read as one and summed at the end.

        x ---+--------------------------- + -> N_x --> x
             |                            ^ / c
             +-------> + -> N_in -> F ----+
                       ^                  v b_t
             +- A_0 - N_y                 |
             |                            |
        H ---+--> mix A ----------------- + ---------> H

    At the start it is SiameseNorm, but for the last read, where N_y sees n times its y.

    >>> row = SiameseHyperConnections(n_streams=2).junctions(dim=4, n_layers=1)
    >>> [round(junction.join.scale, 4) for junction in row[1:]]
    [0.7071, 0.7071]
    """

    name: ClassVar[str] = "siamese_hyper_connections"
    title: ClassVar[str] = "SiameseNorm with Hyper-Connections"
    streams: ClassVar[tuple[str, ...]] = ("x", "h")
    equation: ClassVar[str] = (
        "z = N_in(x + N_y(sum_s A[s,0] H_s)), H_t <- sum_s A[s,t] H_s;  x <- N_x(x + o/c), H_t <- H_t + b_t o;  "
        "c = sqrt(2(l+1));  final: N(x + N_y(sum_s H_s))"
    )
    paper: ClassVar[str] = "no paper: named as future work in SiameseNorm, arXiv 2602.08064"
    code: ClassVar[str] = "none but this package"
    differs: ClassVar[str] = (
        "our own combination: the options of siamese but pair and of hyper_connections but tanh, with their defaults"
    )

    n_streams: int = 4
    """Number n of hyper-connected streams."""
    mode: Mode = "dynamic"
    """As in hyper_connections."""
    mapping_norm: Version = "paper"
    """As in hyper_connections."""

    def __post_init__(self) -> None:
        self._connections()

    def _connections(self) -> HyperConnections:
        return HyperConnections(n_streams=self.n_streams, mode=self.mode, mapping_norm=self.mapping_norm)

    def first(self, build: Build) -> nn.Module:
        return SiameseHyperStart(build.norm() if self.embedding_norm else None, self.n_streams)

    def read(self, slot: Slot, build: Build) -> Read:
        norm_in = build.input_norm() if self.input_norm else None
        return SiameseHyperRead(self._connections().mix(slot, build), build.norm(), norm_in)

    def join(self, slot: Slot, build: Build) -> Join:
        return SiameseHyperJoin(build.norm(), depth_scale(self.depth_scale, slot), build.drop(slot))

    def last_read(self, build: Build) -> Read:
        return SiameseHyperRead(SumStreams(), build.norm(), build.input_norm() if self.read_out == "code" else None)
