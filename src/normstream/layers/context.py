"""What every sublayer of one forward pass shares: positions, mask, cache, links between layers.

Shape suffixes: T queries, S keys (cached ones included), H = 1 or the number of heads, P = 1 or the batch.
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
