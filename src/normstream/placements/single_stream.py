"""What all placements with one stream share, and the two that everything else is measured against."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from normstream.junctions import (
    Join,
    NormedStart,
    PostNormJoin,
    PostNormRead,
    PreNormJoin,
    PreNormRead,
    Read,
    ResidualScaleJoin,
    Start,
)
from normstream.placements.placement import Build, Placement, Slot
from normstream.placements.registry import register


@dataclass(frozen=True)
class SingleStream(Placement):
    """One stream x with an optional norm at either end. Subclasses replace the read and the join of Pre-Norm.

    >>> SingleStream(embedding_norm=True).junctions(dim=2, n_layers=1)[0].join.norm
    RMSNorm(2, eps=1e-05, gain=plain, bias=False, cast=after_gain)
    """

    streams: ClassVar[tuple[str, ...]] = ("x",)

    embedding_norm: bool = False
    """Whether the stream starts as the normed embedding."""
    final_norm: bool = True
    """Whether a final norm follows the last sublayer."""

    def first(self, build: Build) -> nn.Module:
        return NormedStart(build.norm()) if self.embedding_norm else Start()

    def read(self, slot: Slot, build: Build) -> Read:
        return PreNormRead(build.input_norm())

    def join(self, slot: Slot, build: Build) -> Join:
        return PreNormJoin(build.drop(slot))

    def last_read(self, build: Build) -> Read:
        return PreNormRead(build.input_norm()) if self.final_norm else PostNormRead()


@register
@dataclass(frozen=True)
class PreNorm(SingleStream):
    """Pre-Norm: each sublayer reads a normed copy of the stream, and one final norm closes the stack.

        x ---+--------------- + ---> x
             |                ^
             +-> N -> F ------+

    >>> PreNorm().junctions(dim=2, n_layers=1)[0].read.norm
    RMSNorm(2, eps=1e-05, gain=plain, bias=False, cast=after_gain)
    """

    name: ClassVar[str] = "pre"
    title: ClassVar[str] = "Pre-Norm"
    equation: ClassVar[str] = "x <- x + o;  z = N(x);  final: N(x)"
    paper: ClassVar[str] = "Xiong et al. 2020, arXiv 2002.04745"
    code: ClassVar[str] = "huggingface/transformers:src/transformers/models/llama/modeling_llama.py"

    residual_scale: bool = False
    """Whether every residual has a learned factor for each channel, lambda * x + o (x-transformers)."""

    def join(self, slot: Slot, build: Build) -> Join:
        if self.residual_scale:
            return ResidualScaleJoin(build.dim, build.drop(slot))
        return super().join(slot, build)


@register
@dataclass(frozen=True)
class PostNorm(SingleStream):
    """Post-Norm: the stream itself is normalized after every addition; there is no final norm.

        x ---+----------- + -> N ---> x
             |            ^
             +---> F -----+

    >>> PostNorm().junctions(dim=2, n_layers=1)[0].join
    Start()
    """

    name: ClassVar[str] = "post"
    title: ClassVar[str] = "Post-Norm"
    equation: ClassVar[str] = "x <- N(x + o);  z = x;  final: x"
    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv 1706.03762"
    code: ClassVar[str] = "tensorflow/tensor2tensor:tensor2tensor/models/transformer.py"
    differs: ClassVar[str] = (
        "paper: no norm at either end, the default; pixeli99/MixLN adds a final norm, post(final_norm=true), "
        "and BERT norms the embedding, post(embedding_norm=true); tensor2tensor later made Pre-Norm its default"
    )

    final_norm: bool = False

    def read(self, slot: Slot, build: Build) -> Read:
        return PostNormRead()

    def join(self, slot: Slot, build: Build) -> Join:
        return PostNormJoin(build.norm(), build.drop(slot))
