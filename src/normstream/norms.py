"""Norms and their point-wise replacements, with every convention that released models use under its own name.

=========== ============================================ ====================================== ======
kind        y                                            parameters besides the gain g          bias b
=========== ============================================ ====================================== ======
rms         g x / sqrt(mean(x^2) + eps)                                                         no
layer       g (x - mean(x)) / sqrt(var(x) + eps) + b                                            may be
pb_relax    layer of x / max|x|                                                                 may be
scale       g x / max(|x|, eps), one scalar g                                                   no
dyt         g tanh(alpha x) + b                          scalar alpha                           may be
derf        g erf(alpha x + s) + b                       scalars alpha, s                       may be
=========== ============================================ ====================================== ======

Everything is computed in float32 (float64 for float64 input), eps is always explicit, and the output has the dtype of
the input, whatever the dtype of the gain.

Where models disagree, and what the options are called here:

=============== =========================================================================================
gain            ``plain`` multiplies by w (starts at 1); ``zero_centered`` multiplies by 1 + w, added in
                float32 (w starts at 0; Gemma, Megatron's 1p); ``none`` has no gain (OLMo 1, Llama 4's QK-norm)
cast            the order of the cast to the input dtype and the multiplication by the gain:
                ``after_gain`` multiplies in float32, then casts once (OLMo 2, Gemma, torch);
                ``before_gain`` casts, then multiplies (Llama, Mistral, Qwen);
                ``gain_dtype`` casts to the dtype of the gain, then multiplies (T5)
gain_init       the effective gain at the start: 1, Swin v2's 0, or a small one; where the gain is zero-centred, the
                stored w starts at gain_init - 1
=============== =========================================================================================

The cast orders are the same function in float32 and float64 and three different ones in float16 and bfloat16: with a
bfloat16 gain, ``after_gain`` and ``before_gain`` differ in about a quarter of the elements.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normstream.checks import check_types
from normstream.gain_norm import CastOrder as CastOrder
from normstream.gain_norm import Gain as Gain
from normstream.gain_norm import GainNorm, check_eps, check_gain_init, check_width, precise_dtype
from normstream.names import check_choice
from normstream.pointwise import Derf as Derf
from normstream.pointwise import DyT as DyT
from normstream.pointwise import check_alpha

Kind = Literal["rms", "layer", "dyt", "derf", "pb_relax", "scale"]
Scope = Literal["token", "tensor"]


def unit(x: Tensor, axis: int = -1) -> Tensor:
    """``x / |x|`` along ``axis``, in float32 or above; rows of zeros stay zero.

    >>> unit(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    high = x.to(precise_dtype(x))
    length = high.norm(dim=axis, keepdim=True)
    return (high / length.where(length > 0, 1.0)).to(x.dtype)


class RMSNorm(GainNorm):
    """Root-mean-square norm: ``y = g * x / sqrt(mean(x^2) + eps)`` over the last axis.

    Args:
        dim: width of the last axis.
        eps: added inside the root; there is no default, since released models differ by orders of magnitude.
        gain: ``plain`` (g = w), ``zero_centered`` (g = 1 + w) or ``none`` (g = 1).
        cast: order of the cast back and the multiplication by g; see the module's table.
        gain_init: g at the start.

    Shape: ``(..., dim)`` to ``(..., dim)``, same dtype. Zero rows are allowed; the gain's gradient is then zero.

    Raises:
        ValueError: for a width below 1, an eps that is not a number, or an input of another width.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467.

    >>> RMSNorm(2, eps=0.0)(torch.tensor([3.0, 4.0]))
    tensor([0.8485, 1.1314], grad_fn=<...>)
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float,
        gain: Gain = "plain",
        cast: CastOrder = "after_gain",
        gain_init: float = 1.0,
    ) -> None:
        super().__init__(dim, gain=gain, bias=False, cast=cast, gain_init=gain_init)
        check_eps(eps)
        self.eps = float(eps)
        self.reset_parameters()

    def normalize(self, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.rms_norm(x, (self.dim,), gain, self.eps)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps:g}, {super().extra_repr()}"


class LayerNorm(GainNorm):
    """Layer norm: ``y = g * (x - mean(x)) / sqrt(var(x) + eps) + b`` over the last axis, with the biased variance.

    Args:
        dim: width of the last axis.
        eps: added inside the root; no default.
        gain: ``plain`` (g = w), ``zero_centered`` (g = 1 + w) or ``none`` (g = 1).
        bias: whether there is a b (Cohere and MPT have none).
        cast: order of the cast back and the multiplication by g; see the module's table.
        gain_init: g at the start.

    Shape: ``(..., dim)`` to ``(..., dim)``, same dtype. The variance is centred, never E[x^2] - E[x]^2.

    Raises:
        ValueError: for a width below 1, an eps that is not a number, or an input of another width.

    Source: Ba, Kiros and Hinton 2016, arXiv 1607.06450.

    >>> LayerNorm(3, eps=0.0)(torch.tensor([1.0, 2.0, 3.0]))
    tensor([-1.2247,  0.0000,  1.2247], grad_fn=<...>)
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float,
        gain: Gain = "plain",
        bias: bool = True,
        cast: CastOrder = "after_gain",
        gain_init: float = 1.0,
    ) -> None:
        super().__init__(dim, gain=gain, bias=bias, cast=cast, gain_init=gain_init)
        check_eps(eps)
        self.eps = float(eps)
        self.reset_parameters()

    def normalize(self, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.layer_norm(x, (self.dim,), gain, bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps:g}, {super().extra_repr()}"


class PBRelaxNorm(LayerNorm):
    """Layer norm of an input divided by its largest magnitude: ``y = LayerNorm(x / max|x|)``.

    At eps 0 this is LayerNorm, computed without large squares; otherwise the division makes eps relative: it acts as
    eps max|x|^2 would on x.

    Args:
        scope: ``token`` takes the maximum over the last axis, as the paper writes it; ``tensor`` takes it over the
            whole tensor, without a gradient, and divides by an eighth of it, as CogView's code does: then a row's
            output depends on the other rows of the batch, and eps acts as eps (max|x| / 8)^2.
        dim, eps, gain, bias, cast, gain_init: as for LayerNorm.

    Shape: ``(..., dim)`` to ``(..., dim)``, same dtype. Where the maximum is 0 nothing is divided: a row of zeros (with
    ``tensor``, a tensor of zeros, which gives NaN in CogView's code) becomes the bias.

    Raises:
        ValueError: as LayerNorm, and for an unknown scope.

    Source: Ding et al. 2021, arXiv 2105.13290; THUDM/CogView:mpu/sparse_transformer.py.

    >>> PBRelaxNorm(3, eps=0.0)(torch.tensor([1e30, 2e30, 3e30]))
    tensor([-1.2247,  0.0000,  1.2247], grad_fn=<...>)
    """

    def __init__(self, dim: int, *, scope: Scope = "token", **options: Any) -> None:
        super().__init__(dim, **options)
        check_choice("scope", scope, Scope)
        self.scope = scope

    def normalize(self, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True) if self.scope == "token" else x.detach().abs().amax() / 8
        return super().normalize(x / largest.where(largest > 0, 1.0), gain, bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scope={self.scope}"


class ScaleNorm(nn.Module):
    """``y = g x / max(|x|, eps)`` with the Euclidean norm of the last axis and one learned number g.

    Args:
        dim: width of the last axis.
        eps: smallest length divided by.
        gain_init: g starts at ``gain_init sqrt(dim)``: 1 is the authors' start and RMSNorm's scale;
            GPT-NeoX starts g itself at 1, which is ``dim**-0.5`` here.

    Shape: ``(..., dim)`` to ``(..., dim)``, same dtype.

    Raises:
        ValueError: for a width below 1, an eps that is not a number, or an input of another width.

    Source: Nguyen and Salazar 2019, arXiv 1910.05895; tnq177/transformers_without_tears:layers.py.

    >>> ScaleNorm(2, eps=0.0)(torch.tensor([3.0, 4.0]))
    tensor([0.8485, 1.1314], grad_fn=<...>)
    """

    def __init__(self, dim: int, *, eps: float, gain_init: float = 1.0) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"a norm needs a width of at least 1, got {dim}")
        check_eps(eps)
        check_gain_init(gain_init)
        self.dim, self.eps, self.gain_init = dim, float(eps), float(gain_init)
        self.weight = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """g = gain_init sqrt(dim)."""
        nn.init.constant_(self.weight, self.gain_init * math.sqrt(self.dim))

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        check_width(x, self.dim)
        high = precise_dtype(x)
        length = x.to(high).norm(dim=-1, keepdim=True).clamp(min=self.eps)
        return (self.weight.to(high) * x.to(high) / length).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps:g}, gain_init={self.gain_init:g}"


