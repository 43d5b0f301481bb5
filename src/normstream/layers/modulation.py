"""adaLN-zero: a condition shifts and scales what a sublayer reads, and gates what it writes.

Shape suffixes: B batch, T sequence, D width.
"""

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normstream.layers.context import Context
from normstream.layers.layer import update_and_reports


class Modulated(nn.Module):
    """``o = gate(c) * F(z * (1 + scale(c)) + shift(c))``, where ``(shift, scale, gate) = W SiLU(c) + b``.

    W and b start at 0, so every update is 0 and the streams carry the embedding through the model. The condition c is
    ``context.condition``. A DiT block has one W of 6 D rows: those of its attention and of its feed-forward here are
    the first and the last 3 D of them.

    The gate is inside the update, so that every stream gets the same gated one, and a junction that norms the update
    norms the gated one.

    Args:
        sublayer: F, ``(z, context)`` to its update, or to its update and reports, which are passed on.
        dim: width D.

    Shape: ``(B, T, D)`` to ``(B, T, D)``, with a condition ``(B, D)``.

    Raises:
        ValueError: if the context has no condition.

    Source: Peebles and Xie 2022, arXiv 2212.09748, section 3.2; facebookresearch/DiT:models.py.

    >>> import torch
    >>> from normstream.layers.feed_forward import FeedForward
    >>> sublayer = Modulated(FeedForward(4, ffn_dim=8, activation="gelu_tanh"), dim=4)
    >>> _ = torch.nn.init.zeros_(sublayer.modulation.weight), torch.nn.init.zeros_(sublayer.modulation.bias)
    >>> sublayer(torch.ones(1, 2, 4), Context(condition=torch.ones(1, 4))).abs().max().item()
    0.0
    """

    branch_outputs = ()
    """Nothing of its own writes to the residual stream; the sublayer's matrices do."""
    zero_matrices = ("modulation",)
    """Matrices that start at 0 under every initialization."""

    def __init__(self, sublayer: nn.Module, dim: int) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.modulation = nn.Linear(dim, 3 * dim)

    def forward(self, z_BTD: Float[Tensor, "B T D"], context: Context) -> Any:
        if context.condition is None:
            raise ValueError("a modulated sublayer needs a condition, but the context has none; give Context.condition")
        shift_B1D, scale_B1D, gate_B1D = self.modulation(F.silu(context.condition)).unsqueeze(1).chunk(3, dim=-1)
        output = self.sublayer(modulate(z_BTD, shift_B1D, scale_B1D), context)
        update_BTD, reports = update_and_reports(output)
        gated_BTD = gate_B1D * update_BTD
        return (gated_BTD, *reports) if reports else gated_BTD


def modulate(z: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``z * (1 + scale) + shift``.

    >>> import torch
    >>> modulate(torch.ones(2), shift=torch.tensor([0.0, 1.0]), scale=torch.tensor([0.0, 1.0]))
    tensor([1., 3.])
    """
    return z * (1 + scale) + shift
