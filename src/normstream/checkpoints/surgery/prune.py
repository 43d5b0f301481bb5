"""Pruning: leaving out the layers that turn the residual stream least.

A layer's influence is the angular distance between the stream before and after it, arccos(cosine) / pi, a mean over
tokens. The model without the layers has a config of its own: which key counts the layers, and which lists have an
entry for each, is found by building models from changed configs, and the result must give the logits that the old
model gives with those layers skipped.

Source: block influence, Men et al. 2024 (arXiv 2403.03853); angular distance, Gromov et al. 2024 (arXiv 2403.17887),
who leave out n layers in a row. Here any n layers with the least influence go, all measured once on the whole model.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from normstream.checkpoints.precise import Float64, check_finite, difference, exact_answer, in_float64, widened
from normstream.checkpoints.rebuild import rebuild
from normstream.checkpoints.source import quiet_transformers
from normstream.inspect.anatomy import Anatomy, Call, StackAnatomy
from normstream.inspect.hooks import Changes, Recorder, tensors_in
from normstream.inspect.inputs import make_inputs
from normstream.inspect.measures.loss import loss_of
from normstream.inspect.measures.statistics import angular_distance
from normstream.inspect.probing.probe import anatomy_of
from normstream.lab.runner import is_out_of_memory
from normstream.names import nearest

TOLERANCE = 1e-10
"""Largest relative difference between the pruned model's float64 logits and those with the layers skipped."""
MAX_TRIES = 64
"""Most configs that are tried beyond the plain one."""


@dataclass(frozen=True)
class PruneReport:
    """What was left out, and what that did."""

    stack: str
    influence: tuple[float, ...]
    """Angular distance of every layer's input and output, before pruning."""
    dropped: tuple[int, ...]
    """Indices of the layers that were left out."""
    config: dict[str, Any]
    """Changed keys of the config; those of nested configs with dots."""
    loss_before: float | None
    """Loss on the inputs, in nats a token; None for a model without a head."""
    loss_after: float | None


def influence_of(model: nn.Module, inputs: Mapping[str, Any], stack: StackAnatomy) -> tuple[float, ...]:
    """Angular distance between every layer's input and output, mean over tokens: 0 leaves the direction as it is."""
    with Recorder(model) as recorder:
        run = recorder.run(inputs)
    records = [run.records[layer.call] for layer in stack.layers]
    return tuple(angular_distance(*_stream(record.input, record.output)) for record in records)


def prune(
    model: nn.Module,
    n_layers: int,
    inputs: Mapping[str, Any] | None = None,
    anatomy: Anatomy | None = None,
    stack: str | None = None,
    seed: int = 0,
) -> tuple[nn.Module, PruneReport]:
    """A model without the ``n_layers`` layers of least influence, as its class makes it from a shorter config.

    Args:
        model: a model of transformers; it is not changed, but the new one shares its tensors.
        n_layers: how many layers go.
        inputs: keyword arguments of its ``forward`` to measure influence and losses on; None makes random tokens.
        anatomy: if it is known already.
        stack: which stack, where there are several.
        seed: of tokens and probe.

    Raises:
        ValueError: if there are not that many layers, if layers share their weights, or if no config of this class
            describes the model without those layers.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2)).eval()
    >>> shorter, report = prune(model, 1)
    >>> shorter.config.n_layer, report.config
    (2, {'n_layer': 2})
    """
    inputs = make_inputs(model, seed=seed) if inputs is None else dict(inputs)
    anatomy = anatomy_of(model, inputs, seed) if anatomy is None else anatomy
    chosen = _choose_stack(anatomy, stack)
    count = len(chosen.layers)
    if not 0 < n_layers < count:
        possible = f"1 to {count - 1} of the {count} layers" if count > 1 else f"at least 2 layers, found {count},"
        raise ValueError(f"expected {possible} to leave out, got {n_layers}")
    check_finite(model, inputs)
    list_path = _list_of(chosen)
    influence = influence_of(model, inputs, chosen)
    dropped = tuple(sorted(sorted(range(count), key=lambda i: influence[i])[:n_layers]))
    kept = [i for i in range(count) if i not in dropped]
    expected = _answer_without(model, inputs, [chosen.layers[i].call for i in dropped])
    shorter, changes = _find_shorter(model, inputs, list_path, count, kept, expected)
    return shorter, PruneReport(
        stack=chosen.name,
        influence=influence,
        dropped=dropped,
        config=changes,
        loss_before=loss_of(model, dict(inputs), anatomy),
        loss_after=loss_of(shorter, dict(inputs), anatomy_of(shorter, inputs, seed)),
    )


def _stream(given: Tensor | None, output: Tensor | None) -> tuple[Tensor, Tensor]:
    if given is None or output is None or given.shape != output.shape:
        raise ValueError("expected layers that take the residual stream and return it")
    return given, output


def _choose_stack(anatomy: Anatomy, name: str | None) -> StackAnatomy:
    stacks = {stack.name: stack for stack in anatomy.stacks}
    if name is None and len(stacks) > 1:
        raise ValueError(f"the model has several stacks: state which one, {' or '.join(stacks)}")
    if name is not None and name not in stacks:
        raise ValueError(f"no stack {name!r}; {nearest(name, stacks)}")
    return anatomy.stacks[0] if name is None else stacks[name]


