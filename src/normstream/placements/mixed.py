"""A placement for each range of blocks, as in ``post:0-5,pre:6-23``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from normstream.junctions import Join, Read
from normstream.placements.placement import Build, Placement, Slot


@dataclass(frozen=True)
class Part:
    """One placement over the blocks ``first`` to ``last``, both included; None means up to the last block.

    >>> from normstream import placements
    >>> str(Part(placements.get("pre"), 6, 23))
    'pre:6-23'
    """

    placement: Placement
    first: int
    last: int | None

    def __str__(self) -> str:
        if self.first == self.last:
            return f"{self.placement}:{self.first}"
        return f"{self.placement}:{self.first}-{'' if self.last is None else self.last}"


def _streams(placement: Placement) -> str:
    """The names of the streams and how many hyper-connected ones the last of them holds."""
    n = getattr(placement, "n_streams", None)
    return ", ".join(placement.streams) + (f" ({n} streams)" if n else "")


@dataclass(frozen=True)
class Mixed(Placement):
    """Blocks governed by different placements. Each sublayer keeps its own read and join.

    Where two ranges meet, the join of the last sublayer of one is followed by the read of the first sublayer of the
    other; the first range says how the streams start and the last one how they are read at the end.

    Raises ValueError for ranges with gaps or overlaps, for placements whose streams differ and for those that own the
    whole model (nGPT).

    >>> from normstream import placements
    >>> mix = placements.get("post:0-1,pre:2-")
    >>> [junction.join.__class__.__name__ for junction in mix.junctions(dim=4, n_layers=3)][1::2]
    ['PostNormJoin', 'PostNormJoin', 'PreNormJoin']
    """

    name: ClassVar[str] = "mixed"
    title: ClassVar[str] = "a placement for each range of blocks"
    equation: ClassVar[str] = "those of the parts"
    paper: ClassVar[str] = ""
    code: ClassVar[str] = ""

    parts: tuple[Part, ...]
    """The ranges, in order."""

    def __post_init__(self) -> None:
        first = self.parts[0].placement
        expected = 0
        for part in self.parts:
            if part.first != expected:
                raise ValueError(f"{self}: expected a range that starts at block {expected}, got {part}")
            if part.last is None and part is not self.parts[-1]:
                raise ValueError(f"{self}: only the last range can be open, got {part}")
            if part.last is not None and part.last < part.first:
                raise ValueError(f"{self}: {part} ends before it starts")
            if _streams(part.placement) != _streams(first):
                raise ValueError(
                    f"{self}: streams do not fit: {first} has {_streams(first)}, "
                    f"{part.placement} has {_streams(part.placement)}"
                )
            if type(part.placement).after_step is not Placement.after_step:
                raise ValueError(
                    f"{self}: {part.placement} rules the weights of the whole model; use it for all blocks"
                )
            expected = -1 if part.last is None else part.last + 1

    @property
    def streams(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of every part."""
        return self.parts[0].placement.streams

    @property
    def init(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the first part, for what is in no block: the embedding and the head."""
        return self.parts[0].placement.init

    def at(self, layer: int) -> Placement:
        for part in self.parts:
            if part.last is None or layer <= part.last:
                return part.placement
        raise ValueError(f"{self} says nothing about block {layer} (counted from 0); add it, or end with an open range")

    def blocks(self, n_layers: int, sublayers: Sequence[str]) -> list[tuple[str, ...]]:
        last = self.parts[-1].last
        if last is not None and last != n_layers - 1:
            raise ValueError(f"{self} covers blocks 0-{last}, but the model has {n_layers}: 0-{n_layers - 1}")
        if self.parts[-1].first >= n_layers:
            raise ValueError(f"{self} starts its last range beyond the last block, {n_layers - 1}")
        return super().blocks(n_layers, sublayers)

    def first(self, build: Build) -> nn.Module:
        return self.parts[0].placement.first(build)

    def read(self, slot: Slot, build: Build) -> Read:
        return self.at(slot.layer).read(slot, build)

    def join(self, slot: Slot, build: Build) -> Join:
        return self.at(slot.layer).join(slot, build)

    def last_read(self, build: Build) -> Read:
        return self.parts[-1].placement.last_read(build)

    def __str__(self) -> str:
        return ",".join(map(str, self.parts))
