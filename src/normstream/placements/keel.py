"""Keel: Post-Norm with a residual scaled by the depth and a norm before each sublayer."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from normstream.junctions import DeepNormJoin, Join, PreNormJoin
from normstream.placements.placement import Build, Slot
from normstream.placements.registry import register
from normstream.placements.single_stream import SingleStream


@register
@dataclass(frozen=True)
class Keel(SingleStream):
    """Keel: a residual alpha times as strong as the update keeps Post-Norm's gradient alive through any depth.

        x ---+--- * alpha ---------- + -> N_out ---> x
             |                       ^
             +-> N_in -> F ----------+

    With alpha = K, the number of sublayers, the product of the residual's shares alpha / sqrt(alpha^2 + 1) tends to 1.
    In the first block alpha is 1, and its first sublayer has no N_out.

    Raises ValueError for an alpha that is not positive.

    >>> row = Keel().junctions(dim=2, n_layers=3)
    >>> [getattr(junction.join, "alpha", None) for junction in row]
    [None, None, 1.0, 6.0, 6.0, 6.0, 6.0]
    """

    name: ClassVar[str] = "keel"
    title: ClassVar[str] = "Keel"
    equation: ClassVar[str] = "x <- N_out(alpha x + o);  z = N_in(x);  final: x;  alpha = number of sublayers"
    paper: ClassVar[str] = "Post-LayerNorm Is Back, Chen and Wei 2026, arXiv 2601.19895"
    code: ClassVar[str] = "no official code; lucidrains/x-transformers:x_transformers/x_transformers.py has a rendering"
    differs: ClassVar[str] = (
        "the equation already ends with a norm, so there is no final one; x-transformers has none either "
        "(pre_and_post_norm), takes alpha as a number and makes no exceptions, keel(alpha=...,first_block=none)"
    )

    final_norm: bool = False
    alpha: Literal["sublayers"] | float = "sublayers"
    """Factor of the residual: the number of sublayers, or a number (the paper tunes it for small models)."""
    first_block: Literal["paper", "none"] = "paper"
    """Exceptions in the first block: the paper's, or none."""

    def __post_init__(self) -> None:
        if self.alpha != "sublayers" and not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha of keel must be a positive number or sublayers, got {self.alpha}")

    def join(self, slot: Slot, build: Build) -> Join:
        excepted = self.first_block == "paper" and slot.layer == 0
        if excepted and slot.index == 0:
            return PreNormJoin(build.drop(slot))
        alpha = slot.n_sublayers if self.alpha == "sublayers" else self.alpha
        return DeepNormJoin(build.norm(), 1.0 if excepted else float(alpha), build.drop(slot))
