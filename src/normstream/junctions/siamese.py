"""SiameseNorm: two streams, x normalized again and again (Post-Norm-like), y only ever added to (Pre-Norm-like).

    join                                  x <- N_x(x + o / c)      y <- y + o
    read                                  z = N_in(x + N_y(y))
    read (hybrid-pre, before attention)   z = c1 * x + N_y(y)

Both streams receive the same update o of one shared sublayer. c grows with depth; it scales the update of x only.

The paper also tries other pairs of streams. A stream is Post-Norm-like if its join norms it, Pre-Norm-like if its read
does; hence each of the two norms can be on each of the two streams.
"""

import torch
from torch import Tensor, nn

from normstream.junctions.junction import DepthConstant, Drop, Join, Read, State, add
from normstream.ops import JoinPart, ReadPart


class SiameseStart(nn.Module):
    """``x = N_x(e), y = e`` for the embedding e; each stream starts raw where it has no norm.

    >>> x, y = SiameseStart(None)((), torch.ones(1))
    >>> bool(x == y)
    True
    """

    def __init__(self, norm_x: nn.Module | None, norm_y: nn.Module | None = None) -> None:
        super().__init__()
        self.norm_x, self.norm_y = norm_x, norm_y

    def forward(self, state: State, embedding: Tensor) -> State:
        return normed(self.norm_x, embedding), normed(self.norm_y, embedding)

    def part(self) -> JoinPart | None:
        return JoinPart(norm_x=self.norm_x, second=1.0, starts=True) if self.norm_y is None else None


class SiameseJoin(Join):
    """``x <- N_x(x + o / c), y <- y + o``; where a stream has no norm here, the sum stays as it is.

    Args:
        norm_x: norm of the x stream, or None (hybrid-pre after its feed-forward).
        scale: 1 / c, a Python float.
        drop: dropout and drop-path of the update; one draw serves both streams.
        norm_y: norm of the y stream, as a rule None.

    Source: arXiv 2602.08064, Algorithm 1; Qwen-Applications/SiameseNorm:deit-model-siamesenorm.py.

    >>> join = SiameseJoin(None, scale=0.5, drop=Drop())
    >>> [s.tolist() for s in join((torch.zeros(1, 1), torch.zeros(1, 1)), torch.ones(1, 1))]
    [[[0.5]], [[1.0]]]
    """

    scale = DepthConstant()
    _scale: Tensor

    def __init__(self, norm_x: nn.Module | None, scale: float, drop: Drop, norm_y: nn.Module | None = None) -> None:
        super().__init__(drop)
        self.norm_x, self.norm_y, self.scale = norm_x, norm_y, scale

    def contributions(self, update: Tensor) -> State:
        o = self.drop(update)
        return o * self._scale, o

    def forward(self, state: State, update: Tensor) -> State:
        x, y = state
        o_x, o_y = self.contributions(update)
        return normed(self.norm_x, add(x, o_x)), normed(self.norm_y, add(y, o_y))

    def part(self) -> JoinPart | None:
        if self.norm_y is not None:
            return None
        return JoinPart(norm_x=self.norm_x, scale=self._scale, second=1.0, drop=self.drop)

    def extra_repr(self) -> str:
        return f"scale={self.scale:.6g}"


class SiameseRead(Read):
    """``z = N_in(x + N_y(y))``; without ``norm_in`` it is ``z = x + N_y(y)``, the paper's Algorithm 1 and read-out.

    Args:
        norm_y: norm of the y stream, or None where its join has normed it.
        norm_in: norm of the sum, or None.
        norm_x: norm of the x stream, as a rule None.

    >>> read = SiameseRead(norm_y=nn.Identity(), norm_in=None)
    >>> read((torch.ones(1), torch.ones(1)))[1]
    tensor([2.])
    """

    def __init__(self, norm_y: nn.Module | None, norm_in: nn.Module | None, norm_x: nn.Module | None = None) -> None:
        super().__init__()
        self.norm_x, self.norm_y, self.norm_in = norm_x, norm_y, norm_in

    def forward(self, state: State) -> tuple[State, Tensor]:
        x, y = state
        z = normed(self.norm_x, x) + normed(self.norm_y, y)
        return state, normed(self.norm_in, z)

    def part(self) -> ReadPart | None:
        if self.norm_x is not None or self.norm_y is None:
            return None
        return ReadPart(norm_in=self.norm_in, norm_y=self.norm_y)


class HybridPreRead(Read):
    """``z = c1 * x + N_y(y)``, hybrid-pre's attention input: a learned vector c1 (starts at 1), no input norm.

    The norms on Q, K and V inside the attention take the input norm's place.

    Source: Qwen-Applications/SiameseNorm:OLMo_model_hybrid_pre.py.

    >>> HybridPreRead(1, nn.Identity())((torch.ones(1), torch.ones(1)))[1]
    tensor([2.], grad_fn=<...>)
    """

    def __init__(self, dim: int, norm_y: nn.Module) -> None:
        super().__init__()
        self.norm_y = norm_y
        self.c1 = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.c1)

    def forward(self, state: State) -> tuple[State, Tensor]:
        x, y = state
        return state, (self.c1 * x).to(x.dtype) + self.norm_y(y)

    def part(self) -> ReadPart:
        return ReadPart(norm_y=self.norm_y, c=self.c1)


def normed(norm: nn.Module | None, stream: Tensor) -> Tensor:
    """The stream after its norm, if it has one."""
    return stream if norm is None else norm(stream)
