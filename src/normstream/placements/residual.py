"""ResiDual: a Post-Norm stream and beside it the plain sum of all updates."""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from normstream.junctions import Join, Read, ResiDualJoin, ResiDualRead, ResiDualReadOut, ResiDualStart
from normstream.placements.placement import Build, Placement, Slot
from normstream.placements.registry import register


@register
@dataclass(frozen=True)
class ResiDual(Placement):
    """ResiDual: sublayers read a Post-Norm stream x; a sum d gives every update a short way to the read-out.

        x ---+----------- + -> N ---> x ... * alpha --- + ---> final
             |            ^                             ^
             +---> F -----+                             |
                          v lambda                      |
        d --------------- + --------> d ... N_d --------+

    Raises ValueError for a scale, alpha or dual_eps that is not a finite number, and for a negative dual_eps.

    >>> row = ResiDual().junctions(dim=2, n_layers=1)
    >>> row[-1].read.norm_d
    RMSNorm(2, eps=1e-07, gain=plain, bias=False, cast=after_gain)
    """

    name: ClassVar[str] = "residual"
    title: ClassVar[str] = "ResiDual"
    streams: ClassVar[tuple[str, ...]] = ("x", "d")
    equation: ClassVar[str] = (
        "x <- N(x + o), d <- d + lambda o;  z = x;  start: x = e, d = lambda e;  final: alpha x + N_d(d)"
    )
    paper: ClassVar[str] = "Xie et al. 2023, arXiv 2304.14802"
    code: ClassVar[str] = "microsoft/ResiDual:resi_dual/resi_dual_layers.py"
    differs: ClassVar[str] = (
        "alpha and lambda are the code's, 1 by default; its OPUS-100 recipe has lambda = 0.05, residual(scale=0.05), "
        "to keep d within fp16. The input norm is from SiameseNorm's ablation, arXiv 2602.08064"
    )

    scale: float = 1.0
    """lambda, the factor of all that enters the sum d."""
    alpha: float = 1.0
    """Factor of x in the final hidden vector."""
    dual_eps: float = 1e-7
    """eps of the norm of d."""
    input_norm: bool = False
    """Whether sublayers read N_in(x) instead of x."""

    def __post_init__(self) -> None:
        for name in ("scale", "alpha"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} of residual must be a finite number, got {getattr(self, name)}")
        if not 0 <= self.dual_eps < math.inf:
            raise ValueError(f"dual_eps of residual must be a finite number of at least 0, got {self.dual_eps}")

    def first(self, build: Build) -> nn.Module:
        return ResiDualStart(self.scale)

    def read(self, slot: Slot, build: Build) -> Read:
        return ResiDualRead(build.input_norm() if self.input_norm else None)

    def join(self, slot: Slot, build: Build) -> Join:
        return ResiDualJoin(build.norm(), self.scale, build.drop(slot))

    def last_read(self, build: Build) -> Read:
        return ResiDualReadOut(build.norm(eps=self.dual_eps), self.alpha)