@dataclass(frozen=True)
class NormConfig:
    """Which norm a model uses; ``build(dim)`` makes one.

    >>> NormConfig(kind="layer", eps=1e-6, bias=True).build(8)
    LayerNorm(8, eps=1e-06, gain=plain, bias=True, cast=after_gain)
    """

    kind: Kind = "rms"
    """rms, layer, pb_relax (CogView), scale, or point by point dyt or derf."""
    eps: float = 1e-5
    """Added inside the root; with scale the smallest length divided by; dyt and derf have none."""
    gain: Gain = "plain"
    """plain (w), zero_centered (1 + w) or none."""
    gain_init: float = 1.0
    """Effective gain at the start (Swin v2: 0)."""
    cast: CastOrder = "after_gain"
    """Cast back to the input dtype after_gain (OLMo, Gemma), before_gain (Llama), or via the gain_dtype (T5)."""
    bias: bool = False
    """Whether there is a bias; rms and scale have none."""
    alpha: float = 0.5
    """Slope of dyt and derf at the start."""
    scope: Scope = "token"
    """Whether pb_relax divides by the largest magnitude of the token or of the whole tensor."""

    def __post_init__(self) -> None:
        check_types(self, "norm.")
        check_choice("norm.kind", self.kind, Kind)
        check_choice("norm.gain", self.gain, Gain)
        check_choice("norm.cast", self.cast, CastOrder)
        check_choice("norm.scope", self.scope, Scope)
        check_eps(self.eps)
        check_alpha(self.alpha)
        check_gain_init(self.gain_init, self.gain)
        if self.bias and self.kind in ("rms", "scale"):
            raise ValueError(f"a norm of kind {self.kind} has no bias; set norm.kind to layer or norm.bias to false")
        if self.kind == "scale" and (self.gain, self.cast) != ("plain", "after_gain"):
            raise ValueError(
                f"a norm of kind scale has gain plain and cast after_gain; got gain {self.gain} and cast {self.cast}"
            )

    def build(self, dim: int) -> nn.Module:
        """A norm of width ``dim`` with these conventions."""
        if self.kind == "scale":
            return ScaleNorm(dim, eps=self.eps, gain_init=self.gain_init)
        shared = {"gain": self.gain, "cast": self.cast, "gain_init": self.gain_init}
        if self.kind == "rms":
            return RMSNorm(dim, eps=self.eps, **shared)
        if self.kind == "layer":
            return LayerNorm(dim, eps=self.eps, bias=self.bias, **shared)
        if self.kind == "pb_relax":
            return PBRelaxNorm(dim, eps=self.eps, bias=self.bias, scope=self.scope, **shared)
        pointwise = DyT if self.kind == "dyt" else Derf
        return pointwise(dim, alpha=self.alpha, bias=self.bias, **shared)
