"""SpanNorm: Post-Norm whose second residual spans the whole block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from normstream.junctions import Join, PostNormJoin, PostNormRead, PreNormRead, Read, SpanJoin, SpanRead
from normstream.placements.placement import Build, Slot
from normstream.placements.registry import register
from normstream.placements.single_stream import SingleStream


@register
@dataclass(frozen=True)
class SpanNorm(SingleStream):
    """SpanNorm: the feed-forward reads the normed attention output, but its residual is the block's input.

        x ---+---------+----------------------- + -> N ---> x
             |         v                        ^
             +--> A -- + -> N_span ---> M ------+

    The very first attention reads a normed embedding; its residual is the raw one. A cross-attention C between the two
    is Post-Norm on the vector y that the feed-forward would have read, y <- N(y + C(y)), and the second residual spans
    all three sublayers: our own reading, since the paper has none.

    Raises ValueError for blocks that are not an attention, perhaps a cross-attention, and a feed-forward.

    >>> row = SpanNorm().junctions(dim=2, n_layers=2)
    >>> [junction.read.__class__.__name__ for junction in row]
    ['PreNormRead', 'SpanRead', 'PostNormRead', 'SpanRead', 'PostNormRead']
    """

    name: ClassVar[str] = "span_norm"
    title: ClassVar[str] = "SpanNorm"
    equation: ClassVar[str] = "attention: z = x, y = N_span(x + o);  feed-forward: z = y, x <- N(x + o);  final: x"
    paper: ClassVar[str] = "Li et al. 2026, arXiv 2601.22580"
    code: ClassVar[str] = "no official code"
    differs: ClassVar[str] = (
        "the paper's Scale Init, an initialization that depends on depth, is not here: its constants could not be read"
    )

    final_norm: bool = False
    first_norm: bool = True
    """Whether the very first attention reads a normed embedding."""

    def blocks(self, n_layers: int, sublayers: Sequence[str]) -> list[tuple[str, ...]]:
        if tuple(sublayers) not in (("attention", "feed_forward"), ("attention", "cross_attention", "feed_forward")):
            raise ValueError(
                "span_norm needs blocks with nothing or cross_attention between attention and feed_forward, got "
                f"{', '.join(sublayers)}"
            )
        return super().blocks(n_layers, sublayers)

    def read(self, slot: Slot, build: Build) -> Read:
        if slot.kind != "attention":
            return SpanRead(build.input_norm(), keeps=slot.kind == "cross_attention")
        return PreNormRead(build.input_norm()) if slot.index == 0 and self.first_norm else PostNormRead()

    def join(self, slot: Slot, build: Build) -> Join:
        if slot.kind == "feed_forward":
            return PostNormJoin(build.norm(), build.drop(slot))
        return SpanJoin(build.drop(slot))
