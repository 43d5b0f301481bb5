"""Feed-forward sublayers, plain and gated.

Shape suffixes: B batch, T sequence, D width.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Activation = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu", "relu2"]

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
"""The function of each activation; tanh stands for GELU's tanh approximation (GPT-2, Gemma)."""


def is_gated(activation: Activation) -> bool:
    """Whether the function acts on a gate that multiplies the hidden vector.

    >>> is_gated("swiglu"), is_gated("gelu")
    (True, False)
    """
    return activation in ("swiglu", "geglu", "geglu_tanh")


def default_ffn_dim(dim: int, activation: Activation) -> int:
    """Hidden width with about 8 D^2 parameters: 4 D, or if gated 8/3 D rounded up to a multiple of 32.

    >>> default_ffn_dim(64, "gelu"), default_ffn_dim(64, "swiglu")
    (256, 192)
    """
    return -(-8 * dim // 96) * 32 if is_gated(activation) else 4 * dim


class FeedForward(nn.Module):
    """``o = W_down N(h)`` with ``h = f(W_gate z) * W_up z`` if gated, else ``h = f(W_up z)``.

    Args:
        dim: width D of input and update.
        ffn_dim: width of the hidden vector h.
        activation: the function f and whether there is a gate.
        bias: whether the matrices have biases.
        hidden_norm: the norm N of the hidden vector (NormFormer, Sub-LN), or None.
        up_scale, gate_scale: learned factors of ``W_up z`` and ``W_gate z`` (nGPT), or None.

    Shape: ``(B, T, D)`` to ``(B, T, D)``. Source: Shazeer 2020, arXiv 2002.05202; relu2 So et al. 2021, arXiv
    2109.08668.

    >>> import torch
    >>> FeedForward(8, ffn_dim=16, activation="swiglu")(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    branch_outputs = ("w_down",)
    """Matrices that write to the residual stream; initializations scale them with depth."""

    def __init__(
        self,
        dim: int,
        *,
        ffn_dim: int,
        activation: Activation,
        bias: bool = False,
        hidden_norm: nn.Module | None = None,
        up_scale: nn.Module | None = None,
        gate_scale: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.w_gate = nn.Linear(dim, ffn_dim, bias=bias) if is_gated(activation) else None
        self.w_up = nn.Linear(dim, ffn_dim, bias=bias)
        self.w_down = nn.Linear(ffn_dim, dim, bias=bias)
        self.hidden_norm, self.up_scale, self.gate_scale = hidden_norm, up_scale, gate_scale

    def forward(self, z_BTD: Float[Tensor, "B T D"], context: object = None) -> Float[Tensor, "B T D"]:
        function = FUNCTIONS[self.activation]
        up = self.w_up(z_BTD)
        if self.up_scale is not None:
            up = self.up_scale(up)
        if self.w_gate is None:
            hidden = function(up)
        else:
            gate = self.w_gate(z_BTD)
            hidden = function(gate if self.gate_scale is None else self.gate_scale(gate)) * up
        if self.hidden_norm is not None:
            hidden = self.hidden_norm(hidden)
        return self.w_down(hidden)
