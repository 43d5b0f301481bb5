"""Norms inside attention: over each head or over all of them, with a gain for all heads or for each.

Shape suffixes: B batch, T sequence, H heads, K head_dim.
"""

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normstream.layers.inner import GainSharing, InnerNorm, Statistics
from normstream.norms import CastOrder, NormConfig, precise_dtype, unit


class UnitLength(nn.Module):
    """``y = x / |x|`` over the last axis; a zero row stays zero.

    >>> UnitLength()(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        return unit(x)


class HeadNorm(nn.Module):
    """``y = g N(x) + b`` for heads x, with statistics over each head or over all of them together.

    Args:
        norm: N, a norm without gain and bias, of width K, or H K with ``all_heads``.
        gain_shape: shape of g and b, which broadcasts over (H, K); None for no gain.
        all_heads: whether N sees all heads as one vector.
        start: g at the start.
        unit: g = unit * w with a stored w (nGPT).
        zero_centered: whether g = 1 + w with a stored w.
        bias: whether there is a b.
        cast: order of the cast back and the multiplication by g, as in ``normstream.norms``.

    The parameters are stored flat. Shape: ``(B, T, H, K)`` to the same.

    >>> HeadNorm(UnitLength(), (2, 1), start=3.0)(torch.tensor([[[[5.0], [-7.0]]]])).flatten()
    tensor([ 3., -3.], grad_fn=<...>)
    """

    def __init__(
        self,
        norm: nn.Module,
        gain_shape: tuple[int, ...] | None,
        *,
        all_heads: bool = False,
        start: float = 1.0,
        unit: float = 1.0,
        zero_centered: bool = False,
        bias: bool = False,
        cast: CastOrder = "after_gain",
    ) -> None:
        super().__init__()
        self.norm, self.gain_shape, self.all_heads = norm, gain_shape, all_heads
        self.start, self.unit, self.zero_centered, self.cast = start, unit, zero_centered, cast
        self.weight = None if gain_shape is None else nn.Parameter(torch.empty(math.prod(gain_shape)))
        self.bias = nn.Parameter(torch.empty(math.prod(gain_shape))) if gain_shape is not None and bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The gain at its start, the bias at 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, (self.start - 1 if self.zero_centered else self.start) / self.unit)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x_BTHK: Float[Tensor, "*batch H K"]) -> Float[Tensor, "*batch H K"]:
        high = precise_dtype(x_BTHK)
        y = x_BTHK.to(high)
        y = self.norm(y.flatten(-2)).view_as(y) if self.all_heads else self.norm(y)
        if self.weight is None or self.gain_shape is None:
            return y.to(x_BTHK.dtype)
        gain = self.unit * self.weight.view(*self.gain_shape)
        gain = 1 + gain.to(high) if self.zero_centered else gain
        if self.cast == "after_gain":
            y = y * gain.to(high)
        else:
            y = y.to(x_BTHK.dtype if self.cast == "before_gain" else gain.dtype) * gain
        if self.bias is not None:
            y = y + self.bias.view(*self.gain_shape).to(y.dtype)
        return y.to(x_BTHK.dtype)

    def extra_repr(self) -> str:
        return f"gain={self.gain_shape}, all_heads={self.all_heads}, start={self.start:g}"


def head_norm(
    kind: InnerNorm,
    config: NormConfig,
    n_heads: int,
    head_dim: int,
    *,
    statistics: Statistics = "head",
    gain: GainSharing = "shared",
    unit: float = 1.0,
) -> nn.Module | None:
    """The norm of queries, keys or values that an ``Inner`` asks for, of shape ``(B, T, H, K)`` to the same.

    ===================== ==================== =======================================================
    gain                  numbers              found in
    ===================== ==================== =======================================================
    shared                K                    Qwen 3, Gemma 3 (statistics: head)
    per_head              H K                  OLMo 2 (all_heads); Cohere (head)
    number                1                    Henry et al. 2020, arXiv 2010.04245 (l2)
    number_per_head       H                    Swin v2, arXiv 2111.09883 (l2)
    none                  0                    Llama 4
    ===================== ==================== =======================================================

    With l2 the gain starts at the square root of the width, so scores start as those of an RMS norm; Henry et al. and
    Swin v2 learn one scale for the product of query and key, here the product of two. It is kept in multiples of
    ``unit``.

    Raises ValueError for a model norm of kind scale, whose gain is one number, with other statistics or another gain.

    >>> head_norm("rms", NormConfig(), 8, 64, statistics="all_heads", gain="per_head").weight.shape
    torch.Size([512])
    >>> head_norm("rms", NormConfig(), 2, 64, statistics="head", gain="shared").weight.shape
    torch.Size([64])
    """
    if kind == "none":
        return None
    if kind == "layer_bias":
        config = replace(config, kind="layer", bias=True)
    elif kind in ("rms", "layer"):
        config = replace(config, kind=kind, bias=config.bias and kind == "layer")
    if kind != "l2" and statistics == "head" and gain == "shared":
        return config.build(head_dim)
    shapes = {
        "shared": (head_dim,),
        "per_head": (n_heads, head_dim),
        "number": (1,),
        "number_per_head": (n_heads, 1),
        "none": None,
    }
    width = n_heads * head_dim if statistics == "all_heads" else head_dim
    if kind == "l2":
        return HeadNorm(
            UnitLength(),
            shapes[gain],
            all_heads=statistics == "all_heads",
            start=math.sqrt(width),
            unit=unit,
            cast=config.cast,
        )
    if config.kind == "scale":
        raise ValueError(
            f"a norm of kind scale has one number as its gain, but a norm inside attention asks for gain {gain} and "
            f"statistics {statistics}; set inner.qk and inner.v to rms, layer, l2 or none"
        )
    bare = replace(config, gain="none", bias=False, gain_init=1.0)
    return HeadNorm(
        bare.build(width),
        None if config.gain == "none" else shapes[gain],
        all_heads=statistics == "all_heads",
        start=config.gain_init,
        zero_centered=config.gain == "zero_centered",
        bias=config.bias,
        cast=config.cast,
    )


def inner_norm(kind: InnerNorm, config: NormConfig, dim: int) -> nn.Module | None:
    """The norm of a whole vector inside a sublayer: the merged heads or the feed-forward's hidden vector.

    >>> inner_norm("layer", NormConfig(eps=1e-6), 8)
    LayerNorm(8, eps=1e-06, gain=plain, bias=False, cast=after_gain)
    """
    return head_norm(kind, config, 1, dim)


class HeadScale(nn.Module):
    """``y_h = gamma_h x_h``, one learned number for each head, 1 at the start.

    Shape: ``(B, T, H, K)`` to the same. Source: NormFormer, Shleifer et al. 2021, arXiv 2110.09456.

    >>> HeadScale(2)(torch.ones(1, 1, 2, 3)).shape
    torch.Size([1, 1, 2, 3])
    """

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every factor 1."""
        nn.init.ones_(self.weight)

    def forward(self, x_BTHK: Float[Tensor, "B T H K"]) -> Float[Tensor, "B T H K"]:
        return x_BTHK * self.weight[:, None].to(x_BTHK.dtype)
