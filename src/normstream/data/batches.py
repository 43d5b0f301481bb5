"""What the batches and the splits of every task have in common.

A batch is a frozen dataclass whose fields are tensors with one row a sample, or None.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor


@runtime_checkable
class AnyBatch(Protocol):
    """Samples of one optimizer step, whatever the task."""

    @property
    def n_targets(self) -> int:
        """How many targets the loss is the mean over."""
        ...

    def to(self, device: torch.device | str) -> "AnyBatch":
        """The same batch on another device."""
        ...

    def split(self, parts: int) -> Iterator["AnyBatch"]:
        """The batch cut into equal micro-batches along its first axis."""
        ...


@runtime_checkable
class Samples(Protocol):
    """One split of a data set."""

    @property
    def size(self) -> int:
        """How large it is, in the task's unit: tokens of text, pairs, images."""
        ...

    @property
    def tokens_per_sample(self) -> float:
        """Positions of one sample that the model works on, on average."""
        ...

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def batch(self, samples: Sequence[int] | np.ndarray) -> Any:
        """The samples with these numbers, in this order, as an ``AnyBatch``; the same at every call."""
        ...


B = TypeVar("B")


def split_rows(batch: B, parts: int) -> Iterator[B]:
    """Equal parts of a batch, in order; its number of rows is divisible by ``parts``."""
    tensors = _tensors(batch)
    n_rows = len(next(iter(tensors.values()))) // parts
    for part in range(parts):
        rows = slice(part * n_rows, (part + 1) * n_rows)
        yield replace(batch, **{name: tensor[rows] for name, tensor in tensors.items()})  # pyright: ignore[reportArgumentType, reportCallIssue]


def to_device(batch: B, device: torch.device | str) -> B:
    """The batch on another device; from pinned memory it is copied without waiting."""
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in _tensors(batch).items()}
    return replace(batch, **moved)  # pyright: ignore[reportArgumentType, reportCallIssue]


def pinned(batch: B) -> B:
    """The batch in memory that a GPU can copy from by itself."""
    return replace(batch, **{name: tensor.pin_memory() for name, tensor in _tensors(batch).items()})  # pyright: ignore[reportArgumentType, reportCallIssue]


def _tensors(batch: Any) -> dict[str, Tensor]:
    parts = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}
