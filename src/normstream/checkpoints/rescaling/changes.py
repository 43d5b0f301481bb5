"""The changes that make a rescaled model, as data; ``normstream.checkpoints.rescaling.plan`` works them out."""

from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["start", "writer", "trunk", "reader", "inner", "head", "split"]


@dataclass(frozen=True)
class Scaling:
    """A parameter, or some of its rows, times ``2**exponent``."""

    parameter: str
    role: Role
    exponent: int
    rows: tuple[int, ...] | None = None
    """Output features that it is about; None: all."""
    axis: int = 0
    """Where the output features are."""
    is_zero_centred: bool = False
    """The gain is one plus the parameter, and it is the gain that is multiplied."""


@dataclass(frozen=True)
class EpsChange:
    """The eps of a norm times ``2**exponent``."""

    path: str
    before: float
    """Measured."""
    exponent: int


@dataclass(frozen=True)
class Plan:
    """All changes of one model."""

    k: int
    scalings: tuple[Scaling, ...]
    eps: tuple[EpsChange, ...]
    """Of the norms whose eps changes; the others keep theirs."""
    config: dict[str, Any] = field(default_factory=dict)
    """New values of the config, by key."""
    untied: str | None = None
    """Path of a head that gets a matrix of its own."""
    inexact: tuple[str, ...] = ()
    """Where the function cannot be kept exactly, in sentences."""
    notes: tuple[str, ...] = ()
