"""Hyper-Connections and their manifold-constrained form, mHC."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from normstream.junctions import (
    DynamicMix,
    HyperJoin,
    HyperRead,
    HyperStart,
    Join,
    LibraryManifoldMix,
    PaperManifoldMix,
    Read,
    StaticMix,
    SumStreams,
)
from normstream.norms import LayerNorm, RMSNorm
from normstream.placements.placement import Build, Placement, Slot
from normstream.placements.registry import register

Mode = Literal["dynamic", "static"]
Version = Literal["paper", "code"]


@dataclass(frozen=True)
class HyperStreams(Placement):
    """What both forms share: n streams, a copy of the embedding each, that are summed before the final norm."""

    streams: ClassVar[tuple[str, ...]] = ("h",)

    n_streams: int = 4
    """Number n of streams."""

    def __post_init__(self) -> None:
        if self.n_streams < 1:
            raise ValueError(f"n_streams must be at least 1, got {self.n_streams}")

    def mix(self, slot: Slot, build: Build) -> nn.Module:
        """How the sublayer at ``slot`` takes its input from the streams and mixes them."""
        raise NotImplementedError

    def home(self, slot: Slot) -> int:
        """The stream that the sublayer reads at the start: they take turns."""
        return slot.index % self.n_streams

    def first(self, build: Build) -> nn.Module:
        return HyperStart(self.n_streams)

    def read(self, slot: Slot, build: Build) -> Read:
        return HyperRead(self.mix(slot, build), build.input_norm())

    def join(self, slot: Slot, build: Build) -> Join:
        return HyperJoin(build.drop(slot))

    def last_read(self, build: Build) -> Read:
        return HyperRead(SumStreams(), build.input_norm())


@register
@dataclass(frozen=True)
class HyperConnections(HyperStreams):
    """Hyper-Connections, static (SHC) or dynamic (DHC): learned weights mix n streams around every sublayer.

        H_1 --+--------+--> mix A ---- + -----> H_1
        H_2 --|--+-----+--> mix A ---- | - + -> H_2
              |  |                  b_1^   ^ b_2
              +--+-> A_0 -> N_in -> F -+---+

    At the start every sublayer reads one stream and all streams receive its update: all are Pre-Norm's stream, and
    the model is Pre-Norm, its last stream n times as long before the final norm.

    >>> row = HyperConnections(n_streams=2).junctions(dim=4, n_layers=1)
    >>> [junction.read.mix.home for junction in row[:-1]]
    [0, 1]
    """

    name: ClassVar[str] = "hyper_connections"
    title: ClassVar[str] = "Hyper-Connections"
    equation: ClassVar[str] = (
        "z = N_in(sum_s A[s,0] H_s), H_t <- sum_s A[s,t] H_s;  H_t <- H_t + b_t o;  "
        "A_s = A0_s + a tanh(N(H_s) W), b_s = b0_s + a' tanh(N(H_s) w');  final: N(sum_s H_s)"
    )
    paper: ClassVar[str] = "Zhu et al. 2024, arXiv 2409.19606"
    code: ClassVar[str] = "lucidrains/hyper-connections:hyper_connections/hyper_connections.py (not by the authors)"
    differs: ClassVar[str] = (
        "the paper's mapping norm is a LayerNorm, the default, the library's an RMSNorm; "
        "the library's home stream is random unless the sublayer's index is given"
    )

    mode: Mode = "dynamic"
    """dynamic: the weights also depend on the streams (DHC); static: they are parameters (SHC)."""
    mapping_norm: Version = "paper"
    """Norm of the streams that the dynamic weights see: paper LayerNorm, code RMSNorm without eps."""
    tanh: bool = True
    """Whether the dynamic part of the weights goes through a tanh."""

    def mix(self, slot: Slot, build: Build) -> nn.Module:
        if self.mode == "static":
            return StaticMix(self.n_streams, self.home(slot))
        eps = build.norm_config.eps
        # The library divides by max(|x|, 1e-12): its eps only keeps zeros finite.
        norm = LayerNorm(build.dim, eps=eps) if self.mapping_norm == "paper" else RMSNorm(build.dim, eps=1e-24)
        return DynamicMix(build.dim, self.n_streams, self.home(slot), norm, tanh=self.tanh)


@register
@dataclass(frozen=True)
class ManifoldHyperConnections(HyperStreams):
    """mHC: hyper-connections whose mixing matrix is doubly stochastic and whose other weights are positive.

    However many mixing matrices follow one another, their product neither blows the streams up nor cancels them. At the
    start all streams are equal and receive the update itself: the model is Pre-Norm, up to the eps of the norms.

    >>> import torch
    >>> mix = ManifoldHyperConnections().junctions(dim=4, n_layers=1)[0].read.mix
    >>> u, (h, b) = mix(torch.ones(1, 1, 4, 4))
    >>> h.sum().item(), b.tolist()
    (16.0, [[[1.0, 1.0, 1.0, 1.0]]])
    """

    name: ClassVar[str] = "mhc"
    title: ClassVar[str] = "mHC (manifold-constrained Hyper-Connections)"
    equation: ClassVar[str] = (
        "z = N_in(sum_s p_s H_s), H_t <- sum_s R[s,t] H_s;  H_t <- H_t + b_t o;  "
        "p = sigmoid(p'), R = Sinkhorn(R'), b = 2 sigmoid(b'), each of p', R', b' = static + a N(H) W;  "
        "final: N(sum_s H_s)"
    )
    paper: ClassVar[str] = "Xie et al. 2025, arXiv 2512.24880"
    code: ClassVar[str] = (
        "lucidrains/hyper-connections:hyper_connections/manifold_constrained_hyper_connections.py (not by the authors)"
    )
    differs: ClassVar[str] = (
        "paper, the default: every weight sees all streams, normed as one vector; the sums over sources are scaled "
        "last; starts near the identity. library, mapping=code: the weights of a stream see that stream alone; the "
        "sums over targets are scaled last; starts far from the identity (R 0.475 on and 0.175 off the diagonal, b "
        "1.46)"
    )

    mapping: Version = "paper"
    """How the weights are made: paper or code, see the differences."""
    sinkhorn: int = 20
    """Number of Sinkhorn iterations."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinkhorn < 1:
            raise ValueError(f"sinkhorn must be at least 1, got {self.sinkhorn}")

    def mix(self, slot: Slot, build: Build) -> nn.Module:
        if self.mapping == "code":
            return LibraryManifoldMix(build.dim, self.n_streams, self.home(slot), self.sinkhorn)
        return PaperManifoldMix(build.dim, self.n_streams, self.home(slot), self.sinkhorn, build.norm_config.eps)
