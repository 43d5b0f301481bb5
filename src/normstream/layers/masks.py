"""Which key each query may attend to, built once per forward pass.

Shape suffixes: B batch, T queries, S keys (cached ones included), H heads, P = 1 or B.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normstream.layers.positions import alibi_slopes


def attention_mask(
    documents_BT: Int[Tensor, "B T"] | None,
    n_queries: int,
    n_keys: int,
    device: torch.device,
    *,
    causal: bool = True,
    window: int | None = None,
) -> Bool[Tensor, "P 1 T S"] | None:
    """True where a query may attend: no later key, fewer than ``window`` positions away, in the same document.

    The queries are the last ``n_queries`` positions. A query counts among the ``window`` keys that it sees; without
    ``causal``, as many lie on its other side. Returns None where plain causal (or full) attention says it already.

    >>> attention_mask(torch.tensor([[0, 0, 1]]), 3, 3, torch.device("cpu"))[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    >>> attention_mask(None, 1, 4, torch.device("cpu"), window=2).flatten().tolist()
    [False, False, True, True]
    """
    if window is not None and window >= n_keys:
        window = None
    if documents_BT is None and window is None and (not causal or n_queries == n_keys):
        return None
    keys = torch.arange(n_keys, device=device)
    distance_TS = keys[n_keys - n_queries :, None] - keys
    mask_TS = distance_TS >= 0 if causal else torch.ones_like(distance_TS, dtype=torch.bool)
    if window is not None:
        mask_TS = mask_TS & (distance_TS.abs() < window)
    if documents_BT is None:
        return mask_TS[None, None]
    same = documents_BT[:, -n_queries:, None] == documents_BT[:, None, :]
    return (mask_TS & same)[:, None]


def alibi_mask(
    mask: Bool[Tensor, "P 1 T S"] | None,
    n_heads: int,
    n_queries: int,
    n_keys: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    causal: bool = True,
) -> Float[Tensor, "P H T S"]:
    """What ALiBi adds to the scores, ``-slope * distance`` for each head, and minus infinity where ``mask`` is False.

    >>> alibi_mask(None, 1, 2, 2, torch.device("cpu"), torch.float32)[0, 0].tolist()
    [[0.0, -inf], [-0.00390625, 0.0]]
    """
    high = torch.float64 if dtype == torch.float64 else torch.float32
    keys = torch.arange(n_keys, device=device)
    distance_TS = keys[n_keys - n_queries :, None] - keys
    slopes_H11 = torch.tensor(alibi_slopes(n_heads), device=device, dtype=high)[:, None, None]
    bias = slopes_H11 * -distance_TS.abs()
    if mask is None and causal:
        mask = (distance_TS >= 0)[None, None]
    return bias[None] if mask is None else bias.masked_fill(~mask, -torch.inf)
