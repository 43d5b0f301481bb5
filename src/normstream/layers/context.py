"""What every sublayer of one forward pass shares: positions, mask, cache.

Shape suffixes: B batch, T sequence, S keys (cached ones included), K head_dim, P = 1 or B.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from normstream.layers.attention import KVCache


class Context(NamedTuple):
    """Built once per forward pass by the model, read by the sublayers.

    >>> Context(rope=rope_table(torch.arange(3)[None], 4, 1e4, torch.float32)).mask is None
    True
    """

    rope: tuple[Tensor, Tensor]
    """cos and sin, (P, 1, T, K)."""
    mask: Tensor | None = None
    """True where a query may attend, (P, 1, T, S); None means plain causal attention."""
    cache: "KVCache | None" = None
    """Keys and values of earlier positions, for generation."""


def rope_table(
    positions_PT: Int[Tensor, "P T"], head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "P 1 T K"], Float[Tensor, "P 1 T K"]]:
    """cos and sin of the angles ``position * theta^(-2j / head_dim)``, for half-split rotary embeddings.

    Computed anew for each forward pass (it costs next to nothing), in float32, or float64 for a float64 model: a
    buffer would be wiped when a model is built on the meta device.

    Source: Su et al. 2021, arXiv 2104.09864; the half-split order is GPT-NeoX's and Llama's.

    >>> cos, sin = rope_table(torch.tensor([[0, 1]]), 2, 1e4, torch.float64)
    >>> cos.shape, round(sin[0, 0, 1, 0].item(), 6)
    (torch.Size([1, 1, 2, 2]), 0.841471)
    """
    high = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, head_dim, 2, device=positions_PT.device, dtype=high) / head_dim
    half = positions_PT[:, None, :, None].to(high) * theta**-exponents
    angles = torch.cat((half, half), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Float[Tensor, "B H T K"], rope: tuple[Tensor, Tensor]) -> Float[Tensor, "B H T K"]:
    """Rotates each pair (x_j, x_{j + K/2}) by its angle; computed in the table's dtype, returned in that of x.

    >>> rope = rope_table(torch.tensor([[0]]), 2, 1e4, torch.float32)
    >>> rotate(torch.tensor([[[[3.0, 4.0]]]]), rope)
    tensor([[[[3., 4.]]]])
    """
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def attention_mask(
    documents_BT: Int[Tensor, "B T"] | None, n_queries: int, n_keys: int, device: torch.device
) -> Bool[Tensor, "P 1 T S"] | None:
    """Which key each query may attend to: no later one and, with document ids, only one of the same document.

    Returns None where plain causal attention says it already. The queries are the last ``n_queries`` positions.

    >>> attention_mask(torch.tensor([[0, 0, 1]]), 3, 3, torch.device("cpu"))[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    if documents_BT is None and n_queries == n_keys:
        return None
    keys = torch.arange(n_keys, device=device)
    causal = keys[n_keys - n_queries :, None] >= keys
    if documents_BT is None:
        return causal[None, None]
    same = documents_BT[:, -n_queries:, None] == documents_BT[:, None, :]
    return (causal & same)[:, None]