def _list_of(stack: StackAnatomy) -> str:
    """The path of the module list that holds the layers, each once and in order."""
    paths = [layer.call.path for layer in stack.layers]
    parent = paths[0].rpartition(".")[0]
    if paths != [f"{parent}.{i}" for i in range(len(paths))]:
        raise ValueError(f"layers of {parent} share their weights or do not run in order: none can be left out alone")
    return parent


def _answer_without(model: nn.Module, inputs: Mapping[str, Any], calls: Sequence[Call]) -> Tensor:
    """The float64 answer of a model whose layers ``calls`` hand on what they are given."""
    skip = Changes(outputs={call: lambda given, output: _stream(given, output)[0] for call in calls})
    with Float64(), Recorder(in_float64(model)) as recorder:
        return next(tensors_in(recorder.run(widened(inputs), skip).result)).clone()


def _find_shorter(
    model: Any, inputs: Mapping[str, Any], list_path: str, count: int, kept: Sequence[int], expected: Tensor
) -> tuple[nn.Module, dict[str, Any]]:
    """The model from the first config that gives the expected answer, and what differs in that config."""
    if not hasattr(getattr(model, "config", None), "to_dict"):
        raise ValueError(f"{type(model).__name__} has no config of transformers, so a shorter one cannot be made")
    tensors = _renumbered(model.state_dict(), list_path, kept)
    buffers = _renumbered(dict(model.named_buffers()), list_path, kept)
    closest = None
    with quiet_transformers():
        for changes in itertools.islice(_configs(model.config, count, kept), MAX_TRIES):
            shorter = _build(model, changes, list_path, len(kept), tensors)
            if shorter is None:
                continue
            _take_over(shorter, buffers)
            moved = difference(exact_answer(shorter, inputs), expected)
            if moved <= TOLERANCE:
                return shorter, changes
            closest = moved if closest is None else min(moved, closest)
    if closest is None:
        raise ValueError(f"no key of the config was found that sets the number of layers in {list_path}")
    raise ValueError(
        f"the config cannot describe the model without these layers: what a layer does depends on its index or on "
        f"their number (the logits would move by {closest:.1e} of the largest)"
    )


def _configs(config: Any, count: int, kept: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Changes to try: a key that counts layers with all lists of that length cut, then one more key with it."""
    numbers, lists = {}, {}
    for key, value in _leaves(config.to_dict()):
        if isinstance(value, list) and len(value) == count:
            lists[key] = [value[i] for i in kept]
        elif isinstance(value, int) and not isinstance(value, bool) and 0 < value <= count:
            numbers[key] = value
    indices = {key: _remapped(value, kept) for key, value in _leaves(config.to_dict()) if _is_indices(value, count)}
    counters = [key for key, value in numbers.items() if value == count]
    for counter in counters:
        yield {counter: len(kept), **_beside(counter, lists), **_beside(counter, indices)}
    for counter in counters:
        base = {counter: len(kept), **_beside(counter, lists), **_beside(counter, indices)}
        for key, value in numbers.items():  # such as the number of dense layers at the start
            if key != counter:
                yield {**base, key: sum(i < value for i in kept)}
        for key in [*lists, *indices]:  # of that length by chance
            yield {other: value for other, value in base.items() if other != key}


def _beside(counter: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the same (nested) config as ``counter``."""
    folder = counter.rpartition(".")[0]
    return {key: value for key, value in values.items() if key.rpartition(".")[0] == folder}


def _leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_indices(value: Any, count: int) -> bool:
    """Whether a list may name some of the layers.

    >>> _is_indices([0, 3], 4), _is_indices([3, 0], 4), _is_indices([], 4)
    (True, False, False)
    """
    is_list = isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
    return is_list and len(value) != count and value == sorted(set(value)) and value[0] >= 0 and value[-1] < count


def _remapped(indices: Sequence[int], kept: Sequence[int]) -> list[int]:
    return [kept.index(i) for i in indices if i in kept]


def _renumbered(tensors: Mapping[str, Tensor], list_path: str, kept: Sequence[int]) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        match = re.match(rf"{re.escape(list_path)}\.(\d+)\.", name)
        if match is None:
            found[name] = tensor
        elif int(match[1]) in kept:
            found[f"{list_path}.{kept.index(int(match[1]))}.{name[match.end() :]}"] = tensor
    return found


def _take_over(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Buffers that no file holds, as they are in the old model: casting one may have rounded them."""
    for name, buffer in list(model.named_buffers()):
        if name in buffers and buffers[name].shape == buffer.shape:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, buffers[name])


def _build(
    model: Any, changes: Mapping[str, Any], list_path: str, n_layers: int, tensors: Mapping[str, Tensor]
) -> nn.Module | None:
    """The model that a changed config makes, holding the tensors; None if it is no model with so many layers."""
    try:
        shorter = rebuild(model, changes, tensors)
        n_found = sum(1 for _ in shorter.get_submodule(list_path).children())
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        return None  # a key of another kind that this class does not let go
    return shorter.eval() if n_found == n_layers else None
