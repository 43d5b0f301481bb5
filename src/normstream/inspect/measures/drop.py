"""How much the loss rises when a layer, or one sublayer's update, is left out."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from normstream.inspect.anatomy import Anatomy, Call
from normstream.inspect.hooks import tensors_in
from normstream.inspect.inspection import DropRow
from normstream.inspect.measures.layer_borders import (
    OWN_STACK,
    LayerKey,
    Streams,
    hooked,
    own_sublayers,
    run_layers,
    whole_layers,
    with_first,
)
from normstream.inspect.measures.loss import NO_LOSS, Objective, logits_of, objective_of
from normstream.inspect.measures.stream_trace import check_identity, trace


@torch.no_grad()
def layer_drops(
    model: nn.Module, inputs: dict[str, Any], anatomy: Anatomy | None
) -> tuple[dict[LayerKey, float], tuple[str, ...]]:
    """Loss without each layer minus loss with it, in nats a token, and notes on what could not be measured.

    Without a layer, the stream leaves it as it came, times the layer's skip multiplier; norms on the stream that are
    the layer's own are left out too. In a ``DecoderLM`` all streams pass as they came, and the next layer reads them.

    >>> from normstream.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(placement="pre", dim=8, n_layers=2, n_heads=2)).eval()
    >>> found, _ = layer_drops(model, {"tokens_BT": torch.tensor([[1, 2, 3]])}, None)
    >>> list(found)
    [('main', 0), ('main', 1)]
    """
    objective = objective_of(model, inputs, anatomy)
    if objective is None:
        return {}, (f"{NO_LOSS}, hence no layer was left out",)
    skips = {} if anatomy is None else {(s.name, layer.index): layer.skip for s in anatomy.stacks for layer in s.layers}
    whole = run_layers(model, inputs, anatomy)
    borders, notes = whole_layers(whole, anatomy)
    loss = _loss(objective, whole.logits)
    found = {}
    for key in borders:
        without = run_layers(model, inputs, anatomy, {key: _skip(skips.get(key, 1.0))})
        found[key] = _loss(objective, without.logits) - loss
    return found, notes


@torch.no_grad()
def sublayer_drops(
    model: nn.Module, inputs: dict[str, Any], anatomy: Anatomy | None
) -> tuple[tuple[DropRow, ...], tuple[str, ...]]:
    """Loss without each sublayer's update minus loss with it, and notes on what could not be measured.

    What is really added becomes zero: behind an output norm, whose bias is gone as well. Norms on the stream stay. A
    layer whose residual identity fails has no rows, since nobody knows what is added there.

    >>> from normstream.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(placement="pre", dim=8, n_layers=1, n_heads=2)).eval()
    >>> rows, _ = sublayer_drops(model, {"tokens_BT": torch.tensor([[1, 2, 3]])}, None)
    >>> [row.name for row in rows]
    ['layers.0.mixer', 'layers.0.ffn']
    """
    objective = objective_of(model, inputs, anatomy)
    if objective is None:
        return (), (f"{NO_LOSS}, hence no sublayer was left out",)
    try:
        unexplained = {} if anatomy is None else unexplained_layers(model, inputs, anatomy)
    except ValueError as error:  # the anatomy's calls are not those of a stream
        return (), (f"no sublayer was left out: {error}",)
    loss = _loss(objective, logits_of(model, inputs))
    rows = []
    for key, row, silence in _silences(model, anatomy):
        if key in unexplained:
            continue
        with silence:
            rows.append(row(loss_increase=_loss(objective, logits_of(model, inputs)) - loss))
    return tuple(rows), _unexplained_note(unexplained)


def unexplained_layers(model: nn.Module, inputs: dict[str, Any], anatomy: Anatomy) -> dict[LayerKey, str]:
    """The layers whose residual identity fails with the anatomy's updates, and how."""
    seen = trace(model, inputs, anatomy)
    failed = {}
    for stack in seen.stacks:
        for layer in stack.layers:
            try:
                check_identity(replace(seen, stacks=(replace(stack, layers=(layer,)),)))
            except ValueError as error:
                failed[stack.name, layer.index] = str(error)
    return failed


def _unexplained_note(unexplained: dict[LayerKey, str]) -> tuple[str, ...]:
    if not unexplained:
        return ()
    layers = ", ".join(f"{index} of {stack}" for stack, index in unexplained)
    return (f"no sublayer was left out of layers {layers}; {next(iter(unexplained.values()))}",)


def _loss(objective: Objective, logits: Tensor | None) -> float:
    assert logits is not None  # an objective is about logits
    return objective.loss(logits).item()


def _skip(factor: float) -> Callable[[Streams], Streams]:
    return lambda streams: tuple(factor * stream for stream in streams)


def _silences(
    model: nn.Module, anatomy: Anatomy | None
) -> Iterator[tuple[LayerKey, Callable[..., DropRow], AbstractContextManager[None]]]:
    """For every sublayer: its layer, what makes its row, and the context in which its update is zero."""
    if anatomy is None:
        for own in own_sublayers(model):
            row = partial(DropRow, OWN_STACK, own.name, own.layer, own.kind)
            yield (OWN_STACK, own.layer), row, _silent_join(own.module, own.junction.join)
        return
    for stack in anatomy.stacks:
        for sublayer in stack.sublayers:
            row = partial(DropRow, stack.name, sublayer.name, sublayer.layer, sublayer.kind)
            yield (stack.name, sublayer.layer), row, silent_call(model, sublayer.update)


@contextmanager
def silent_call(model: nn.Module, call: Call) -> Iterator[None]:
    """For one forward pass, the output of a module's call is zeros.

    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with silent_call(model, Call("1")):
    ...     model(torch.ones(2))
    tensor([0., 0.])
    """
    calls = count()

    def silence(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if next(calls) != call.index:
            return None
        return with_first(output, torch.zeros_like(next(tensors_in(output))))

    with hooked([lambda: model.get_submodule(call.path).register_forward_hook(silence)]):
        yield


@contextmanager
def _silent_join(sublayer: nn.Module, join: Any) -> Iterator[None]:
    """A sublayer of a ``DecoderLM`` gives zeros, and so does its join: not even an output norm's bias is added."""
    contributions = join.contributions

    def nothing(*args: Any) -> Streams:
        return tuple(torch.zeros_like(part) for part in contributions(*args))

    def silence(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return with_first(output, torch.zeros_like(next(tensors_in(output))))

    join.contributions = nothing
    try:
        with hooked(
            [
                lambda: sublayer.register_forward_hook(silence),
                lambda: join.register_forward_hook(lambda *_: None),  # while it is hooked, the join's own code runs
            ]
        ):
            yield
    finally:
        del join.contributions
