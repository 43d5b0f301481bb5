"""Spectral norms of norms: measured by power iteration, and in closed form."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from normstream.norms import LayerNorm, RMSNorm


def spectral_norm(
    function: Callable[[Tensor], Tensor], x_D: Tensor, *, iterations: int = 100, tolerance: float = 1e-10
) -> float:
    """Largest singular value of the Jacobian of ``function`` at the vector x, by power iteration on J^T J.

    Stops when the estimate changes by less than ``tolerance``, relatively. It approaches from below.

    >>> round(spectral_norm(lambda x: x * torch.tensor([1.0, 3.0]), torch.ones(2)), 4)
    3.0
    """
    u_D = torch.randn(x_D.shape, generator=torch.Generator().manual_seed(0), dtype=x_D.dtype)
    x_D = x_D.detach().requires_grad_()
    y_D = function(x_D)
    v_D = torch.zeros_like(y_D, requires_grad=True)
    (pulled_D,) = torch.autograd.grad(y_D, x_D, v_D, create_graph=True)  # J^T v, whose derivative in v gives J u
    value = 0.0
    for _ in range(iterations):
        (image_D,) = torch.autograd.grad(pulled_D, v_D, u_D / u_D.norm(), retain_graph=True)
        before, value = value, image_D.norm().item()
        if value == 0 or abs(value - before) <= tolerance * value:
            break
        (u_D,) = torch.autograd.grad(y_D, x_D, image_D, retain_graph=True)
    return value


def closed_form(norm: nn.Module, x_D: Tensor) -> float | None:
    """Spectral norm of a LayerNorm or RMSNorm at x: gain / sqrt(var(x) + eps), or gain / sqrt(mean(x^2) + eps).

    With eps 0 and gain 1 this is Lemma 3 of Xiong et al. as an equality, sqrt(d) / ||x - mean(x)||. None for any other
    kind, and for a gain that is not the same everywhere.

    >>> round(closed_form(LayerNorm(3, eps=0.0), torch.tensor([1.0, 2.0, 3.0])), 4)
    1.2247
    """
    if not isinstance(norm, LayerNorm | RMSNorm):
        return None
    gain = 1.0
    if norm.weight is not None:
        gains = norm.weight.detach() + (1 if norm.gain == "zero_centered" else 0)
        gain = gains[0].abs().item()
        if not bool((gains.abs() == gain).all()):
            return None
    centred_D = x_D - x_D.mean() if isinstance(norm, LayerNorm) else x_D
    return gain / math.sqrt(centred_D.square().mean().item() + norm.eps)
