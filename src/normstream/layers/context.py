"""What every sublayer of one forward pass shares: positions, mask, cache, links between layers, condition, memory.

Shape suffixes: B batch, T queries, S keys (cached ones included), M positions of the memory, H = 1 or the number of
heads, P = 1 or the batch, D width.
"""

from typing import NamedTuple

from torch import Tensor

from normstream.layers.cache import KVCache
from normstream.layers.links import Links
from normstream.layers.positions import Rope


class Context(NamedTuple):
    """Built once per forward pass by the model, for full and for windowed layers, and read by the sublayers.

    >>> Context().mask is None
    True
    """

    rope: Rope | None = None
    """Rotary angles; None means no rotation."""
    mask: Tensor | None = None
    """True where a query may attend, or what to add to the scores, (P, H, T, S); None means that causal says it all."""
    causal: bool = True
    """Whether attention without a mask is causal; otherwise it sees every key."""
    cache: KVCache | None = None
    """Keys and values of earlier positions, for generation."""
    links: Links | None = None
    """What earlier layers of this forward pass left for later ones."""
    condition: Tensor | None = None
    """What the whole sample is conditioned on, (B, D): timestep and class of a DiT."""
    memory: Tensor | None = None
    """The encoder's final hidden vectors, (B, M, D), for cross-attention."""
    memory_mask: Tensor | None = None
    """True where cross-attention may look, (P, 1, 1, M); None means everywhere."""
