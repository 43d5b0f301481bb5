"""A learned factor for each channel."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class LearnedScale(nn.Module):
    """``y = s * x`` with a learned factor s = unit * w for each channel, kept as w.

    Args:
        dim: width of the last axis.
        start: s at the start.
        unit: what one step of w is worth. Adam moves w by about the learning rate, so s by ``unit`` times as much.

    Shape: ``(..., dim)`` to ``(..., dim)``, same dtype. Source: nGPT, arXiv 2410.01131.

    >>> scale = LearnedScale(2, start=3.0, unit=6.0)
    >>> scale.weight.tolist(), scale(torch.ones(2)).tolist()
    ([0.5, 0.5], [3.0, 3.0])
    """

    def __init__(self, dim: int, *, start: float = 1.0, unit: float = 1.0) -> None:
        super().__init__()
        self.dim, self.start, self.unit = dim, start, unit
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """s at its start."""
        nn.init.constant_(self.weight, self.start / self.unit)

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        return (self.unit * self.weight * x).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, start={self.start:g}, unit={self.unit:g}"
