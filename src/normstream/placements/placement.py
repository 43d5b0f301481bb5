"""What a placement is: for every sublayer a read and a join, plus how the streams start and how the last is read."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from torch import nn

from normstream.junctions import Drop, Join, Junction, Read
from normstream.norms import NormConfig

InnerNorms = Literal["none", "qk", "qkv"]
InitScheme = Literal["plain", "gpt2", "megatron_full"]


@dataclass(frozen=True)
class Slot:
    """Where one sublayer stands in the row.

    >>> [slot.index for slot in Slot.row(2, ("attention", "feed_forward")) if slot.kind == "attention"]
    [0, 2]
    """

    kind: str
    """attention or feed_forward."""
    layer: int
    """0-based block."""
    index: int
    """0-based sublayer, counted through all blocks."""
    n_layers: int
    """Number of blocks."""
    n_sublayers: int
    """Number of sublayers in all blocks."""
    following: str | None
    """Kind of the next sublayer, None after the last one."""

    @staticmethod
    def row(n_layers: int, sublayers: Sequence[str]) -> list["Slot"]:
        """The slots of ``n_layers`` equal blocks."""
        kinds = [*sublayers] * n_layers
        return [
            Slot(
                kind=kind,
                layer=index // len(sublayers),
                index=index,
                n_layers=n_layers,
                n_sublayers=len(kinds),
                following=kinds[index + 1] if index + 1 < len(kinds) else None,
            )
            for index, kind in enumerate(kinds)
        ]


@dataclass(frozen=True)
class Build:
    """What a placement builds its junctions with: the width, the norm and the dropout of the model.

    >>> Build(dim=8, norm_config=NormConfig()).norm()
    RMSNorm(8, eps=1e-05, gain=plain, bias=False, cast=after_gain)
    """

    dim: int
    """Width of the residual streams."""
    norm_config: NormConfig
    """Conventions of every norm on a stream."""
    dropout: float = 0.0
    """Dropout of every update."""
    drop_path: float = 0.0
    """Drop-path of the last block's updates; it grows linearly from 0 in the first block."""

    def norm(self) -> nn.Module:
        """A new norm of the streams' width."""
        return self.norm_config.build(self.dim)

    def drop(self, slot: Slot) -> Drop:
        """Dropout and drop-path for the update of one sublayer."""
        return Drop(self.dropout, self.drop_path * slot.layer / max(1, slot.n_layers - 1))


@dataclass(frozen=True)
class Placement:
    """A named recipe. A subclass's fields are its options; its class variables say what it is and where it is from.

    Subclasses give the four parts below, each a junction half of ``normstream.junctions``, and are made known by
    ``@register``. ``junctions`` pairs the halves into the row that a model needs.
    """

    name: ClassVar[str]
    """Name in configurations."""
    title: ClassVar[str]
    """Name in the literature."""
    streams: ClassVar[tuple[str, ...]]
    """Names of the residual streams, in the order of the state."""
    equation: ClassVar[str]
    """The junction's equations, o being the update."""
    paper: ClassVar[str]
    """Where it was published."""
    code: ClassVar[str]
    """Official code, as repository:path."""
    differs: ClassVar[str] = ""
    """Where paper and code disagree, and which of them the defaults follow."""
    inner_norms: ClassVar[InnerNorms] = "none"
    """Per-head norms inside attention that belong to the recipe."""
    init: ClassVar[InitScheme] = "plain"
    """Initialization that belongs to the recipe."""

    def first(self, build: Build) -> nn.Module:
        """The join of the first junction: embedding to state."""
        raise NotImplementedError

    def read(self, slot: Slot, build: Build) -> Read:
        """How the sublayer at ``slot`` reads its input."""
        raise NotImplementedError

    def join(self, slot: Slot, build: Build) -> Join:
        """How the update of the sublayer at ``slot`` is added."""
        raise NotImplementedError

    def last_read(self, build: Build) -> Read:
        """How the final hidden vector is read after the last sublayer."""
        raise NotImplementedError

    def junctions(
        self,
        dim: int,
        n_layers: int,
        *,
        sublayers: Sequence[str] = ("attention", "feed_forward"),
        norm: NormConfig | None = None,
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> list[Junction]:
        """The row of ``n_layers * len(sublayers) + 1`` junctions: before, between and after the sublayers.

        Args:
            dim: width of the streams.
            n_layers: number of blocks.
            sublayers: kinds of the sublayers of one block, in order.
            norm: conventions of the norms; RMSNorm with eps 1e-5 if None.
            dropout: dropout of every update.
            drop_path: drop-path rate of the last block's updates, growing linearly from 0.

        >>> from normstream import placements
        >>> len(placements.get("pre").junctions(dim=8, n_layers=3))
        7
        """
        if n_layers < 1:
            raise ValueError(f"n_layers must be at least 1, got {n_layers}")
        build = Build(dim, norm or NormConfig(), dropout, drop_path)
        slots = Slot.row(n_layers, sublayers)
        joins = [self.first(build), *(self.join(slot, build) for slot in slots)]
        reads = [*(self.read(slot, build) for slot in slots), self.last_read(build)]
        return [Junction(join, read) for join, read in zip(joins, reads, strict=True)]

    def __str__(self) -> str:
        """The name with every option that is not at its default, as ``placements.get`` reads it."""
        options = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return self.name + (f"({','.join(f'{k}={_text(v)}' for k, v in options)})" if options else "")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
