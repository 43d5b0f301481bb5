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

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normstream.names import check_choice
from normstream.ops import Backend, JoinPart, ReadPart, fused

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

    @property
    def active(self) -> bool:
        """Whether it changes anything now."""
        return self.training and (self.dropout > 0 or self.drop_path > 0)

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

    def part(self) -> JoinPart | None:
        """The equation as part of a fused operation, after dropout; None where it has no place there."""
        return None

    def forward(self, state: State, update: Tensor) -> State:
        """The state with the update in it."""
        raise NotImplementedError


class Read(nn.Module):
    """Takes the next sublayer's input z from the streams. The equation is the subclass's ``forward``."""

    def part(self) -> ReadPart | None:
        """The equation as part of a fused operation; None where it has no place there."""
        return None

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
    """A join and the read that follows it, as one fused operation where there is one.

    ``backend`` says how: ``auto`` takes C++ on a CPU and Triton on a GPU where they can be had, ``plain`` the join's
    and the read's own code; ``cpp`` and ``triton`` raise where the machine lacks them. While something hooks the join,
    the read or one of their norms, their own code runs, so that the hook is called. ``normstream.ops.calls`` counts
    what ran.

    Shapes: update, z and each stream are ``(B, T, D)``; n hyper-connected streams are one tensor ``(B, T, n, D)``.

    >>> from normstream.norms import RMSNorm
    >>> from normstream.junctions import PreNormJoin, PreNormRead
    >>> junction = Junction(PreNormJoin(Drop()), PreNormRead(RMSNorm(2, eps=0.0)))
    >>> (x,), z = junction((torch.tensor([[[1.0, 4.0]]]),), torch.tensor([[[2.0, 0.0]]]))
    >>> x.tolist(), z[0, 0].detach()
    ([[[3.0, 4.0]]], tensor([0.8485, 1.1314]))
    """

    backend: Backend = "auto"

    def __init__(self, join: nn.Module, read: Read) -> None:
        super().__init__()
        self.join, self.read = join, read

    def forward(self, state: State, update: Tensor) -> tuple[State, Tensor]:
        if self.backend != "plain":
            parts = part_of(self.join), part_of(self.read)
            if None not in parts and (result := fused(*parts, state, update, self.backend)) is not None:
                return result
        return self.read(self.join(state, update))


def set_backend(model: nn.Module, backend: Backend) -> None:
    """Chooses how every junction of a model runs; see ``Junction``.

    Raises:
        ValueError: for an unknown name; for one that the machine does not have when the model runs.

    >>> junction = Junction(Start(), Read())
    >>> set_backend(junction, "plain")
    >>> junction.backend
    'plain'
    """
    check_choice("backend", backend, Backend)
    for module in model.modules():
        if isinstance(module, Junction):
            module.backend = backend


def part_of(half: Any) -> Any:
    """The ``part()`` of a join or a read; None where its own code must run: it has none, or something hooks it."""
    if not _describes_itself(type(half)):
        return None
    hooked = not torch.compiler.is_compiling() and nn.modules.module._has_any_global_hook()
    return None if hooked or any(map(_is_hooked, half.modules())) else half.part()


@torch.compiler.assume_constant_result
def _describes_itself(kind: type) -> bool:
    """Whether ``part`` belongs to the equation in ``forward``: a subclass may have changed the latter alone."""
    for base in kind.__mro__:
        if "part" in vars(base):
            return base not in (Join, Read)
        if "forward" in vars(base):
            return False
    return False


def _is_hooked(module: nn.Module) -> bool:
    """Whether something is to be called with a module, or instead of its class's ``forward``."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in vars(module)


class DepthConstant:
    """A number that differs from layer to layer: a float to whoever asks, beside it a tensor for the operations.

    ``torch.compile`` takes a float as part of the code and would compile every layer anew; the tensor, a float64 number
    on the CPU in the attribute of the same name with an underscore, is an input. It is no buffer, so a model that is
    built on the meta device does not lose it.

    >>> class Half(nn.Module):
    ...     scale = DepthConstant()
    >>> half = Half()
    >>> half.scale = 0.5
    >>> half.scale, half._scale
    (0.5, tensor(0.5000, dtype=torch.float64))
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute = f"_{name}"

    def __get__(self, module: nn.Module, owner: type) -> float:
        return getattr(module, self.attribute).item()

    def __set__(self, module: nn.Module, value: float) -> None:
        setattr(module, self.attribute, torch.tensor(value, dtype=torch.float64, device="cpu"))


def add(stream: Tensor, update: Tensor) -> Tensor:
    """``stream + update`` in the dtype of the stream: an update is cast up to it, the stream never down."""
    return stream + update.to(stream.dtype)
