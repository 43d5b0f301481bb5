"""The least that a junction must move through memory in one pass, from its equation.

One unit is one tensor of tokens x width. A row fits on the chip, so every tensor is read or written at most once in
each direction. Not counted: gains, biases, and the few numbers a row that the norms keep.

    forward    read o and the streams; write the new streams, z, and the sum under N_x, which backward needs
    backward   read the gradients of the new streams and of z, and what was kept; write those of o and of the streams

Where o and x receive the same gradient (one stream, no factor, no norm on o, one dtype) it is written once; the
gradient of a second stream that is not normed here is the incoming one and is not written at all.
"""

from typing import NamedTuple

import torch
from torch import nn

from normstream.junctions import Junction


class Dtypes(NamedTuple):
    """What the tensors of a junction are kept in."""

    update: torch.dtype
    stream: torch.dtype
    z: torch.dtype


class Traffic(NamedTuple):
    """How often tensors of each kind are moved."""

    updates: int
    streams: int
    zs: int

    @property
    def units(self) -> int:
        return sum(self)

    def nbytes(self, dtypes: Dtypes, elements: int) -> int:
        """Bytes, for tensors of so many elements."""
        sizes = (dtypes.update.itemsize, dtypes.stream.itemsize, dtypes.z.itemsize)
        return elements * sum(count * size for count, size in zip(self, sizes, strict=True))


class Shape(NamedTuple):
    """What decides a junction's traffic.

    >>> Shape(n_streams=1, norm_in=True).forward, Shape(n_streams=1, norm_in=True).backward(shared=True)
    (Traffic(updates=1, streams=2, zs=1), Traffic(updates=0, streams=3, zs=1))
    """

    n_streams: int
    norm_out: bool = False
    norm_x: bool = False
    norm_y: bool = False
    norm_in: bool = False
    has_c: bool = False
    has_z: bool = True
    alpha: float = 1.0

    @property
    def n_norms(self) -> int:
        """Norms, each of which keeps one number a row (a LayerNorm two)."""
        return self.norm_out + self.norm_x + self.norm_y + self.norm_in

    @property
    def forward(self) -> Traffic:
        return Traffic(updates=1, streams=2 * self.n_streams + self.norm_x, zs=int(self.has_z))

    def backward(self, shared: bool) -> Traffic:
        """``shared``: whether streams and updates are of one dtype."""
        one_gradient = shared and self.n_streams == 1 and not self.norm_out and self.alpha == 1
        written = 1 + (self.n_streams == 2 and self.norm_y)
        read = self.n_streams + sum(self.kept_streams)
        return Traffic(updates=self.norm_out + (not one_gradient), streams=read + written, zs=int(self.has_z))

    @property
    def kept_streams(self) -> tuple[bool, bool]:
        """Whether backward needs x' (or the sum under its norm), and y'."""
        return self.norm_x or self.norm_in or self.has_c, self.norm_y

    def kept_bytes(self, dtypes: Dtypes, elements: int, rows: int) -> int:
        """What is kept for backward, z aside: o under a norm, the streams, four bytes a row and RMSNorm."""
        units = self.norm_out * dtypes.update.itemsize + sum(self.kept_streams) * dtypes.stream.itemsize
        return elements * units + 4 * rows * self.n_norms


def shape_of(junction: Junction) -> Shape:
    """The shape of a junction, from what its halves say of themselves.

    Raises:
        ValueError: for a junction that is no single pass over rows, as those of hyper-connections.

    >>> from normstream import placements
    >>> shape_of(placements.get("deepnorm").junctions(8, 2)[1])._replace(alpha=1.0)
    Shape(n_streams=1, norm_out=False, norm_x=True, norm_y=False, norm_in=False, has_c=False, has_z=False, alpha=1.0)
    """
    join, read = junction.join.part(), junction.read.part()  # pyright: ignore[reportCallIssue]
    if join is None or read is None:
        raise ValueError("this junction has no fused form")
    norms: dict[str, nn.Module | None] = {
        "norm_out": join.norm_out,
        "norm_x": join.norm_x,
        "norm_y": read.norm_y,
        "norm_in": read.norm_in,
    }
    return Shape(
        n_streams=1 if join.second is None else 2,
        has_c=read.c is not None,
        has_z=read.has_z,
        alpha=join.alpha,
        **{name: norm is not None for name, norm in norms.items()},
    )
