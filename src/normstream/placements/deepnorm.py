"""DeepNorm: Post-Norm with a scaled residual and a smaller start, both set by depth."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from normstream.junctions import DeepNormJoin, Join, PreNormRead, Read
from normstream.placements.placement import Build, InitScheme, Slot, Stack
from normstream.placements.registry import register
from normstream.placements.single_stream import PostNorm

Constants = Literal["paper", "code"]


def alpha(stack: Stack, n_layers: int) -> float:
    """Factor of the residual, for N encoder and M decoder blocks.

    A stack by itself (2N)^(1/4), the encoder of two 0.81 (N^4 M)^(1/16), their decoder (3M)^(1/4). N and M come
    from ``stack``, or are ``n_layers`` for a stack by itself.

    >>> encoder, decoder = Stack("encoder", 6, 6), Stack("decoder", 6, 6)
    >>> [round(alpha(stack, n), 3) for stack, n in ((Stack(), 24), (encoder, 6), (decoder, 6))]
    [2.632, 1.418, 2.06]
    """
    match stack.role:
        case "only":
            return (2 * n_layers) ** (1 / 4)
        case "encoder":
            return 0.81 * (stack.n_encoder_layers**4 * stack.n_decoder_layers) ** (1 / 16)
        case "decoder":
            return (3 * stack.n_decoder_layers) ** (1 / 4)


def beta(stack: Stack, n_layers: int, constants: Constants = "paper") -> float:
    """Factor of the initial value, output and feed-forward matrices, for N encoder and M decoder blocks.

    A stack by itself (8N)^(-1/4), the encoder of two 0.87 (N^4 M)^(-1/16), their decoder (12M)^(-1/4). The code has
    1.15, which is 1 / 0.87, in the place of 0.87.

    Source: DeepNet, arXiv 2203.00555; microsoft/torchscale:torchscale/architecture/encoder.py and decoder.py.

    >>> encoder, decoder = Stack("encoder", 6, 6), Stack("decoder", 6, 6)
    >>> [round(beta(stack, n), 4) for stack, n in ((Stack(), 24), (encoder, 6), (decoder, 6))]
    [0.2686, 0.497, 0.3433]
    """
    match stack.role:
        case "only":
            return (8 * n_layers) ** (-1 / 4)
        case "encoder":
            factor = 0.87 if constants == "paper" else 1.15
            return factor * (stack.n_encoder_layers**4 * stack.n_decoder_layers) ** (-1 / 16)
        case "decoder":
            return (12 * stack.n_decoder_layers) ** (-1 / 4)


@register
@dataclass(frozen=True)
class DeepNorm(PostNorm):
    """DeepNorm: Post-Norm whose residual is multiplied by alpha > 1 and whose sublayers start beta < 1 times as large.

        x ---+--- * alpha ---- + -> N ---> x       base=pre:   x ---+--- * alpha ---- + ---> x
             |                 ^                                    |                 ^
             +----> F ---------+                                    +----> N -> F ----+

    Raises ValueError for an alpha that is not positive.

    >>> round(DeepNorm().junctions(dim=2, n_layers=8)[1].join.alpha, 4)
    2.0
    """

    name: ClassVar[str] = "deepnorm"
    title: ClassVar[str] = "DeepNorm"
    equation: ClassVar[str] = "x <- N(alpha x + o);  z = x;  final: x;  alpha = (2N)^(1/4), beta = (8N)^(-1/4)"
    paper: ClassVar[str] = "DeepNet, Wang et al. 2022, arXiv 2203.00555"
    code: ClassVar[str] = "microsoft/torchscale:torchscale/architecture/encoder.py"
    differs: ClassVar[str] = (
        "paper: beta as the gain of a Xavier normal start, 0.87 (N^4 M)^(-1/16) for the encoder of two stacks, the "
        "default; code: beta times torch's own start of a Linear, with 1.15 instead of 0.87, deepnorm(constants=code), "
        "and before version 0.3 its flag alone left a decoder Pre-Norm with residual factor alpha, deepnorm(base=pre). "
        "pixeli99/MixLN's deeppost has one alpha for every depth and a final norm, "
        "deepnorm(alpha=2.828,final_norm=true)"
    )

    constants: Constants = "paper"
    """Whose initialization: the paper's or the released code's. alpha is the same in both."""
    alpha: Literal["depth"] | float = "depth"
    """Factor of the residual: by the depth, as in the equation, or a number."""
    base: Literal["post", "pre"] = "post"
    """post: the equation; pre: x <- alpha x + o, z = N(x), final N(x), once torchscale's decoder."""

    def __post_init__(self) -> None:
        if self.alpha != "depth" and not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha of deepnorm must be a positive number or depth, got {self.alpha}")

    @property
    def init(self) -> InitScheme:  # pyright: ignore[reportIncompatibleVariableOverride]
        """deepnorm or deepnorm_code."""
        return "deepnorm" if self.constants == "paper" else "deepnorm_code"

    def read(self, slot: Slot, build: Build) -> Read:
        return PreNormRead(build.input_norm()) if self.base == "pre" else super().read(slot, build)

    def join(self, slot: Slot, build: Build) -> Join:
        factor = alpha(build.stack, slot.n_layers) if self.alpha == "depth" else float(self.alpha)
        return DeepNormJoin(build.norm() if self.base == "post" else None, factor, build.drop(slot))

    def last_read(self, build: Build) -> Read:
        return PreNormRead(build.input_norm()) if self.base == "pre" else super().last_read(build)
