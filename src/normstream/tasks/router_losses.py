"""What the routers of a model of experts add to its loss."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from normstream.layers import MoEConfig
from normstream.layers.router import RouterReport


def router_reports(aux: Iterable[Any]) -> list[RouterReport]:
    """Those of what sublayers report that come from routers, in the order of the layers.

    >>> router_reports(("something else",))
    []
    """
    return [report for report in aux if isinstance(report, RouterReport)]


def router_losses(moe: MoEConfig, aux: Iterable[Any], share: float) -> dict[str, Tensor]:
    """``coefficient * share * mean over layers`` of the losses whose coefficient is above 0, by their key in metrics.

    Each is a mean over the tokens of a micro-batch, so that with accumulation loads are balanced within micro-batches.

    Args:
        moe: the coefficients.
        aux: what the sublayers reported.
        share: part of the whole batch that the micro-batch is.

    >>> reports = [RouterReport(torch.tensor([2, 0]), torch.tensor(0), torch.tensor(balance), torch.tensor(9.0))
    ...            for balance in (2.0, 1.0)]
    >>> router_losses(MoEConfig(n_experts=2, balance_loss=0.5), reports, share=0.5)
    {'balance_loss': tensor(0.3750)}
    """
    reports = router_reports(aux)
    if not reports:
        return {}
    losses = {
        "balance_loss": (moe.balance_loss, [report.balance_loss for report in reports]),
        "router_z_loss": (moe.z_loss, [report.z_loss for report in reports]),
    }
    return {name: factor * share * torch.stack(values).mean() for name, (factor, values) in losses.items() if factor}
