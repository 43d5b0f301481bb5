"""What attention keeps of earlier positions, and of an encoder's output, for generation.

Shape suffixes: B batch, T sequence, M positions of the memory, G key-value heads, K head_dim.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class KVCache:
    """Keys and values of all earlier positions, one pair a layer, appended to by each forward pass.

    Latent attention keeps its low-rank vector and its shared rotary key instead, as one head each. Cross-attention's
    keys and values are those of the encoder's output: they are computed by the first forward pass and stay.

    >>> KVCache().length
    0
    """

    def __init__(self) -> None:
        self._keys_values: dict[int, tuple[Tensor, Tensor]] = {}
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """Number of positions seen."""
        return self._keys_values[0][0].shape[2] if self._keys_values else 0

    def extend(self, layer: int, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the new keys and values of one layer and returns all of them."""
        if layer in self._keys_values:
            old_k, old_v = self._keys_values[layer]
            k_BGTK, v_BGTK = torch.cat((old_k, k_BGTK), dim=2), torch.cat((old_v, v_BGTK), dim=2)
        self._keys_values[layer] = k_BGTK, v_BGTK
        return k_BGTK, v_BGTK

    def memory(self, layer: int, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Keys and values (B, G, M, K) of one layer's cross-attention, computed when they are first asked for.

        >>> cache, one = KVCache(), torch.ones(1, 1, 1, 1)
        >>> cache.memory(0, lambda: (one, one))[0] is cache.memory(0, lambda: (2 * one, 2 * one))[0]
        True
        """
        if layer not in self._memory:
            self._memory[layer] = compute()
        return self._memory[layer]

    def reorder(self, rows_B: Tensor) -> None:
        """Row b becomes what row ``rows_B[b]`` was, with any number of rows: beams that survive, or are doubled.

        >>> cache, keys = KVCache(), torch.tensor([1.0, 2.0]).view(2, 1, 1, 1)
        >>> _ = cache.extend(0, keys, keys)
        >>> cache.reorder(torch.tensor([1, 1, 0]))
        >>> cache.extend(0, keys.new_empty(3, 1, 0, 1), keys.new_empty(3, 1, 0, 1))[0].flatten()
        tensor([2., 2., 1.])
        """
        for entries in (self._keys_values, self._memory):
            for layer, (keys, values) in entries.items():
                entries[layer] = keys.index_select(0, rows_B), values.index_select(0, rows_B)
