"""SpanNorm: the second residual of a block starts at the block's input, over both sublayers.

attention        read  z = x                        join  s = x + o  (x stays)
feed-forward     read  z = N_span(s)                join  x <- N(x + o)

cross-attention  read  y = N_span(s), z = y         join  s <- y + o  (x stays)

The sum s travels behind the stream x from the join after attention to the read before the feed-forward; within a
cross-attention, which stands between those two, y takes its place. The join of the feed-forward is ``PostNormJoin``.
"""

import torch
from torch import Tensor, nn

from normstream.junctions.junction import Join, Read, State, add


class SpanJoin(Join):
    """``s = x + o``, or ``s = y + o`` from a state (x, y): the state becomes (x, s), the stream x receives nothing.

    Source: arXiv 2601.22580.

    >>> from normstream.junctions.junction import Drop
    >>> SpanJoin(Drop())((torch.ones(1, 2),), torch.ones(1, 2))
    (tensor([[1., 1.]]), tensor([[2., 2.]]))
    """

    def contributions(self, update: Tensor) -> State:
        return (torch.zeros_like(update),)

    def forward(self, state: State, update: Tensor) -> State:
        return state[0], add(state[-1], self.drop(update))


class SpanRead(Read):
    """``z = N_span(s)``; s is used up and the state is x alone again, or (x, z) with ``keeps``.

    >>> SpanRead(nn.Identity())((torch.ones(1), torch.zeros(1)))
    ((tensor([1.]),), tensor([0.]))
    """

    def __init__(self, norm_span: nn.Module, keeps: bool = False) -> None:
        super().__init__()
        self.norm_span, self.keeps = norm_span, keeps

    def forward(self, state: State) -> tuple[State, Tensor]:
        x, s = state
        z = self.norm_span(s)
        return ((x, z) if self.keeps else (x,)), z
