"""The token axis of a tensor, a bump at one token, and which tokens moved."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

MOVED = 1e-5
"""Smallest change of a token's vector, relative to the tensor's root mean square, that counts."""

Spread = Literal["nothing", "one", "others"]
"""Which tokens move when one token is bumped: none, a single one, or several."""


def token_axis(tensor: Tensor, lengths: Iterable[int]) -> int | None:
    """The axis of a sequence length: the one before the last if it has that size, else the only one that has.

    >>> [token_axis(torch.zeros(shape), {31}) for shape in ((1, 31, 8), (1, 31, 4, 8), (8, 8))]
    [1, 1, None]
    """
    lengths = set(lengths)
    if tensor.ndim >= 2 and tensor.shape[-2] in lengths:
        return tensor.ndim - 2
    fitting = [axis for axis, size in enumerate(tensor.shape) if size in lengths]
    return fitting[0] if len(fitting) == 1 else None


def at_token(tensor: Tensor, lengths: Iterable[int]) -> Tensor:
    """The tensor with noise of its own size at one token, or everywhere where it has no token axis.

    The token is an early one, since causal mixers only move later ones.
    """
    noise = _noise(tensor, seed=1)
    axis = token_axis(tensor, lengths)
    if axis is None:
        return tensor + noise
    length = tensor.shape[axis]
    mask = torch.zeros(length, dtype=tensor.dtype)
    mask[length // 3] = 1
    return tensor + noise * mask.reshape([-1 if a == axis else 1 for a in range(tensor.ndim)])


def apart(tensor: Tensor) -> Tensor:
    """The tensor with noise of its own size everywhere, so that no two tokens are alike."""
    return tensor + _noise(tensor, seed=2)


def _noise(tensor: Tensor, seed: int) -> Tensor:
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor.dtype)
    return noise * tensor.square().mean().sqrt().clamp(min=1e-3)


def spread_of(before: Tensor | None, after: Tensor | None, lengths: Iterable[int]) -> Spread:
    """Which tokens differ between two tensors; in tensors without a token axis, any difference counts as several.

    >>> x = torch.ones(1, 31, 8)
    >>> spread_of(x, at_token(x, {31}), {31}), spread_of(x, 2 * x, {31}), spread_of(x, x, {31})
    ('one', 'others', 'nothing')
    """
    moved = count_moved(before, after, lengths)
    if moved is None:
        return "others"
    return "nothing" if moved == 0 else "one" if moved == 1 else "others"


def count_moved(before: Tensor | None, after: Tensor | None, lengths: Iterable[int]) -> int | None:
    """How many tokens differ between two tensors; None where one has no token axis, or only one is there, and they do.

    >>> x = torch.ones(1, 31, 8)
    >>> count_moved(x, 2 * x, {31}), count_moved(x, 2 * x, {7})
    (31, None)
    """
    if before is None or after is None or before.shape != after.shape:
        return 0 if before is after else None
    scale = before.square().mean().sqrt().clamp(min=1e-12)
    moved = (after - before).abs() > MOVED * scale
    axis = token_axis(before, lengths)
    if not moved.any():
        return 0
    return None if axis is None else int(moved.movedim(axis, 0).flatten(1).any(1).sum())
