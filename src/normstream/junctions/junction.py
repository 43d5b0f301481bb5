"""The protocol: a row of sublayers F_1 ... F_N has N + 1 junctions, one before, between and after them.

    state, z = junction(state, update)

A junction is a *join*, which belongs to the sublayer before it and adds that sublayer's update to the residual
streams, followed by a *read*, which belongs to the sublayer after it and takes that sublayer's input z from them:

    (state, update) --join--> state --read--> (state, z) --sublayer--> update --> next junction

The state is a tuple of tensors: the streams, one tensor each (n hyper-connected streams are one tensor), and behind
them what one half leaves for the next, as the weights of hyper-connections. The first junction starts from the empty
state, with the embedding as its update; the z of the last one is the model's final hidden vector.

Shape suffixes: B batch, T sequence, D width.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

State = tuple[Tensor, ...]


class Drop(nn.Module):
    """Dropout and drop-path on an update, drawn once, before any stream receives it.

    Drop-path zeroes the whole update of a sample with probability ``drop_path`` and scales the others by
    1 / (1 - drop_path) (Huang et al. 2016, arXiv 1603.09382). In evaluation mode nothing happens.

    Shape: ``(B, ..., D)`` to the same. Raises ValueError for a probability outside [0, 1).

    >>> Drop(dropout=0.1).eval()(torch.ones(1, 2))
    tensor([[1., 1.]])
    """

    def __init__(self, dropout: float = 0.0, drop_path: float = 0.0) -> None:
        super().__init__()
        for name, probability in (("dropout", dropout), ("drop_path", drop_path)):
            if not 0 <= probability < 1:
                raise ValueError(f"{name} must be in [0, 1), got {probability}")
        self.dropout, self.drop_path = dropout, drop_path

    def forward(self, update: Float[Tensor, "B *T D"]) -> Float[Tensor, "B *T D"]:
        if not self.training:
            return update
        if self.dropout > 0:
            update = F.dropout(update, self.dropout)
        if self.drop_path > 0:
            keep = 1 - self.drop_path
            one_per_sample = (update.shape[0],) + (1,) * (update.ndim - 1)
            update = update * (torch.rand(one_per_sample, device=update.device) < keep).to(update.dtype) / keep
        return update

    def extra_repr(self) -> str:
        return f"dropout={self.dropout:g}, drop_path={self.drop_path:g}"


class Join(nn.Module):
    """Adds a sublayer's update to the streams. The equation is the subclass's ``forward``.

    ``contributions(update)`` is, stream by stream, what is really added (the update itself, a scaled or a normed
    one), after dropout: probes check the residual sum with it, never with the raw sublayer output.
    """

    def __init__(self, drop: Drop) -> None:
        super().__init__()
        self.drop = drop

    def contributions(self, update: Tensor) -> State:
        """What each stream receives."""
        raise NotImplementedError

    def forward(self, state: State, update: Tensor) -> State:
        """The state with the update in it."""
        raise NotImplementedError


class Read(nn.Module):
    """Takes the next sublayer's input z from the streams. The equation is the subclass's ``forward``."""

    def forward(self, state: State) -> tuple[State, Tensor]:
        """The state, as a rule unchanged, and z."""
        raise NotImplementedError


class Start(nn.Module):
    """The join of the first junction where no norm is on the embedding: every stream starts as the embedding.

    >>> [stream.tolist() for stream in Start(n_streams=2)((), torch.ones(1))]
    [[1.0], [1.0]]
    """

    def __init__(self, n_streams: int = 1) -> None:
        super().__init__()
        self.n_streams = n_streams

    def forward(self, state: State, embedding: Tensor) -> State:
        return (embedding,) * self.n_streams


class Junction(nn.Module):
    """A join and the read that follows it.

    Shapes: update, z and each stream are ``(B, T, D)``; n hyper-connected streams are one tensor ``(B, T, n, D)``.

    >>> from normstream.norms import RMSNorm
    >>> from normstream.junctions import PreNormJoin, PreNormRead
    >>> junction = Junction(PreNormJoin(Drop()), PreNormRead(RMSNorm(2, eps=0.0)))
    >>> (x,), z = junction((torch.tensor([[[1.0, 4.0]]]),), torch.tensor([[[2.0, 0.0]]]))
    >>> x[0, 0], z[0, 0]
    (tensor([3., 4.]), tensor([0.8485, 1.1314], grad_fn=<...>))
    """

    def __init__(self, join: nn.Module, read: Read) -> None:
        super().__init__()
        self.join, self.read = join, read

    def forward(self, state: State, update: Tensor) -> tuple[State, Tensor]:
        return self.read(self.join(state, update))


def add(stream: Tensor, update: Tensor) -> Tensor:
    """``stream + update`` in the dtype of the stream: an update is cast up to it, the stream never down."""
    return stream + update.to(stream.dtype)
