"""Point-wise replacements of norms: a bounded function of each entry, with no statistics."""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from normstream.gain_norm import CastOrder, Gain, GainNorm


def check_alpha(alpha: float) -> None:
    """Raises ValueError unless a point-wise norm can start at ``alpha``."""
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be a positive number, got {alpha}")


class DyT(GainNorm):
    """Dynamic tanh: ``y = g tanh(alpha x) + b``, point by point, with one learned alpha.

    Args:
        dim: width of the last axis.
        alpha: alpha at the start; the paper's default is 0.5, and language models want it tuned.
        gain, bias, cast, gain_init: as for LayerNorm; the paper has both gain and bias.

    Shape: ``(..., dim)`` to ``(..., dim)``, same dtype.

    Raises:
        ValueError: for a width below 1, an alpha that is not a positive number, or an input of another width.

    Source: Zhu et al. 2025, arXiv 2503.10622.

    >>> DyT(2)(torch.tensor([0.0, 2.0]))
    tensor([0.0000, 0.7616], grad_fn=<...>)
    """

    has_shift: ClassVar[bool] = False
    """Whether there is a learned s."""

    def __init__(
        self,
        dim: int,
        *,
        alpha: float = 0.5,
        gain: Gain = "plain",
        bias: bool = True,
        cast: CastOrder = "after_gain",
        gain_init: float = 1.0,
    ) -> None:
        super().__init__(dim, gain=gain, bias=bias, cast=cast, gain_init=gain_init)
        check_alpha(alpha)
        self.alpha_init = float(alpha)
        self.alpha = nn.Parameter(torch.empty(1))
        self.shift = nn.Parameter(torch.empty(1)) if self.has_shift else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Effective gain ``gain_init``, bias 0, alpha as given, s = 0."""
        super().reset_parameters()
        nn.init.constant_(self.alpha, self.alpha_init)
        if self.shift is not None:
            nn.init.zeros_(self.shift)

    def bounded(self, x: Tensor) -> Tensor:
        """The bounded function of x, before gain and bias."""
        return torch.tanh(self.alpha.to(x.dtype) * x)

    def normalize(self, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        y = self.bounded(x)
        y = y if gain is None else gain * y
        return y if bias is None else y + bias

    def extra_repr(self) -> str:
        return f"{self.dim}, alpha={self.alpha_init:g}, {super().extra_repr()}"


class Derf(DyT):
    """Dynamic erf: ``y = g erf(alpha x + s) + b``, point by point, with one learned alpha and one learned shift s.

    Arguments, shape and errors as for DyT; alpha starts at 0.5 and s at 0.

    Source: Chen et al. 2025, arXiv 2512.10938.

    >>> Derf(2)(torch.tensor([0.0, 2.0]))
    tensor([0.0000, 0.8427], grad_fn=<...>)
    """

    has_shift: ClassVar[bool] = True

    def bounded(self, x: Tensor) -> Tensor:
        assert self.shift is not None
        return torch.erf(self.alpha.to(x.dtype) * x + self.shift.to(x.dtype))
