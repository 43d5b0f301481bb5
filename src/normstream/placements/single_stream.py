"""Pre-Norm and Post-Norm."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from normstream.junctions import Join, PostNormJoin, PostNormRead, PreNormJoin, PreNormRead, Read, Start
from normstream.placements.placement import Build, Placement, Slot
from normstream.placements.registry import register


@register
@dataclass(frozen=True)
class PreNorm(Placement):
    """Pre-Norm: each sublayer reads a normed copy of the stream, and one final norm closes the stack.

        x ---+--------------- + ---> x
             |                ^
             +-> N -> F ------+

    >>> PreNorm().junctions(dim=2, n_layers=1)[0].read.norm
    RMSNorm(2, eps=1e-05, gain=plain, bias=False, cast=after_gain)
    """

    name: ClassVar[str] = "pre"
    title: ClassVar[str] = "Pre-Norm"
    streams: ClassVar[tuple[str, ...]] = ("x",)
    equation: ClassVar[str] = "x <- x + o;  z = N(x);  final: N(x)"
    paper: ClassVar[str] = "Xiong et al. 2020, arXiv 2002.04745"
    code: ClassVar[str] = "huggingface/transformers:models/llama/modeling_llama.py"

    final_norm: bool = True
    """Whether a final norm follows the last sublayer."""

    def first(self, build: Build) -> nn.Module:
        return Start()

    def read(self, slot: Slot, build: Build) -> Read:
        return PreNormRead(build.input_norm())

    def join(self, slot: Slot, build: Build) -> Join:
        return PreNormJoin(build.drop(slot))

    def last_read(self, build: Build) -> Read:
        return PreNormRead(build.input_norm()) if self.final_norm else PostNormRead()


@register
@dataclass(frozen=True)
class PostNorm(Placement):
    """Post-Norm: the stream itself is normalized after every addition; there is no final norm.

        x ---+----------- + -> N ---> x
             |            ^
             +---> F -----+

    >>> PostNorm().junctions(dim=2, n_layers=1)[0].join
    Start()
    """

    name: ClassVar[str] = "post"
    title: ClassVar[str] = "Post-Norm"
    streams: ClassVar[tuple[str, ...]] = ("x",)
    equation: ClassVar[str] = "x <- N(x + o);  z = x;  final: x"
    paper: ClassVar[str] = "Vaswani et al. 2017, arXiv 1706.03762"
    code: ClassVar[str] = "tensorflow/tensor2tensor:tensor2tensor/models/transformer.py"
    differs: ClassVar[str] = "pixeli99/MixLN's Post-Norm adds a final norm: post(final_norm=true)"

    final_norm: bool = False
    """Whether one more norm follows the last sublayer's own."""

    def first(self, build: Build) -> nn.Module:
        return Start()

    def read(self, slot: Slot, build: Build) -> Read:
        return PostNormRead()

    def join(self, slot: Slot, build: Build) -> Join:
        return PostNormJoin(build.norm(), build.drop(slot))

    def last_read(self, build: Build) -> Read:
        return PreNormRead(build.input_norm()) if self.final_norm else PostNormRead()
