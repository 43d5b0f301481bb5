"""How large the loss's gradient is at every layer: for its parameters, and for the stream that enters it."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normstream.inspect.anatomy import Anatomy
from normstream.inspect.measures.join_trace import split
from normstream.inspect.measures.layer_borders import OWN_STACK, LayerKey, run_layers, whole_layers, with_gradients
from normstream.inspect.measures.loss import NO_LOSS, objective_of
from normstream.norms import precise_dtype


class GradientNorms(NamedTuple):
    """Euclidean norms of the gradient of the loss, in nats a token."""

    parameters: float
    """For all parameters of the layer; one that is called several times has one gradient, the sum over its calls."""
    stream: float
    """For what enters the layer, all streams and positions together."""
    by_stream: dict[str, float]
    """For each stream that enters the layer, under its name; a foreign model's only one is called x."""


def gradient_norms(
    model: nn.Module, inputs: dict[str, Any], anatomy: Anatomy | None
) -> tuple[dict[LayerKey, GradientNorms], tuple[str, ...]]:
    """The gradient's norms by layer, and notes on what could not be measured.

    Parameters that do not ask for a gradient count too. The next layer's input norm belongs to the layer before it in a
    ``DecoderLM``, as in training.

    >>> from normstream.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(placement="pre", dim=8, n_layers=2, n_heads=2)).eval()
    >>> found, notes = gradient_norms(model, {"tokens_BT": torch.tensor([[1, 2, 3]])}, None)
    >>> list(found), notes
    ([('main', 0), ('main', 1)], ())
    """
    objective = objective_of(model, inputs, anatomy)
    if objective is None:
        return {}, (f"{NO_LOSS}, hence no gradients",)
    with with_gradients(), all_trainable(model):
        run = run_layers(model, inputs, anatomy)
        assert run.logits is not None  # an objective is about logits
        borders, notes = whole_layers(run, anatomy)
        if not borders:
            return {}, notes
        parameters = {key: _parameters(module) for key, module in _layers(model, anatomy).items() if key in borders}
        streams = {key: border.entering for key, border in borders.items()}
        wanted = {id(t): t for tensors in (*parameters.values(), *streams.values()) for t in tensors}
        found = torch.autograd.grad(objective.loss(run.logits), list(wanted.values()), allow_unused=True)
    gradients = {id(t): torch.zeros_like(t) if g is None else g for t, g in zip(wanted.values(), found, strict=True)}

    def given(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        return tuple(gradients[id(tensor)] for tensor in tensors)

    names: Any = model.streams if anatomy is None else ("x",)
    norms = {key: _norms(given(parameters[key]), given(streams[key]), names) for key in borders}
    return norms, (*notes, *_shared(parameters))


def _norms(parameters: tuple[Tensor, ...], streams: tuple[Tensor, ...], names: tuple[str, ...]) -> GradientNorms:
    by_stream = {name: _length((stream,)) for name, stream in split(names, streams).items()}
    return GradientNorms(_length(parameters), _length(streams), by_stream)


@contextmanager
def all_trainable(model: nn.Module) -> Iterator[None]:
    """For the time of a ``with``, every floating parameter asks for a gradient.

    >>> layer = nn.Linear(1, 1).requires_grad_(False)
    >>> with all_trainable(layer):
    ...     layer.weight.requires_grad
    True
    >>> layer.weight.requires_grad
    False
    """
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _layers(model: Any, anatomy: Anatomy | None) -> dict[LayerKey, nn.Module]:
    if anatomy is None:
        return {(OWN_STACK, index): layer for index, layer in enumerate(model.layers)}
    return {
        (stack.name, layer.index): model.get_submodule(layer.call.path)
        for stack in anatomy.stacks
        for layer in stack.layers
    }


def _parameters(layer: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in layer.parameters() if parameter.is_floating_point()]


def _length(gradients: Iterable[Tensor]) -> float:
    """The Euclidean norm of all entries together."""
    return math.sqrt(sum(g.to(precise_dtype(g)).square().sum().item() for g in gradients))


def _shared(parameters: Mapping[LayerKey, list[nn.Parameter]]) -> tuple[str, ...]:
    owners: dict[int, set[LayerKey]] = {}
    for key, tensors in parameters.items():
        for tensor in tensors:
            owners.setdefault(id(tensor), set()).add(key)
    if all(len(keys) == 1 for keys in owners.values()):
        return ()
    return ("layers share parameters: their gradient norm is that of the sum over all calls, equal for each of them",)
