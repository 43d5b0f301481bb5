"""Pre-Norm and Post-Norm: one stream x.

Pre-Norm     x <- x + o         z = N(x)
Post-Norm    x <- N(x + o)      z = x
"""

from torch import Tensor, nn

from normstream.junctions.junction import Drop, Join, Read, State, add


class PreNormJoin(Join):
    """``x <- x + o``.

    >>> import torch
    >>> PreNormJoin(Drop())((torch.ones(1, 2),), torch.ones(1, 2))
    (tensor([[2., 2.]]),)
    """

    def contributions(self, update: Tensor) -> State:
        return (self.drop(update),)

    def forward(self, state: State, update: Tensor) -> State:
        (x,) = state
        (o,) = self.contributions(update)
        return (add(x, o),)


class PreNormRead(Read):
    """``z = N(x)``; as the last read, this is the final norm.

    >>> import torch
    >>> PreNormRead(nn.Identity())((torch.ones(2),))
    ((tensor([1., 1.]),), tensor([1., 1.]))
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, state: State) -> tuple[State, Tensor]:
        (x,) = state
        return state, self.norm(x)


class PostNormJoin(Join):
    """``x <- N(x + o)`` (Vaswani et al. 2017, arXiv 1706.03762).

    >>> import torch
    >>> PostNormJoin(torch.nn.Identity(), Drop())((torch.ones(1, 2),), torch.ones(1, 2))
    (tensor([[2., 2.]]),)
    """

    def __init__(self, norm: nn.Module, drop: Drop) -> None:
        super().__init__(drop)
        self.norm = norm

    def contributions(self, update: Tensor) -> State:
        return (self.drop(update),)

    def forward(self, state: State, update: Tensor) -> State:
        (x,) = state
        (o,) = self.contributions(update)
        return (self.norm(add(x, o)),)


class PostNormRead(Read):
    """``z = x``: the sublayer reads the stream itself.

    >>> import torch
    >>> PostNormRead()((torch.ones(2),))
    ((tensor([1., 1.]),), tensor([1., 1.]))
    """

    def forward(self, state: State) -> tuple[State, Tensor]:
        (x,) = state
        return state, x
