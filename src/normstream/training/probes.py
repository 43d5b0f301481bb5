"""What happens inside the model during an update: gradient norms by layer, RMS of every stream at every border."""

from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normstream.models import DecoderLM
from normstream.optim import global_grad_norm


def layer_groups(model: DecoderLM) -> dict[str, list[nn.Parameter]]:
    """The parameters by place: embedding (with the first junction), each layer by its number, an untied head.

    Every parameter is in one group, so the squared gradient norms of the groups sum to that of the model. The
    final norm belongs to the last layer, whose last junction it closes.

    >>> from normstream.models import DecoderConfig
    >>> list(layer_groups(DecoderLM(DecoderConfig(dim=8, n_layers=2, n_heads=2))))
    ['embedding', '0', '1', 'head']
    """
    groups = {"embedding": [*model.tok_embeddings.parameters(), *model.before_layers.parameters()]}
    groups |= {str(i): list(layer.parameters()) for i, layer in enumerate(model.layers)}
    if model.lm_head.weight is not model.tok_embeddings.weight:
        groups["head"] = list(model.lm_head.parameters())
    return groups


class LayerProbe:
    """While entered, measures the streams of every forward pass with hooks; ``record_gradients`` measures gradients.

    The RMS of a stream is over all its elements and, with accumulation, over all micro-batches.

    >>> from normstream.models import DecoderConfig
    >>> model = DecoderLM(DecoderConfig(placement="pre", dim=8, n_layers=2, n_heads=2))
    >>> with LayerProbe(model) as probe:
    ...     _ = model(torch.zeros(1, 3, dtype=torch.int64))
    >>> len(probe.row(step=1)["rms"]["x"])
    3
    """

    def __init__(self, model: DecoderLM) -> None:
        self.model = model
        self._squares: list[list[Tensor]] = []
        self._gradients: Tensor | None = None
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "LayerProbe":
        for border in (self.model.before_layers, *self.model.layers):
            squares: list[Tensor] = []
            self._squares.append(squares)
            self._handles.append(border.register_forward_hook(_measure(squares, len(self.model.streams))))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._handles:
            self._handles.pop().remove()

    def record_gradients(self) -> None:
        """Measures the gradients as they are now."""
        self._gradients = torch.stack([global_grad_norm(group) for group in layer_groups(self.model).values()])

    def row(self, step: int) -> dict[str, Any]:
        """The metrics row of kind layers."""
        rms = torch.stack([torch.stack(squares).mean(0).sqrt() for squares in self._squares]).T.tolist()
        row: dict[str, Any] = {"kind": "layers", "step": step}
        if self._gradients is not None:
            norms = dict(zip(layer_groups(self.model), self._gradients.tolist(), strict=True))
            layers = [norms[str(i)] for i in range(len(self.model.layers))]
            row["grad_norm"] = {"embedding": norms["embedding"], "layers": layers, "head": norms.get("head")}
        row["rms"] = dict(zip(self.model.streams, rms, strict=True))
        return row


def _measure(squares: list[Tensor], n_streams: int) -> Any:
    """A forward hook that appends the mean square of each stream; what travels behind the streams is left out."""

    def hook(module: nn.Module, inputs: Any, output: tuple[tuple[Tensor, ...], Tensor]) -> None:
        state, _ = output
        squares.append(torch.stack([stream.detach().float().square().mean() for stream in state[:n_streams]]))

    return hook
