"""A block whose sublayers run side by side.

Shape suffixes: B batch, T sequence, D width.
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from normstream.layers.context import Context
from normstream.layers.layer import update_and_reports


class Parallel(nn.Module):
    """``o = sum_i F_i(z)``, or ``o = sum_i F_i(N_i(z))`` where each branch has a norm of its own.

    Args:
        branches: modules by kind; each maps ``(z, context)`` to its update.
        norms: a norm for every branch, by kind; None for none.

    Shape: ``(B, T, D)`` to ``(B, T, D)``. If branches report something besides their updates, the result is a tuple of
    the update and the reports.

    Source: GPT-J (Wang and Komatsuzaki 2021) and Cohere with one norm, GPT-NeoX (Black et al. 2022, arXiv 2204.06745)
    with two.

    >>> import torch
    >>> class Double(nn.Module):
    ...     def forward(self, z, context):
    ...         return 2 * z
    >>> Parallel({"attention": Double(), "feed_forward": Double()})(torch.ones(1, 1, 1), Context()).item()
    4.0
    """

    def __init__(self, branches: Mapping[str, nn.Module], norms: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.kinds = tuple(branches)
        self.has_norms = norms is not None
        for kind, branch in branches.items():
            if norms is not None:
                self.add_module(f"{kind}_norm", norms[kind])
            self.add_module(kind, branch)

    def forward(self, z_BTD: Float[Tensor, "B T D"], context: Context) -> Any:
        outputs = [update_and_reports(getattr(self, kind)(self._input(kind, z_BTD), context)) for kind in self.kinds]
        update, *others = (output for output, _ in outputs)
        for other in others:
            update = update + other
        reports = [report for _, own in outputs for report in own]
        return (update, *reports) if reports else update

    def _input(self, kind: str, z_BTD: Tensor) -> Tensor:
        return getattr(self, f"{kind}_norm")(z_BTD) if self.has_norms else z_BTD
