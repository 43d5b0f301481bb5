"""How several matrices lie in one tensor: one after the other or head by head, and possibly transposed.

============== ============================================= ===============================================
layout         rows                                          found in
============== ============================================= ===============================================
blocks         q | k | v, gate | up                          GPT-2, GLM-4, ViT of timm, Megatron's gate | up
groups         q of a kv head's group, its k, its v, and     Megatron's linear_qkv; with as many kv heads as
               then those of the next kv head                query heads GPT-NeoX and BLOOM
transposed     the matrix lies as input by output            GPT-2 (Conv1D)
============== ============================================= ===============================================

A vector, the bias, follows its matrix's rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How the matrices of some roles lie in one tensor; with a single role and no transposition, as they are.

    >>> groups = Layout("groups")
    >>> q, k, v = (torch.arange(n) + s for n, s in ((4, 0), (2, 10), (2, 20)))
    >>> groups.join([q, k, v], head_dim=1)
    tensor([ 0,  1, 10, 20,  2,  3, 11, 21])
    >>> [part.tolist() for part in groups.split(groups.join([q, k, v], head_dim=1), [4, 2, 2], head_dim=1)]
    [[0, 1, 2, 3], [10, 11], [20, 21]]
    """

    order: Literal["blocks", "groups"] = "blocks"
    """groups: heads of the same key-value group lie together."""
    transposed: bool = False
    """Whether a matrix lies as input by output."""

    def split(self, tensor: Tensor, rows: Sequence[int], head_dim: int) -> list[Tensor]:
        """The parts, with so many rows each.

        Raises ValueError if the tensor does not have the rows of all parts.
        """
        tensor = self._turned(tensor)
        if tensor.shape[0] != sum(rows):
            raise ValueError(f"expected {' + '.join(map(str, rows))} rows, got {tensor.shape[0]}")
        if self.order == "blocks":
            return list(tensor.split(list(rows)))
        n_groups = _groups(rows, head_dim)
        parts = tensor.unflatten(0, (n_groups, -1)).split([n // n_groups for n in rows], dim=1)
        return [part.flatten(0, 1) for part in parts]

    def join(self, parts: Sequence[Tensor], head_dim: int) -> Tensor:
        """The inverse of ``split``."""
        if self.order == "blocks":
            return self._turned(parts[0] if len(parts) == 1 else torch.cat(list(parts)))
        n_groups = _groups([part.shape[0] for part in parts], head_dim)
        grouped = [part.unflatten(0, (n_groups, -1)) for part in parts]
        return self._turned(torch.cat(grouped, dim=1).flatten(0, 1))

    def _turned(self, tensor: Tensor) -> Tensor:
        return tensor.T.contiguous() if self.transposed and tensor.ndim == 2 else tensor


def _groups(rows: Sequence[int], head_dim: int) -> int:
    """Number of key-value heads of q, k, v with so many rows."""
    _, keys, _ = rows
    return keys // head_dim
