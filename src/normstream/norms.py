"""LayerNorm and RMSNorm with every convention that released models use, each under its own name.

Statistics are taken in float32 (float64 for float64 input), eps sits inside the root and is always explicit, and the
output has the dtype of the input, whatever the dtype of the gain.

Where models disagree, and what the options are called here:

=============== =========================================================================================
gain            ``plain`` multiplies by w (starts at 1); ``zero_centered`` multiplies by 1 + w, added in
                float32 (w starts at 0; Gemma, Megatron's 1p); ``none`` has no gain (OLMo 1, Llama 4's QK-norm)
cast            the order of the cast to the input dtype and the multiplication by the gain:
                ``after_gain`` multiplies in float32, then casts once (OLMo 2, Gemma, torch);
                ``before_gain`` casts, then multiplies (Llama, Mistral, Qwen);
                ``gain_dtype`` casts to the dtype of the gain, then multiplies (T5)
=============== =========================================================================================

The cast orders are the same function in float32 and float64 and three different ones in float16 and bfloat16: with a
bfloat16 gain, ``after_gain`` and ``before_gain`` differ in about a quarter of the elements.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normstream.names import check_choice

Kind = Literal["rms", "layer"]
Gain = Literal["plain", "zero_centered", "none"]
CastOrder = Literal["after_gain", "before_gain", "gain_dtype"]


def check_eps(eps: object) -> None:
    """Raises ValueError unless eps is a finite number of at least 0."""
    if not isinstance(eps, float | int) or not 0 <= eps < math.inf:
        raise ValueError(f"eps must be an explicit number >= 0, got {eps!r}; take it from the model's own config")


class _GainNorm(nn.Module):
    """What LayerNorm and RMSNorm share: the gain, the bias and the order of the casts."""

    def __init__(self, dim: int, *, eps: float, gain: Gain, bias: bool, cast: CastOrder) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"a norm needs a width of at least 1, got {dim}")
        check_eps(eps)
        check_choice("gain", gain, Gain)
        check_choice("cast", cast, CastOrder)
        self.dim, self.eps, self.gain, self.cast = dim, float(eps), gain, cast
        self.weight = None if gain == "none" else nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Effective gain 1, bias 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.gain == "zero_centered" else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def normalize(self, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        """The norm itself, in the dtype of x, which is float32 or float64."""
        raise NotImplementedError

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        if x.shape[-1] != self.dim:
            raise ValueError(f"expected a last axis of width {self.dim}, got shape {tuple(x.shape)}")
        high = torch.float64 if x.dtype == torch.float64 else torch.float32
        x_high = x.to(high)
        gain = self.weight
        if gain is not None and self.gain == "zero_centered":
            gain = 1 + gain.to(high)
        bias = None if self.bias is None else self.bias.to(high)

        if gain is None or self.cast == "after_gain":
            gain_high = None if gain is None else gain.to(high)
            return self.normalize(x_high, gain_high, bias).to(x.dtype)
        low = x.dtype if self.cast == "before_gain" else gain.dtype
        y = self.normalize(x_high, None, None).to(low) * gain
        return (y if bias is None else y + bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps:g}, gain={self.gain}, bias={self.bias is not None}, cast={self.cast}"


class RMSNorm(_GainNorm):
    """Root-mean-square norm: ``y = g * x / sqrt(mean(x^2) + eps)`` over the last axis.

    Args:
        dim: width of the last axis.
        eps: added inside the root; there is no default, since released models differ by orders of magnitude.
        gain: ``plain`` (g = w), ``zero_centered`` (g = 1 + w) or ``none`` (g = 1).
        cast: order of the cast back and the multiplication by g; see the module's table.

    Shape: ``(..., dim)`` to ``(..., dim)``, same dtype. Zero rows are allowed; the gain's gradient is then zero.

    Raises:
        ValueError: for a width below 1, an eps that is not a number, or an input of another width.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467.

    >>> RMSNorm(2, eps=0.0)(torch.tensor([3.0, 4.0]))
    tensor([0.8485, 1.1314], grad_fn=<...>)
    """

    def __init__(self, dim: int, *, eps: float, gain: Gain = "plain", cast: CastOrder = "after_gain") -> None:
        super().__init__(dim, eps=eps, gain=gain, bias=False, cast=cast)

    def normalize(self, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.rms_norm(x, (self.dim,), gain, self.eps)


class LayerNorm(_GainNorm):
    """Layer norm: ``y = g * (x - mean(x)) / sqrt(var(x) + eps) + b`` over the last axis, with the biased variance.

    Args:
        dim: width of the last axis.
        eps: added inside the root; no default.
        gain: ``plain`` (g = w), ``zero_centered`` (g = 1 + w) or ``none`` (g = 1).
        bias: whether there is a b (Cohere and MPT have none).
        cast: order of the cast back and the multiplication by g; see the module's table.

    Shape: ``(..., dim)`` to ``(..., dim)``, same dtype. The variance is centred, never E[x^2] - E[x]^2.

    Raises:
        ValueError: for a width below 1, an eps that is not a number, or an input of another width.

    Source: Ba, Kiros and Hinton 2016, arXiv 1607.06450.

    >>> LayerNorm(3, eps=0.0)(torch.tensor([1.0, 2.0, 3.0]))
    tensor([-1.2247,  0.0000,  1.2247], grad_fn=<...>)
    """

    def __init__(
        self, dim: int, *, eps: float, gain: Gain = "plain", bias: bool = True, cast: CastOrder = "after_gain"
    ) -> None:
        super().__init__(dim, eps=eps, gain=gain, bias=bias, cast=cast)

    def normalize(self, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.layer_norm(x, (self.dim,), gain, bias, self.eps)


@dataclass(frozen=True)
class NormConfig:
    """Which norm a model uses; ``build(dim)`` makes one.

    >>> NormConfig(kind="layer", eps=1e-6, bias=True).build(8)
    LayerNorm(8, eps=1e-06, gain=plain, bias=True, cast=after_gain)
    """

    kind: Kind = "rms"
    """RMSNorm or LayerNorm."""
    eps: float = 1e-5
    """Added inside the root."""
    gain: Gain = "plain"
    """plain (w), zero_centered (1 + w) or none."""
    cast: CastOrder = "after_gain"
    """Cast back to the input dtype after_gain (OLMo, Gemma), before_gain (Llama), or via the gain_dtype (T5)."""
    bias: bool = False
    """Whether a LayerNorm has a bias; an RMSNorm has none."""

    def __post_init__(self) -> None:
        check_choice("norm.kind", self.kind, Kind)
        check_choice("norm.gain", self.gain, Gain)
        check_choice("norm.cast", self.cast, CastOrder)
        check_eps(self.eps)
        if self.kind == "rms" and self.bias:
            raise ValueError("an RMSNorm has no bias; set norm.kind to layer or norm.bias to false")

    def build(self, dim: int) -> RMSNorm | LayerNorm:
        """A norm of width ``dim`` with these conventions."""
        if self.kind == "rms":
            return RMSNorm(dim, eps=self.eps, gain=self.gain, cast=self.cast)
        return LayerNorm(dim, eps=self.eps, gain=self.gain, bias=self.bias, cast=self.cast)
