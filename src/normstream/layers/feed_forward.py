"""Feed-forward sublayers: SwiGLU and GELU.

Shape suffixes: B batch, T sequence, D width.
"""

from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Activation = Literal["swiglu", "gelu"]


def default_ffn_dim(dim: int, activation: Activation) -> int:
    """Hidden width with about 8 D^2 parameters: 4 D for GELU, 8/3 D rounded up to a multiple of 32 for SwiGLU.

    >>> default_ffn_dim(64, "gelu"), default_ffn_dim(64, "swiglu")
    (256, 192)
    """
    return 4 * dim if activation == "gelu" else -(-8 * dim // 96) * 32


class FeedForward(nn.Module):
    """``o = W_down (silu(W_gate z) * W_up z)`` for SwiGLU, ``o = W_down gelu(W_up z)`` for GELU.

    Shape: ``(B, T, D)`` to ``(B, T, D)``. Source: Shazeer 2020, arXiv 2002.05202.

    >>> import torch
    >>> FeedForward(8, ffn_dim=16, activation="swiglu")(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    branch_outputs = ("w_down",)
    """Matrices that write to the residual stream; initializations scale them with depth."""

    def __init__(self, dim: int, *, ffn_dim: int, activation: Activation, bias: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.w_gate = nn.Linear(dim, ffn_dim, bias=bias) if activation == "swiglu" else None
        self.w_up = nn.Linear(dim, ffn_dim, bias=bias)
        self.w_down = nn.Linear(ffn_dim, dim, bias=bias)

    def forward(self, z_BTD: Float[Tensor, "B T D"], context: object = None) -> Float[Tensor, "B T D"]:
        up = self.w_up(z_BTD)
        hidden = F.gelu(up) if self.w_gate is None else F.silu(self.w_gate(z_BTD)) * up
        return self.w_down(hidden)
