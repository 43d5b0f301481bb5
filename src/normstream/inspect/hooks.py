"""Runs of a model, or of one of its layers, in which every module call is recorded and may be given other values.

A call's *input* is its first floating-point tensor argument, its *output* the first floating-point tensor that it
returns: for layers, norms, matrices and whole sublayers that is the stream or the branch. Records are copies, because
some layers add in place.
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normstream.inspect.anatomy import Call

InputChange = Callable[[Tensor], Tensor]
"""From a call's input to what the module is given instead."""
OutputChange = Callable[[Tensor | None, Tensor], Tensor]
"""From a call's input and output to what is handed on instead of the output."""


@dataclass(frozen=True)
class Changes:
    """What a run does differently, by call."""

    inputs: Mapping[Call, InputChange] = field(default_factory=dict)
    outputs: Mapping[Call, OutputChange] = field(default_factory=dict)

    def __or__(self, other: "Changes") -> "Changes":
        """Both; where both change the same, the other one changes what this one made of it."""
        inputs, outputs = dict(self.inputs), dict(self.outputs)
        for call, change in other.inputs.items():
            inputs[call] = _composed(inputs[call], change) if call in inputs else change
        for call, change in other.outputs.items():
            outputs[call] = _chained(outputs[call], change) if call in outputs else change
        return Changes(inputs, outputs)


NO_CHANGES = Changes()


def _composed(first: InputChange, second: InputChange) -> InputChange:
    return lambda given: second(first(given))


def _chained(first: OutputChange, second: OutputChange) -> OutputChange:
    return lambda given, output: second(given, first(given, output))


@dataclass
class Record:
    """One call of a module, as it was before the run's changes to it."""

    call: Call
    around: tuple[Call, ...]
    """The calls that it ran inside of, outermost first."""
    start: int
    end: int = 0
    """Position among all starts and ends of calls."""
    input: Tensor | None = None
    output: Tensor | None = None
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """A copy of all arguments; only of calls that were asked for, which can then be replayed."""
    counts: Counter[str] = field(default_factory=Counter)
    """How often each module had run before; only of calls that were asked for."""


@dataclass(frozen=True)
class Run:
    """One pass: its calls in the order in which they began, and what the outermost one returned."""

    records: dict[Call, Record]
    result: Any

    def output(self, call: Call) -> Tensor | None:
        """What a call returned, before the run's own change to it; None if it did not run."""
        return self.records[call].output if call in self.records else None

    def input(self, call: Call) -> Tensor | None:
        """What a call was given, before the run's own change to it; None if it did not run."""
        return self.records[call].input if call in self.records else None


def repeats(run: Run, other: Run) -> bool:
    """Whether every call gave the same in both runs."""
    outputs = ((record.output, other.output(call)) for call, record in run.records.items())
    return all(
        a is b or (a is not None and b is not None and torch.equal(a.nan_to_num(), b.nan_to_num())) for a, b in outputs
    )


class Recorder:
    """Watches every module of a model, from entering a ``with`` to leaving it.

    The modules' ``forward`` is wrapped, which hooks are not a match for: some models call it directly.

    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> double = Changes(outputs={Call("0"): lambda given, output: 2 * output})
    >>> with Recorder(model) as recorder:
    ...     run = recorder.run({"input": torch.ones(1)}, double)
    >>> run.output(Call("0")), run.input(Call("1")), run.result
    (tensor([1.]), tensor([2.]), tensor([2.]))
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self._start(NO_CHANGES, Counter(), frozenset())

    def __enter__(self) -> "Recorder":
        # PyTorch's own encoder layer would skip its parts.
        self._had_fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        self._own_forwards = {path: vars(module).get("forward") for path, module in self.modules.items()}
        for path, module in self.modules.items():
            module.forward = self._watched(path, module.forward)
        return self

    def __exit__(self, *error: object) -> None:
        torch.backends.mha.set_fastpath_enabled(self._had_fast_path)
        for path, module in self.modules.items():
            del module.forward
            own = self._own_forwards[path]
            if own is not None:
                module.forward = own

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Any], changes: Changes = NO_CHANGES, keep: frozenset[str] = frozenset()) -> Run:
        """Runs the whole model. Calls of the modules in ``keep`` can be replayed from the run's records."""
        self._start(changes, Counter(), keep)
        result = self.model(**copied(dict(inputs)))
        return Run(self._records, result)

    @torch.no_grad()
    def replay(self, record: Record, changes: Changes = NO_CHANGES) -> Run:
        """Runs one call again, with the arguments it had. Raises ValueError if its run did not keep them."""
        if record.arguments is None:
            raise ValueError(f"the run did not keep the arguments of {record.call}; name its path in keep")
        self._start(changes, Counter(record.counts), frozenset())
        args, kwargs = copied(record.arguments)
        result = self.modules[record.call.path](*args, **kwargs)
        return Run(self._records, result)

    def _start(self, changes: Changes, counts: Counter[str], keep: frozenset[str]) -> None:
        self._changes, self._counts, self._keep = changes, counts, keep
        self._records: dict[Call, Record] = {}
        self._open: list[Call] = []
        self._clock = 0

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _watched(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            call = Call(path, self._counts[path])
            record = Record(call, tuple(self._open), self._tick())
            if path in self._keep:
                record.arguments, record.counts = copied((args, kwargs)), Counter(self._counts)
            self._counts[path] += 1
            self._records[call] = record
            record.input = _first(args, kwargs)
            if record.input is not None and call in self._changes.inputs:
                args, kwargs = _replaced((args, kwargs), self._changes.inputs[call](record.input))
            self._open.append(call)
            result = forward(*args, **kwargs)
            self._open.pop()
            record.end, record.output = self._tick(), _first(result)
            if record.output is not None and call in self._changes.outputs:
                return _replaced(result, self._changes.outputs[call](record.input, record.output))
            return result

        return watched


def _first(*values: Any) -> Tensor | None:
    """A copy of the first floating-point tensor."""
    found = next(tensors_in(values), None)
    return None if found is None else found.clone()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors inside nested tuples, lists and dictionaries, in order.

    >>> [tensor.shape[0] for tensor in tensors_in((None, {"a": torch.ones(2), "ids": torch.tensor([1])}))]
    [2]
    """
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)


def copied(value: Any) -> Any:
    """Nested tuples, lists and dictionaries again, with copies of the tensors, and of caches and the like.

    A tensor that is there twice is copied once.
    """
    copies: dict[int, Tensor] = {}
    return _mapped(value, lambda tensor: copies.setdefault(id(tensor), tensor.clone()))


def _replaced(value: Any, new: Tensor) -> Any:
    """``value`` with its first floating-point tensor exchanged for a copy of ``new``, wherever it is in it."""
    first, new = next(tensors_in(value)), new.clone()
    return _mapped(value, lambda tensor: new if tensor is first else tensor, deep=False)


def _mapped(value: Any, change: Callable[[Tensor], Tensor], deep: bool = True) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change, deep) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_mapped(item, change, deep) for item in value)
    if isinstance(value, dict):
        items = {key: _mapped(item, change, deep) for key, item in value.items()}
        return items if type(value) is dict else type(value)(**items)
    is_state = deep and hasattr(value, "__dict__") and not isinstance(value, nn.Module) and not callable(value)
    return copy.deepcopy(value) if is_state else value
