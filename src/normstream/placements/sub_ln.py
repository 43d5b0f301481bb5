"""Sub-LN: Pre-Norm with a second norm inside each sublayer, before its output matrix."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from normstream.layers.inner import NOTHING_INNER, Inner
from normstream.placements.placement import InitScheme, Stack
from normstream.placements.registry import register
from normstream.placements.single_stream import PreNorm


def gamma(stack: Stack, n_layers: int) -> float:
    """Factor of the initial value, output and feed-forward matrices, for N encoder and M decoder blocks.

    A stack by itself sqrt(ln 2N), the encoder of two sqrt(ln(3M) ln(2N) / 3), their decoder sqrt(ln 3M).
    Cross-attention is left as it is.

    Source: Magneto, arXiv 2210.06423; microsoft/torchscale:torchscale/architecture/encoder.py and decoder.py.

    >>> encoder, decoder = Stack("encoder", 6, 6), Stack("decoder", 6, 6)
    >>> [round(gamma(stack, n), 3) for stack, n in ((Stack(), 12), (encoder, 6), (decoder, 6))]
    [1.783, 1.547, 1.7]
    """
    match stack.role:
        case "only":
            return math.sqrt(math.log(2 * n_layers))
        case "encoder":
            return math.sqrt(math.log(3 * stack.n_decoder_layers) * math.log(2 * stack.n_encoder_layers) / 3)
        case "decoder":
            return math.sqrt(math.log(3 * stack.n_decoder_layers))


@register
@dataclass(frozen=True)
class SubLN(PreNorm):
    """Sub-LN of Magneto: one norm before each sublayer and one inside it, before the output matrix.

        x ---+-------------------------------------- + ---> x
             |                                       ^
             +-> N -> heads or W_up -> N -> W_out ---+

    >>> SubLN().inner.context, SubLN().inner.hidden
    ('model', 'model')
    """

    name: ClassVar[str] = "sub_ln"
    title: ClassVar[str] = "Sub-LN (Magneto)"
    equation: ClassVar[str] = (
        "x <- x + o;  z = N(x);  final: N(x);  attention: o = W_o N(heads), feed-forward: o = W_down N(h);  "
        "gamma = sqrt(ln 2N)"
    )
    paper: ClassVar[str] = "Magneto, Wang et al. 2022, arXiv 2210.06423"
    code: ClassVar[str] = "microsoft/torchscale:torchscale/architecture/encoder.py"
    differs: ClassVar[str] = (
        "paper: gamma as the gain of a Xavier start, the default; code: gamma times torch's own start of a Linear, "
        "init=sub_ln_code. Neither norms inside cross-attention"
    )
    inner: ClassVar[Inner] = replace(NOTHING_INNER, context="model", hidden="model")
    init: ClassVar[InitScheme] = "sub_ln"
