"""One stream x whose residual is scaled before the update is added: DeepNorm, Keel, NormFormer.

join   ``DeepNormJoin``         x <- N(alpha x + o)
       ``ResidualScaleJoin``    x <- lambda * x + o
"""

import torch
from torch import Tensor, nn

from normstream.junctions.junction import Drop, Join, State, add


class DeepNormJoin(Join):
    """``x <- N(alpha x + o)`` with a constant alpha, a Python float.

    Source: DeepNet, arXiv 2203.00555; Keel, arXiv 2601.19895, has the same join with a larger alpha.

    >>> DeepNormJoin(torch.nn.Identity(), alpha=3.0, drop=Drop())((torch.ones(1, 2),), torch.ones(1, 2))
    (tensor([[4., 4.]]),)
    """

    def __init__(self, norm: nn.Module, alpha: float, drop: Drop) -> None:
        super().__init__(drop)
        self.norm, self.alpha = norm, alpha

    def contributions(self, update: Tensor) -> State:
        return (self.drop(update),)

    def forward(self, state: State, update: Tensor) -> State:
        (x,) = state
        (o,) = self.contributions(update)
        return (self.norm(add(self.alpha * x, o)),)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:.6g}"


class ResidualScaleJoin(Join):
    """``x <- lambda * x + o`` with a learned vector lambda of the stream's width, which starts at 1.

    Source: NormFormer, arXiv 2110.09456 (ResScale).

    >>> ResidualScaleJoin(2, Drop())((torch.ones(1, 2),), torch.ones(1, 2))
    (tensor([[2., 2.]], grad_fn=<...>),)
    """

    def __init__(self, dim: int, drop: Drop) -> None:
        super().__init__(drop)
        self.residual_scale = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.residual_scale)

    def contributions(self, update: Tensor) -> State:
        return (self.drop(update),)

    def forward(self, state: State, update: Tensor) -> State:
        (x,) = state
        (o,) = self.contributions(update)
        return (add((self.residual_scale * x).to(x.dtype), o),)
