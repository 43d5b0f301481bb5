"""The linear maps of all experts of a layer, in one tensor.

Shape suffixes: R rows, sorted by expert, E experts, O outputs, I inputs.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

ALIGNED = 8
"""Widths that grouped products take in bf16 are multiples of this: 16 bytes."""


class ExpertLinear(nn.Module):
    """``y_r = W_e x_r`` for each row r of expert e: E linear maps without biases.

    ``weight`` is ``(E, O, I)``, each expert's as in ``nn.Linear``. An expert without rows has a gradient of zeros.

    Shape: rows ``(R, I)`` sorted by expert, and the number of rows of each expert ``(E,)``, to ``(R, O)``.

    >>> double_and_triple = ExpertLinear(2, 1, 1)
    >>> _ = double_and_triple.weight.data.copy_(torch.tensor([2.0, 3.0]).view(2, 1, 1))
    >>> double_and_triple(torch.ones(3, 1), torch.tensor([1, 2])).flatten().tolist()
    [2.0, 3.0, 3.0]
    """

    def __init__(self, n_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, out_features, in_features))
        bound = in_features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x_RI: Float[Tensor, "R I"], rows_E: Int[Tensor, " E"]) -> Float[Tensor, "R O"]:
        if x_RI.is_cuda and is_grouped(x_RI, self.weight):
            return grouped(x_RI, self.weight, rows_E)
        return one_by_one(x_RI, self.weight, rows_E)

    def extra_repr(self) -> str:
        n_experts, out_features, in_features = self.weight.shape
        return f"{n_experts}, {in_features}, {out_features}"


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matrix product of ``x`` runs: autocast's, or that of x; float64 stays, as in torch.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     product_dtype(torch.ones(1))
    torch.bfloat16
    """
    device = x.device.type
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if casts and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def is_grouped(x_RI: Tensor, weight_EOI: Tensor) -> bool:
    """Whether a grouped product can be had: in bf16, of aligned widths.

    >>> is_grouped(torch.ones(1, 16, dtype=torch.bfloat16), torch.ones(2, 8, 16))
    True
    """
    _, out_features, in_features = weight_EOI.shape
    aligned = in_features % ALIGNED == 0 and out_features % ALIGNED == 0
    return hasattr(F, "grouped_mm") and product_dtype(x_RI) == torch.bfloat16 and aligned


def grouped(x_RI: Tensor, weight_EOI: Tensor, rows_E: Tensor) -> Tensor:
    """All products by one call in bf16, which never waits for the numbers of rows.

    Gradients that come back must not have strides of 0, which those of ``sum()`` have.
    """
    ends_E = rows_E.cumsum(0).to(torch.int32)
    return F.grouped_mm(x_RI.bfloat16(), weight_EOI.bfloat16().mT, offs=ends_E)


@torch.compiler.disable(reason="shapes depend on the data")
def one_by_one(x_RI: Tensor, weight_EOI: Tensor, rows_E: Tensor) -> Tensor:
    """One product an expert, in any dtype and on any device; shapes depend on the data, so it is never compiled."""
    parts = zip(x_RI.split(rows_E.tolist()), weight_EOI.unbind(), strict=True)
    return torch.cat([F.linear(x_TI, weight_OI) for x_TI, weight_OI in parts])
