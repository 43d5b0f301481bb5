"""What norms share: a gain for each channel, a bias, and the order of the casts around them.

The options are explained in ``normstream.norms``.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normstream.names import check_choice

Gain = Literal["plain", "zero_centered", "none"]
CastOrder = Literal["after_gain", "before_gain", "gain_dtype"]


def check_width(x: Tensor, dim: int) -> None:
    """Raises ValueError unless the last axis of ``x`` has ``dim`` entries."""
    if x.shape[-1] != dim:
        raise ValueError(f"expected a last axis of width {dim}, got shape {tuple(x.shape)}")


def precise_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which ``x`` is normed: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_eps(eps: object) -> None:
    """Raises ValueError unless eps is a finite number of at least 0."""
    if not isinstance(eps, float | int) or not 0 <= eps < math.inf:
        raise ValueError(f"eps must be an explicit number >= 0, got {eps!r}; take it from the model's own config")


def check_gain_init(gain_init: float, gain: str = "plain") -> None:
    """Raises ValueError unless a gain can start at ``gain_init``."""
    if not math.isfinite(gain_init):
        raise ValueError(f"gain_init must be a finite number, got {gain_init}")
    if gain == "none" and gain_init != 1:
        raise ValueError(f"a norm without a gain cannot start at gain_init {gain_init:g}; set gain to plain")


class GainNorm(nn.Module):
    """What all but ScaleNorm share: a gain for each channel, the bias and the order of the casts."""

    def __init__(self, dim: int, *, gain: Gain, bias: bool, cast: CastOrder, gain_init: float) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"a norm needs a width of at least 1, got {dim}")
        check_choice("gain", gain, Gain)
        check_choice("cast", cast, CastOrder)
        check_gain_init(gain_init, gain)
        self.dim, self.gain, self.cast, self.gain_init = dim, gain, cast, float(gain_init)
        self.weight = None if gain == "none" else nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None

    def reset_parameters(self) -> None:
        """Effective gain ``gain_init``, bias 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, self.gain_init - 1 if self.gain == "zero_centered" else self.gain_init)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def normalize(self, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        """The norm itself, in the dtype of x, which is float32 or float64."""
        raise NotImplementedError

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        check_width(x, self.dim)
        high = precise_dtype(x)
        x_high = x.to(high)
        gain = self.weight
        if gain is not None and self.gain == "zero_centered":
            gain = 1 + gain.to(high)
        bias = None if self.bias is None else self.bias.to(high)

        if gain is None or self.cast == "after_gain":
            gain_high = None if gain is None else gain.to(high)
            return self.normalize(x_high, gain_high, bias).to(x.dtype)
        low = x.dtype if self.cast == "before_gain" else gain.dtype
        y = self.normalize(x_high, None, None).to(low) * gain
        return (y if bias is None else y + bias).to(x.dtype)

    def extra_repr(self) -> str:
        start = "" if self.gain_init == 1 else f", gain_init={self.gain_init:g}"
        return f"gain={self.gain}, bias={self.bias is not None}, cast={self.cast}{start}"
