"""What autograd keeps between the forward and the backward pass."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Kept:
    """The tensors that ``kept_tensors`` saw; it holds them, so that no memory is used twice while it counts."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def nbytes(self, without: Iterable[Tensor] = ()) -> int:
        """Bytes of the distinct storages, but for those of some tensors; single numbers (0-dim) count nothing.

        A storage counts whole, even if only a part of it was kept: it cannot be freed in parts.
        """
        skip = {tensor.untyped_storage().data_ptr() for tensor in without}
        storages = (tensor.untyped_storage() for tensor in self.tensors if tensor.ndim)
        return sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in skip}.values())

    def copies_of(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Kept tensors that are a parameter in another dtype, transposed or not: what autocast makes of the weights.

        They are told by their values, so that it does not matter who made them, autocast or compiled code.
        """
        matrices = [p.detach() for p in parameters if p.ndim == 2]
        return [tensor for tensor in self.tensors if any(_is_copy(tensor, matrix) for matrix in matrices)]


def _is_copy(tensor: Tensor, matrix: Tensor) -> bool:
    if tensor.ndim != 2 or tensor.dtype == matrix.dtype:
        return False
    turned = [m for m in (matrix, matrix.T) if m.shape == tensor.shape]
    return any(torch.equal(tensor, m.to(tensor.dtype)) for m in turned)


@contextmanager
def kept_tensors() -> Iterator[Kept]:
    """Collects every tensor that autograd saves in the block.

    Hooks that are entered inside of the block, as those of activation checkpointing, decide first: what they keep as a
    tensor counts, what they keep as a recipe does not.

    >>> x = torch.ones(4, requires_grad=True)
    >>> with kept_tensors() as kept:
    ...     y = x.exp()  # keeps its result
    >>> kept.nbytes(), kept.nbytes(without=[y])
    (16, 0)
    """
    kept = Kept()
    enter = saved_tensors_hooks.__enter__

    def watched(self: saved_tensors_hooks) -> None:
        pack = self.pack_hook

        @torch.compiler.disable
        def record(tensor: Tensor) -> Any:
            packed = pack(tensor)
            if isinstance(packed, Tensor):
                kept.tensors.append(packed.detach())
            return packed

        self.pack_hook = record  # pyright: ignore[reportAttributeAccessIssue]
        enter(self)

    saved_tensors_hooks.__enter__ = watched
    try:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            yield kept
    finally:
        saved_tensors_hooks.__enter__ = enter
