"""What attention keeps of earlier positions, for generation.

Shape suffixes: B batch, T sequence, G key-value heads, K head_dim.
"""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of all earlier positions, one pair a layer, appended to by each forward pass.

    Latent attention keeps its low-rank vector and its shared rotary key instead, as one head each.

    >>> KVCache().length
    0
    """

    def __init__(self) -> None:
        self._keys_values: dict[int, tuple[Tensor, Tensor]] = {}

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
