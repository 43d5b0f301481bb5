"""NormFormer: Pre-Norm with four cheap additions."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from normstream.junctions import Join, OutputNormJoin, PreNormJoin, ResidualScaleJoin
from normstream.layers.inner import NOTHING_INNER, HeadScale, Inner
from normstream.placements.placement import Build, Slot
from normstream.placements.registry import register
from normstream.placements.single_stream import PreNorm


@register
@dataclass(frozen=True)
class NormFormer(PreNorm):
    """NormFormer: a factor for each head, a norm after attention, one in the feed-forward, a scaled residual.

        x ---+----------------------- + ---+--- * lambda ------------------------ + ---> x
             |                        ^    |                                      ^
             +-> N -> heads * gamma   |    +-> N -> W_up -> f -> N -> W_down -----+
                        -> W_o -> N --+

    Cross-attention has none of them. The released recipe of the smallest model (125M) has the scaled residual, those of
    the models above 1B have not; the default is for small models.

    >>> row = NormFormer().junctions(dim=2, n_layers=1)
    >>> [junction.join.__class__.__name__ for junction in row]
    ['Start', 'OutputNormJoin', 'ResidualScaleJoin']
    """

    name: ClassVar[str] = "normformer"
    title: ClassVar[str] = "NormFormer"
    equation: ClassVar[str] = (
        "z = N(x);  attention: x <- x + N_out(W_o(gamma_h head_h));  "
        "feed-forward: x <- lambda * x + W_down N(f(W_up z));  final: N(x)"
    )
    paper: ClassVar[str] = "Shleifer, Weston and Ott 2021, arXiv 2110.09456"
    code: ClassVar[str] = "facebookresearch/fairseq:fairseq/modules/transformer_layer.py"
    differs: ClassVar[str] = (
        "paper: the factors are on the heads, before the output matrix, the default; code: on slices of what the "
        "output matrix gives, normformer(head_scale=code), and each addition has a flag of its own"
    )

    head_scale: Literal["paper", "code", "none"] = "paper"
    """Where the heads' factors are: on the heads (paper), on slices of the projected vector (code), or nowhere."""
    attention_norm: bool = True
    """Whether attention's update is normed."""
    hidden_norm: bool = True
    """Whether the feed-forward norms its hidden vector."""
    residual_scale: bool = True
    """Whether the feed-forward's residual has a learned factor for each channel (ResScale)."""

    @property
    def inner(self) -> Inner:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The head scale and the norm of the hidden vector."""
        places: dict[str, HeadScale] = {"paper": "before_output", "code": "after_output", "none": "none"}
        return replace(
            NOTHING_INNER, head_scale=places[self.head_scale], hidden="model" if self.hidden_norm else "none"
        )

    def join(self, slot: Slot, build: Build) -> Join:
        if slot.kind == "attention" and self.attention_norm:
            return OutputNormJoin(build.norm(), build.drop(slot))
        if slot.kind == "feed_forward" and self.residual_scale:
            return ResidualScaleJoin(build.dim, build.drop(slot))
        return PreNormJoin(build.drop(slot))
