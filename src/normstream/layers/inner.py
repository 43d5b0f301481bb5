"""What a recipe puts inside its sublayers: norms, scales and links on the way from z to the update.

Placements name theirs in ``Placement.inner``; ``DecoderConfig.inner`` can override any of it, field by field.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

from normstream.checks import check_types
from normstream.gain_norm import check_eps
from normstream.names import check_choice

InnerNorm = Literal["none", "model", "rms", "layer", "layer_bias", "l2"]
"""model: the norm that the model uses everywhere; rms, layer: that kind; layer_bias: layer with a bias, whatever the
model's norm (Chameleon); l2: unit length, with a learned scale."""
Statistics = Literal["head", "all_heads"]
GainSharing = Literal["shared", "per_head", "number", "number_per_head", "none"]
"""A vector for all heads, a vector for each, one number for all, one number for each, or nothing."""
HeadScale = Literal["none", "before_output", "after_output"]
Link = Literal["none", "scores", "depth"]
Scales = Literal["none", "ngpt"]
FromRecipe = Literal["placement"]


@dataclass(frozen=True)
class Inner:
    """Norms and scales inside attention and feed-forward. ``placement`` stands for what the placement's recipe says.

    >>> Inner(v="rms").over(NOTHING_INNER).v
    'rms'
    """

    qk: Literal[FromRecipe, InnerNorm] = "placement"
    """Norm of queries and keys (QK-norm)."""
    qk_statistics: Literal[FromRecipe, Statistics] = "placement"
    """Whether a norm of queries or keys takes its statistics over each head or over all heads together."""
    qk_gain: Literal[FromRecipe, GainSharing] = "placement"
    """Gain of that norm: a vector shared by all heads, one per_head, a number, a number_per_head, or none."""
    qk_after_rope: Literal[FromRecipe, "yes", "no"] = "placement"
    """Whether queries and keys are normed after the rotation instead of before it."""
    v: Literal[FromRecipe, InnerNorm] = "placement"
    """Norm of the values, over each head."""
    v_gain: Literal[FromRecipe, GainSharing] = "placement"
    """Gain of that norm."""
    context: Literal[FromRecipe, InnerNorm] = "placement"
    """Norm of the merged heads before the output matrix."""
    head_scale: Literal[FromRecipe, HeadScale] = "placement"
    """A learned factor for each head: on the heads before the output matrix, or on slices of its result."""
    hidden: Literal[FromRecipe, InnerNorm] = "placement"
    """Norm of the feed-forward's hidden vector, after the activation."""
    eps: float | None = None
    """eps of all these norms; None means the model's (x-transformers' RMSNorm has none, its norm of hidden 1e-5)."""
    link: Literal[FromRecipe, Link] = "placement"
    """What attention takes from earlier layers: their scores (RealFormer) or their values by depth attention."""
    scales: Literal[FromRecipe, Scales] = "placement"
    """nGPT's learned factors: of the feed-forward's up and gate vectors, and the unit in which an l2 gain is kept."""

    def __post_init__(self) -> None:
        check_types(self, "inner.")
        choices = {
            "qk": InnerNorm,
            "qk_statistics": Statistics,
            "qk_gain": GainSharing,
            "qk_after_rope": Literal["yes", "no"],
            "v": InnerNorm,
            "v_gain": GainSharing,
            "context": InnerNorm,
            "head_scale": HeadScale,
            "hidden": InnerNorm,
            "link": Link,
            "scales": Scales,
        }
        for name, choice in choices.items():
            check_choice(f"inner.{name}", getattr(self, name), Literal[FromRecipe, choice])
        if self.eps is not None:
            check_eps(self.eps)

    def over(self, recipe: "Inner") -> "Inner":
        """This choice, with the recipe's wherever it says ``placement`` or gives no eps."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) not in ("placement", None)}
        return replace(recipe, **own)

    def __str__(self) -> str:
        """What differs from ``NOTHING_INNER``."""
        names = [
            f.name for f in fields(self) if getattr(self, f.name) not in (getattr(NOTHING_INNER, f.name), "placement")
        ]
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


NOTHING_INNER = Inner(
    qk="none",
    qk_statistics="head",
    qk_gain="shared",
    qk_after_rope="no",
    v="none",
    v_gain="shared",
    context="none",
    head_scale="none",
    hidden="none",
    link="none",
    scales="none",
)
"""No norm, scale or link inside the sublayers; recipes say how they differ with ``replace(NOTHING_INNER, ...)``."""
