"""What happens inside the model during an update: gradient norms by layer, RMS of every stream at every border."""

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normstream.models import trunks
from normstream.optim import global_grad_norm
from normstream.training.expert_loads import Loads


def layer_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters by place: embedding (with the first junctions), each layer by its number, the rest (head).

    Layers are numbered through all stacks, those of an encoder before those of its decoder. Every parameter is in one
    group, so the squared gradient norms of the groups sum to that of the model. A final norm belongs to the last layer
    of its stack, whose last junction it closes; a head that shares the embedding's matrix has no group.

    >>> from normstream.models import DecoderConfig, DecoderLM
    >>> list(layer_groups(DecoderLM(DecoderConfig(dim=8, n_layers=2, n_heads=2))))
    ['embedding', '0', '1', 'head']
    """
    stacks = trunks(model).values()
    tables = [module for name, module in model.named_modules() if name.endswith("embeddings")]
    starts = [trunk.before_layers for trunk in stacks]
    layers = [[layer] for trunk in stacks for layer in trunk.layers]
    modules = {"embedding": [*tables, *starts], **{str(i): layer for i, layer in enumerate(layers)}, "head": [model]}
    groups: dict[str, list[nn.Parameter]] = {}
    known: set[nn.Parameter] = set()
    for name, members in modules.items():
        own = dict.fromkeys(p for module in members for p in module.parameters() if p not in known)
        groups[name] = list(own)
        known |= own.keys()
    return {name: group for name, group in groups.items() if group or name != "head"}


class LayerProbe:
    """While entered, measures the streams of every forward pass with hooks; ``record_gradients`` measures gradients.

    The RMS of a stream is over all its elements and, with accumulation, over all micro-batches.

    >>> from normstream.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(placement="pre", dim=8, n_layers=2, n_heads=2))
    >>> with LayerProbe(model) as probe:
    ...     _ = model(torch.zeros(1, 3, dtype=torch.int64))
    >>> len(probe.row(step=1)["rms"]["x"])
    3
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.trunks = model, trunks(model)
        self._squares: dict[str, list[list[Tensor]]] = {name: [] for name in self.trunks}
        self._gradients: Tensor | None = None
        self._loads: Loads | None = None
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "LayerProbe":
        for name, trunk in self.trunks.items():
            for border in (trunk.before_layers, *trunk.layers):
                squares: list[Tensor] = []
                self._squares[name].append(squares)
                self._handles.append(border.register_forward_hook(_measure(squares, len(trunk.streams))))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._handles:
            self._handles.pop().remove()

    def record_gradients(self) -> None:
        """Measures the gradients as they are now."""
        self._gradients = torch.stack([global_grad_norm(group) for group in layer_groups(self.model).values()])

    def record_experts(self, loads: Loads | None) -> None:
        """Keeps what the routers did in this update, None of a model without experts."""
        self._loads = loads

    def row(self, step: int) -> dict[str, Any]:
        """The metrics row of kind layers; of several stacks, a stream's name follows that of its stack (encoder.x)."""
        row: dict[str, Any] = {"kind": "layers", "step": step}
        if self._gradients is not None:
            norms = dict(zip(layer_groups(self.model), self._gradients.tolist(), strict=True))
            layers = [norms[name] for name in norms if name.isdigit()]
            row["grad_norm"] = {"embedding": norms["embedding"], "layers": layers, "head": norms.get("head")}
        row["rms"] = {}
        for name, trunk in self.trunks.items():
            borders = torch.stack([torch.stack(squares).mean(0).sqrt() for squares in self._squares[name]]).T.tolist()
            row["rms"] |= {f"{name}.{s}" if name else s: rms for s, rms in zip(trunk.streams, borders, strict=True)}
        if self._loads is not None:
            row["experts"] = self._loads.shares()
        return row


def _measure(squares: list[Tensor], n_streams: int) -> Any:
    """A forward hook that appends the mean square of each stream; what travels behind the streams is left out."""

    def hook(module: nn.Module, inputs: Any, output: tuple[Any, ...]) -> None:
        state = output[0]
        squares.append(torch.stack([stream.detach().float().square().mean() for stream in state[:n_streams]]))

    return hook
