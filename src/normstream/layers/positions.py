"""Positions in attention: rotary embeddings and ALiBi's slopes.

Shape suffixes: B batch, T sequence, H heads, K head_dim, R rotated part of it, P = 1 or B.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from normstream.checks import check_types
from normstream.names import check_choice

PositionKind = Literal["rotary", "alibi", "learned", "sinusoidal", "none"]
Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True)
class PositionConfig:
    """How attention knows where a token stands.

    >>> PositionConfig(fraction=0.5).rotated(64)
    32
    """

    kind: PositionKind = "rotary"
    """rotary, alibi (a bias that grows with distance), learned or sinusoidal (added to the embedding), or none."""
    theta: float = 10_000.0
    """Base of the rotary and sinusoidal angles."""
    fraction: float = 1.0
    """Part of each head that is rotated, from its first channel on."""
    pairing: Pairing = "half"
    """Channels that turn together: half pairs j with j + R/2 (Llama, GPT-NeoX), interleaved 2j with 2j + 1 (GPT-J)."""
    local_theta: float | None = None
    """Base of the rotary angles in windowed layers; None means theta."""
    layers: Literal["all", "windowed"] = "all"
    """Layers that rotate: all, or only those with a sliding window (Cohere 2)."""

    def __post_init__(self) -> None:
        check_types(self, "positions.")
        check_choice("positions.kind", self.kind, PositionKind)
        check_choice("positions.pairing", self.pairing, Pairing)
        check_choice("positions.layers", self.layers, Literal["all", "windowed"])
        for name in ("theta", "local_theta"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"positions.{name} must be a positive number, got {value}")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"positions.fraction must be in (0, 1], got {self.fraction}")

    def rotated(self, head_dim: int) -> int:
        """Number of channels of a head that are rotated."""
        return int(head_dim * self.fraction)

    def theta_of(self, windowed: bool) -> float:
        """Base of the rotary angles of a full or a windowed layer."""
        return self.local_theta if windowed and self.local_theta is not None else self.theta

    def rotates(self, windowed: bool) -> bool:
        """Whether a full or a windowed layer rotates queries and keys."""
        return self.kind == "rotary" and (self.layers == "all" or windowed)


class Rope(NamedTuple):
    """cos and sin of the angles of every position, and how channels are paired.

    >>> rope_table(torch.arange(3)[None], 4, 1e4, torch.float32).pairing
    'half'
    """

    cos: Tensor
    """(P, 1, T, R)."""
    sin: Tensor
    """(P, 1, T, R)."""
    pairing: Pairing = "half"
    """half or interleaved."""


def rope_table(
    positions_PT: Int[Tensor, "P T"], rotated: int, theta: float, dtype: torch.dtype, pairing: Pairing = "half"
) -> Rope:
    """cos and sin of the angles ``position * theta^(-2j / R)`` of the pairs j, for R = ``rotated`` channels.

    Computed anew for each forward pass (it costs next to nothing), in float32, or float64 for a float64 model: a
    buffer would be wiped when a model is built on the meta device.

    Source: Su et al. 2021, arXiv 2104.09864; the half-split order is GPT-NeoX's and Llama's, interleaved GPT-J's.

    >>> cos, sin, _ = rope_table(torch.tensor([[0, 1]]), 2, 1e4, torch.float64)
    >>> cos.shape, round(sin[0, 0, 1, 0].item(), 6)
    (torch.Size([1, 1, 2, 2]), 0.841471)
    """
    high = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, rotated, 2, device=positions_PT.device, dtype=high) / rotated
    pairs = positions_PT[:, None, :, None].to(high) * theta**-exponents
    angles = torch.cat((pairs, pairs), dim=-1) if pairing == "half" else pairs.repeat_interleave(2, dim=-1)
    return Rope(angles.cos(), angles.sin(), pairing)


def sinusoidal_positions(
    positions_PT: Int[Tensor, "P T"], dim: int, theta: float, dtype: torch.dtype
) -> Float[Tensor, "P T D"]:
    """What the original Transformer adds to the embedding: ``sin`` and ``cos`` of ``position * theta^(-2j / D)``.

    Channel 2j has the sine and channel 2j + 1 the cosine of pair j; computed as in ``rope_table``. Raises ValueError
    for an odd width.

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.5.

    >>> sinusoidal_positions(torch.tensor([[0]]), 4, 1e4, torch.float32)
    tensor([[[0., 1., 0., 1.]]])
    """
    if dim % 2:
        raise ValueError(f"sinusoidal positions need an even dim, got {dim}; change dim or positions.kind")
    table = rope_table(positions_PT, dim, theta, dtype, "interleaved")
    pairs = torch.stack((table.sin[:, 0, :, ::2], table.cos[:, 0, :, ::2]), dim=-1)
    return pairs.flatten(-2).to(dtype)


def add_positions(
    embedding_BTD: Float[Tensor, "B T D"],
    positions_PT: Int[Tensor, "P T"],
    config: PositionConfig,
    table: nn.Embedding | None,
) -> Float[Tensor, "B T D"]:
    """The embedding of tokens and their learned (from ``table``) or sinusoidal positions; other kinds add nothing.

    >>> add_positions(torch.ones(1, 1, 2), torch.tensor([[0]]), PositionConfig(kind="sinusoidal"), None)
    tensor([[[1., 2.]]])
    """
    if table is not None:
        return embedding_BTD + table(positions_PT)
    if config.kind == "sinusoidal":
        dim, dtype = embedding_BTD.shape[-1], embedding_BTD.dtype
        return embedding_BTD + sinusoidal_positions(positions_PT, dim, config.theta, dtype)
    return embedding_BTD


def rotate(x: Float[Tensor, "B H T K"], rope: Rope | None) -> Float[Tensor, "B H T K"]:
    """Rotates each pair of the first R channels by its angle; computed in the table's dtype, returned in that of x.

    Without a table nothing happens.

    >>> rope = rope_table(torch.tensor([[0]]), 2, 1e4, torch.float32)
    >>> rotate(torch.tensor([[[[3.0, 4.0]]]]), rope)
    tensor([[[[3., 4.]]]])
    """
    if rope is None:
        return x
    rotated = rope.cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotated], rope), x[..., rotated:]), dim=-1)
    if rope.pairing == "half":
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return (x * rope.cos + turned * rope.sin).to(x.dtype)


def alibi_slopes(n_heads: int) -> list[float]:
    """Slope of each head: ``2^(-8 h / n)``, h = 1 ... n, for n a power of two.

    For other head counts, those of the next smaller power n, then every second of those of 2 n.

    Source: Press et al. 2021, arXiv 2108.12409, and its released code, which BLOOM uses.

    >>> alibi_slopes(4), alibi_slopes(3)
    ([0.25, 0.0625, 0.015625, 0.00390625], [0.0625, 0.00390625, 0.25])
    """
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2.0 ** (-8 * head / power) for head in range(1, power + 1)]
    extra = [2.0 ** (-8 * head / (2 * power)) for head in range(1, 2 * (n_heads - power), 2)]
    return slopes + extra
