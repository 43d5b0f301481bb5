"""ResiDual: a Post-Norm stream x that every sublayer reads, and a sum d that only the read-out reads.

start      x = e             d = lambda e
join       x <- N(x + o)     d <- d + lambda o
read       z = x
last read  z = alpha x + N_d(d)
"""

from torch import Tensor, nn

from normstream.junctions.junction import Drop, Join, Read, State, add
from normstream.ops import JoinPart, ReadPart


class ResiDualStart(nn.Module):
    """``x = e, d = lambda e`` for the embedding e.

    >>> import torch
    >>> ResiDualStart(scale=0.5)((), torch.ones(1))
    (tensor([1.]), tensor([0.5000]))
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, state: State, embedding: Tensor) -> State:
        return embedding, self.scale * embedding

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}"


class ResiDualJoin(Join):
    """``x <- N(x + o), d <- d + lambda o``; one draw of dropout serves both streams.

    Args:
        norm: norm of the x stream.
        scale: lambda, a Python float; below 1 it keeps d within fp16.
        drop: dropout and drop-path of the update.

    Source: arXiv 2304.14802; microsoft/ResiDual:resi_dual/resi_dual_layers.py.

    >>> import torch
    >>> join = ResiDualJoin(torch.nn.Identity(), scale=0.5, drop=Drop())
    >>> join((torch.zeros(1, 1), torch.zeros(1, 1)), torch.ones(1, 1))
    (tensor([[1.]]), tensor([[0.5000]]))
    """

    def __init__(self, norm: nn.Module, scale: float, drop: Drop) -> None:
        super().__init__(drop)
        self.norm, self.scale = norm, scale

    def contributions(self, update: Tensor) -> State:
        o = self.drop(update)
        return o, self.scale * o

    def forward(self, state: State, update: Tensor) -> State:
        x, d = state
        o_x, o_d = self.contributions(update)
        return self.norm(add(x, o_x)), add(d, o_d)

    def part(self) -> JoinPart:
        return JoinPart(norm_x=self.norm, second=self.scale, drop=self.drop)

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}"


class ResiDualRead(Read):
    """``z = x``, or ``z = N_in(x)`` with an input norm: no sublayer sees d.

    >>> import torch
    >>> ResiDualRead(None)((torch.ones(1), torch.zeros(1)))[1]
    tensor([1.])
    """

    def __init__(self, norm_in: nn.Module | None) -> None:
        super().__init__()
        self.norm_in = norm_in

    def forward(self, state: State) -> tuple[State, Tensor]:
        x, _ = state
        return state, (x if self.norm_in is None else self.norm_in(x))

    def part(self) -> ReadPart:
        return ReadPart(norm_in=self.norm_in, has_z=self.norm_in is not None)


class ResiDualReadOut(Read):
    """``z = alpha x + N_d(d)``, the final hidden vector, with no norm on the sum.

    >>> import torch
    >>> ResiDualReadOut(torch.nn.Identity(), alpha=0.5)((torch.ones(1), torch.ones(1)))[1]
    tensor([1.5000])
    """

    def __init__(self, norm_d: nn.Module, alpha: float) -> None:
        super().__init__()
        self.norm_d, self.alpha = norm_d, alpha

    def forward(self, state: State) -> tuple[State, Tensor]:
        x, d = state
        return state, self.alpha * x + self.norm_d(d)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:g}"
