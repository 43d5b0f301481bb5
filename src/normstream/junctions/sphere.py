"""Streams that stay on a sphere: GeoNorm keeps the length of x, nGPT keeps it at 1.

join   ``GeoNormJoin``   x <- cos(theta) x + sin(theta) |x| v / |v|,   v = o - <x, o> / |x|^2 x,
                         theta = decay * min(|v| / |x|, max_angle)
       ``LerpJoin``      x <- unit(x + |alpha| * (unit(o) - x)),       unit(x) = x / |x|
"""

import math

import torch
from torch import Tensor, nn

from normstream.junctions.junction import Drop, Join, State
from normstream.norms import precise_dtype, unit


class GeoNormJoin(Join):
    """A step along the great circle through x in the direction of the update's part v that is at right angles to x.

    ``x <- cos(theta) x + sin(theta) |x| v / |v|`` with ``v = o - <x, o> / |x|^2 x`` and the angle
    ``theta = decay * min(|v| / |x|, max_angle)``. The length of x stays. Computed in float32 or above; where x = 0,
    which has no sphere, ``x <- x + o``.

    Args:
        decay: factor of the angle at this depth, a Python float.
        max_angle: bound on the angle before the decay, in radians.
        drop: dropout and drop-path of the update.

    Source: GeoNorm, arXiv 2601.22095.

    >>> join = GeoNormJoin(decay=1.0, max_angle=math.pi / 2, drop=Drop())
    >>> join((torch.tensor([[1.0, 0.0]]),), torch.tensor([[5.0, math.pi / 6]]))
    (tensor([[0.8660, 0.5000]]),)
    """

    def __init__(self, decay: float, max_angle: float, drop: Drop) -> None:
        super().__init__(drop)
        self.decay, self.max_angle = decay, max_angle

    def contributions(self, update: Tensor) -> State:
        """The update o that x turns towards; what x moves by depends on x too."""
        return (self.drop(update),)

    def forward(self, state: State, update: Tensor) -> State:
        (x,) = state
        (o,) = self.contributions(update)
        high = precise_dtype(x)
        x_high, o_high = x.to(high), o.to(high)
        length = x_high.norm(dim=-1, keepdim=True)
        on_sphere = length > 0
        radius = torch.where(on_sphere, length, 1)
        direction = x_high / radius
        v = (o_high - (direction * o_high).sum(-1, keepdim=True) * direction) / radius
        v = v - (direction * v).sum(-1, keepdim=True) * direction  # once more: rounding leaves a part along x
        slope = v.norm(dim=-1, keepdim=True)
        theta = self.decay * slope.clamp(max=self.max_angle)
        # sin(theta) / slope tends to decay: an update along x makes no 0 / 0, in the gradient neither
        step = torch.where(slope > 0, theta.sin() / torch.where(slope > 0, slope, 1), self.decay)
        moved = radius * (theta.cos() * direction + step * v)
        return (torch.where(on_sphere, moved, x_high + o_high).to(x.dtype),)

    def extra_repr(self) -> str:
        return f"decay={self.decay:.6g}, max_angle={self.max_angle:.6g}"


class LerpJoin(Join):
    """``x <- unit(x + |alpha| * (unit(o) - x))`` with a learned rate alpha for each channel.

    alpha is kept as a multiple of its start: the parameter starts at 1 / sqrt(D), which is the scale of everything else
    in nGPT, and is multiplied by ``start * sqrt(D)``.

    Args:
        dim: width D of the stream.
        start: alpha at the start.
        drop: dropout and drop-path of the normed update.

    Source: nGPT, arXiv 2410.01131; allenai/OLMo-core:src/olmo_core/nn/transformer/block.py.

    >>> join = LerpJoin(2, start=0.5, drop=Drop())
    >>> join((torch.tensor([[1.0, 0.0]]),), torch.tensor([[0.0, 9.0]]))[0].detach()
    tensor([[0.7071, 0.7071]])
    """

    def __init__(self, dim: int, start: float, drop: Drop) -> None:
        super().__init__(drop)
        self.dim, self.start = dim, start
        self.alpha = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, 1 / math.sqrt(self.dim))

    def rate(self) -> Tensor:
        """|alpha|, for each channel."""
        return (self.alpha.to(precise_dtype(self.alpha)) * (self.start * math.sqrt(self.dim))).abs()

    def contributions(self, update: Tensor) -> State:
        """``|alpha| * unit(o)``; x itself is carried with the factor 1 - |alpha|."""
        return ((self.rate() * self.drop(unit(update))).to(update.dtype),)

    def forward(self, state: State, update: Tensor) -> State:
        (x,) = state
        high = precise_dtype(x)
        x_high, o_high = x.to(high), self.drop(unit(update.to(high)))
        return (unit(x_high + self.rate() * (o_high - x_high)).to(x.dtype),)

    def extra_repr(self) -> str:
        return f"{self.dim}, start={self.start:g}"
