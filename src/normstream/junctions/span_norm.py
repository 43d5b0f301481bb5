"""SpanNorm: the second residual of a block starts at the block's input, over both sublayers.

attention       read  z = x                join  s = x + o  (x stays)
feed-forward    read  z = N_span(s)        join  x <- N(x + o)

The sum s travels behind the stream x from the join after attention to the read before the feed-forward.
The join of the feed-forward is ``PostNormJoin``.
"""

import torch
from torch import Tensor, nn

from normstream.junctions.junction import Join, Read, State, add


class SpanJoin(Join):
    """``s = x + o``: the state becomes (x, s), the stream x receives nothing.

    Source: arXiv 2601.22580.

    >>> from normstream.junctions.junction import Drop
    >>> SpanJoin(Drop())((torch.ones(1, 2),), torch.ones(1, 2))
    (tensor([[1., 1.]]), tensor([[2., 2.]]))
    """

    def contributions(self, update: Tensor) -> State:
        return (torch.zeros_like(update),)

    def forward(self, state: State, update: Tensor) -> State:
        (x,) = state
        return x, add(x, self.drop(update))


class SpanRead(Read):
    """``z = N_span(s)``; s is used up and the state is x alone again.

    >>> SpanRead(nn.Identity())((torch.ones(1), torch.zeros(1)))
    ((tensor([1.]),), tensor([0.]))
    """

    def __init__(self, norm_span: nn.Module) -> None:
        super().__init__()
        self.norm_span = norm_span

    def forward(self, state: State) -> tuple[State, Tensor]:
        x, s = state
        return (x,), self.norm_span(s)
