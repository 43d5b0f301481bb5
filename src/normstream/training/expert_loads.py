"""How many tokens each expert had in an update: for the statistics of a run, and for the routers' biases.

Shape suffixes: M layers with experts, E experts.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normstream.layers.router import Router
from normstream.tasks.router_losses import router_reports


class Loads(NamedTuple):
    """What the routers of a model did in one update."""

    tokens_ME: Tensor
    """Assignments to each expert of each layer with experts."""
    dropped_M: Tensor
    """Those beyond the experts' capacity."""

    def shares(self) -> dict[str, Any]:
        """As in the metrics of a run: the share of each expert in its layer, and the share of what was dropped.

        >>> Loads(torch.tensor([[3, 1]]), torch.tensor([1])).shares()
        {'load': [[0.75, 0.25]], 'dropped': [0.25]}
        """
        total_M = self.tokens_ME.sum(-1).clamp(min=1).double()
        load_ME = self.tokens_ME / total_M[:, None]
        return {"load": load_ME.tolist(), "dropped": (self.dropped_M / total_M).tolist()}


class ExpertLoads:
    """Adds up what the routers report of the micro-batches of an update, and balances their biases by it.

    >>> model = nn.Sequential(Router(8, n_experts=2, top_k=1, normalized=False, bias_rate=0.1))
    >>> loads = ExpertLoads(model)
    >>> loads.start()
    >>> loads.add([model(torch.ones(3, 8)).report])
    >>> loads.balance()
    >>> sorted(round(bias, 1) for bias in model[0].bias.tolist())
    [-0.1, 0.1]
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        self.loads: Loads | None = None

    @property
    def moves_biases(self) -> bool:
        """Whether an applied update changes the model in ``balance``."""
        return any(router.bias is not None for router in self.routers)

    def start(self) -> None:
        """Forgets the last update."""
        self.loads = None

    def add(self, aux: Iterable[Any]) -> None:
        """Counts a micro-batch, of which ``aux`` is what the sublayers reported."""
        reports = router_reports(aux)
        if not reports:
            return
        own = Loads(torch.stack([r.tokens for r in reports]), torch.stack([r.dropped for r in reports]))
        self.loads = own if self.loads is None else Loads(*(a + b for a, b in zip(self.loads, own, strict=True)))

    def balance(self) -> None:
        """Moves the routers' biases; to be called once an update is applied."""
        if self.loads is not None:
            for router, tokens_E in zip(self.routers, self.loads.tokens_ME, strict=True):
                router.balance(tokens_E)
