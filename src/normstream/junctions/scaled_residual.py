"""One stream x whose residual is scaled before the update is added: DeepNorm, Keel, NormFormer.

join   ``DeepNormJoin``         x <- N(alpha x + o)         or x <- alpha x + o
       ``ResidualScaleJoin``    x <- lambda * x + o         or x <- lambda * x + N_out(o)
"""

import torch
from torch import Tensor, nn

from normstream.junctions.junction import Drop, Join, State, add
from normstream.ops import JoinPart


class DeepNormJoin(Join):
    """``x <- N(alpha x + o)`` with a constant alpha, a Python float; without a norm ``x <- alpha x + o``.

    Source: DeepNet, arXiv 2203.00555; Keel, arXiv 2601.19895, has the same join with a larger alpha.

    >>> DeepNormJoin(torch.nn.Identity(), alpha=3.0, drop=Drop())((torch.ones(1, 2),), torch.ones(1, 2))
    (tensor([[4., 4.]]),)
    """

    def __init__(self, norm: nn.Module | None, alpha: float, drop: Drop) -> None:
        super().__init__(drop)
        self.norm, self.alpha = norm, alpha

    def contributions(self, update: Tensor) -> State:
        return (self.drop(update),)

    def forward(self, state: State, update: Tensor) -> State:
        (x,) = state
        (o,) = self.contributions(update)
        x = add(self.alpha * x, o)
        return (x if self.norm is None else self.norm(x),)

    def part(self) -> JoinPart:
        return JoinPart(norm_x=self.norm, alpha=self.alpha, drop=self.drop)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:.6g}"


class ResidualScaleJoin(Join):
    """``x <- lambda * x + o`` with a learned vector lambda of the stream's width, which starts at 1.

    With ``norm_out``, a norm of the raw update, it is ``x <- lambda * x + N_out(o)``.

    Source: NormFormer, arXiv 2110.09456 (ResScale); lucidrains/x-transformers:x_transformers/x_transformers.py.

    >>> ResidualScaleJoin(2, Drop())((torch.ones(1, 2),), torch.ones(1, 2))
    (tensor([[2., 2.]], grad_fn=<...>),)
    """

    def __init__(self, dim: int, drop: Drop, norm_out: nn.Module | None = None) -> None:
        super().__init__(drop)
        self.norm_out = norm_out
        self.residual_scale = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.residual_scale)

    def contributions(self, update: Tensor) -> State:
        return (self.drop(update if self.norm_out is None else self.norm_out(update)),)

    def forward(self, state: State, update: Tensor) -> State:
        (x,) = state
        (o,) = self.contributions(update)
        return (add((self.residual_scale * x).to(x.dtype), o),)
