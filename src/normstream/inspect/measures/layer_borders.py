"""Where layers begin and end: what enters and leaves every call of a layer, kept, differentiated or replaced.

Nothing here knows a family. What enters a layer is its first floating argument, what leaves it its first floating
output; they must have one shape. A layer of a ``DecoderLM`` hands on the state of the streams together with the next
layer's input z, so its borders are the joins, and z is read anew from streams that were replaced.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from normstream.inspect.anatomy import Anatomy, Call
from normstream.inspect.hooks import tensors_in
from normstream.inspect.measures.join_trace import KINDS
from normstream.inspect.measures.streams import check_evaluating
from normstream.models import DecoderLM

LayerKey = tuple[str, int]
"""Name of a stack, and index of a layer in it."""
Streams = tuple[Tensor, ...]
"""One tensor for each residual stream."""
Change = Callable[[Streams], Streams]
"""What leaves a layer, made from what enters it."""
OWN_STACK = "main"
"""Name of the one stack of a ``DecoderLM``."""


@dataclass(frozen=True)
class Border:
    """The streams around one call of a layer. With gradients, ``leaving`` depends on ``entering`` through it alone."""

    entering: Streams
    leaving: Streams


@dataclass(frozen=True)
class LayerRun:
    """One forward pass."""

    logits: Tensor | None
    """None for a model without a head."""
    borders: dict[LayerKey, Border]
    """By layer, in the order in which they ran; a layer whose input and output differ in shape is left out."""

    @property
    def last(self) -> LayerKey | None:
        """The layer that ran last: the one that the head reads."""
        return next(reversed(self.borders), None)

    def layers_of(self, stack: str) -> dict[LayerKey, Border]:
        """The borders of one stack."""
        return {key: border for key, border in self.borders.items() if key[0] == stack}


def run_layers(
    model: nn.Module,
    inputs: dict[str, Any],
    anatomy: Anatomy | None,
    changes: Mapping[LayerKey, Change] | None = None,
) -> LayerRun:
    """Runs a model and keeps the streams at every border of its layers; with gradients where they are enabled.

    Args:
        model: a transformers model with its anatomy, or a ``DecoderLM`` with None.
        inputs: keyword arguments of its ``forward``.
        anatomy: which calls are layers.
        changes: for some layers, what leaves them instead of their own output.

    Raises:
        ValueError: for a model in training mode, or one that the anatomy is not of.

    >>> from normstream.models import DecoderConfig, DecoderLM
    >>> model = DecoderLM(DecoderConfig(placement="pre", dim=8, n_layers=2, n_heads=2)).eval()
    >>> run = run_layers(model, {"tokens_BT": torch.zeros(1, 3, dtype=torch.int64)}, None)
    >>> run.last, run.borders["main", 0].leaving[0].shape
    (('main', 1), torch.Size([1, 3, 8]))
    """
    check_model(model, anatomy)
    watch = _OwnBorders(model, changes or {}) if anatomy is None else _Borders(model, anatomy, changes or {})
    with hooked(watch.hooks()):
        output = model(**inputs)
    return LayerRun(output if isinstance(output, Tensor) else getattr(output, "logits", None), watch.borders)


def check_model(model: nn.Module, anatomy: Anatomy | None) -> None:
    """Raises ValueError unless the model is in evaluation mode, and the anatomy's layers are its modules.

    Without an anatomy it has to be a ``DecoderLM``.
    """
    check_evaluating(model)
    if anatomy is None and not isinstance(model, DecoderLM):
        raise ValueError(f"{type(model).__name__} is no DecoderLM of normstream: give its anatomy, anatomy_of(model)")
    paths = {path for path, _ in model.named_modules(remove_duplicate=False)}
    layers = [layer.call for stack in anatomy.stacks for layer in stack.layers] if anatomy else []
    if lost := [call for call in layers if call.path not in paths]:
        raise ValueError(f"the anatomy names {lost[0]}, which this model does not have; take the model's own")


@contextmanager
def with_gradients() -> Iterator[None]:
    """For the time of a ``with``, gradients are enabled, also through models that change their stream in place."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autograd.graph.allow_mutation_on_saved_tensors():
        yield


@contextmanager
def hooked(hooks: Iterable[Callable[[], Any]]) -> Iterator[None]:
    """Hooks for the time of a ``with``; each is given as a function that installs it and returns its handle."""
    handles: list[Any] = []
    try:
        for install in hooks:
            handles.append(install())
        yield
    finally:
        for handle in handles:
            handle.remove()


def whole_layers(run: LayerRun, anatomy: Anatomy | None) -> tuple[dict[LayerKey, Border], tuple[str, ...]]:
    """The borders of the layers that really carry a stream from one to the next, and notes on the others.

    In a stack where another tensor enters a layer than left the one before it, the modules that were taken for layers
    are parts of layers, or something happens to the stream between them: nothing is said about such a stack.
    """
    if anatomy is None:
        return run.borders, ()
    found, notes, lost = {}, [], []
    for stack in anatomy.stacks:
        borders = run.layers_of(stack.name)
        lost += [str(layer.call) for layer in stack.layers if (stack.name, layer.index) not in borders]
        if all(_meet(one, other) for one, other in pairwise(borders.values())):
            found |= borders
        else:
            notes.append(f"no rows for the layers of stack {stack.name!r}: what enters one is not what left another")
    if lost:
        notes.append(f"no rows for these layers, whose input and output differ in shape: {', '.join(lost)}")
    return found, tuple(notes)


def _meet(one: Border, other: Border) -> bool:
    (leaving,), (entering,) = one.leaving, other.entering
    return leaving.shape == entering.shape and torch.allclose(leaving.to(entering.dtype), entering, equal_nan=True)


def kept(tensor: Tensor) -> Tensor:
    """A copy that nothing can change in place; with gradients enabled, one that has a gradient."""
    copy = tensor.clone()
    if torch.is_grad_enabled() and not copy.requires_grad:
        copy.requires_grad_()
    return copy


def with_first(value: Any, new: Tensor) -> Any:
    """A module's arguments or output with the first floating tensor, which ``tensors_in`` gives, exchanged.

    >>> with_first((torch.tensor([1]), [torch.zeros(1), None]), torch.ones(1))
    (tensor([1]), [tensor([1.]), None])
    """
    left = [new]

    def visit(part: Any) -> Any:
        if isinstance(part, Tensor):
            return left.pop() if left and part.is_floating_point() else part
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*(visit(item) for item in part))
        if isinstance(part, tuple | list):
            return type(part)(visit(item) for item in part)
        if isinstance(part, dict):
            return type(part)(**{key: visit(item) for key, item in part.items()})
        return part

    return visit(value)


class _Borders:
    """The layers of an anatomy, in one forward pass."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, changes: Mapping[LayerKey, Change]) -> None:
        self.model, self.changes = model, changes
        self.keys = {layer.call: (stack.name, layer.index) for stack in anatomy.stacks for layer in stack.layers}
        self.calls: Counter[str] = Counter()
        self.entering: dict[str, Tensor] = {}
        self.borders: dict[LayerKey, Border] = {}

    def hooks(self) -> Iterator[Callable[[], Any]]:
        for path in {call.path for call in self.keys}:
            module = self.model.get_submodule(path)
            yield lambda m=module, p=path: m.register_forward_pre_hook(self._enter(p), with_kwargs=True)
            yield lambda m=module, p=path: m.register_forward_hook(self._leave(p))

    def _enter(self, path: str) -> Callable[..., Any]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = next(tensors_in((args, kwargs)), None)
            if hidden is None:
                return None
            self.entering[path] = kept(hidden)
            return with_first((args, kwargs), self.entering[path].clone())

        return enter

    def _leave(self, path: str) -> Callable[..., Any]:
        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            key = self.keys.get(Call(path, self.calls[path]))
            self.calls[path] += 1
            entering, leaving = self.entering.pop(path, None), next(tensors_in(output), None)
            if key is None or entering is None or leaving is None or entering.shape != leaving.shape:
                return None
            if key in self.changes:
                (leaving,) = self.changes[key]((entering,))
            self.borders[key] = Border((entering,), (leaving,))
            return with_first(output, leaving.clone())

        return leave


class _OwnBorders:
    """The layers of a ``DecoderLM``, in one forward pass."""

    def __init__(self, model: Any, changes: Mapping[LayerKey, Change]) -> None:
        self.model, self.changes = model, changes
        self.now: Streams = ()
        self.borders: dict[LayerKey, Border] = {}
        self.entering: Streams = ()

    def hooks(self) -> Iterator[Callable[[], Any]]:
        joins = [self.model.before_layers.join, *(last_junction(layer).join for layer in self.model.layers)]
        for join in joins:
            yield lambda j=join: j.register_forward_hook(self._joined)
        for index, layer in enumerate(self.model.layers):
            yield lambda m=layer: m.register_forward_pre_hook(self._enter)
            yield lambda m=layer, i=index: m.register_forward_hook(self._leave(i))

    def _joined(self, join: nn.Module, args: Any, state: Streams) -> Streams:
        self.now = tuple(kept(stream) for stream in state)
        return tuple(stream.clone() for stream in self.now)

    def _enter(self, layer: nn.Module, args: Any) -> None:
        self.entering = self.now

    def _leave(self, index: int) -> Callable[..., Any]:
        def leave(layer: Any, args: Any, output: Any) -> Any:
            key = (OWN_STACK, index)
            if key in self.changes:
                self.now = self.changes[key](self.entering)
                output = *last_junction(layer).read(self.now), output[-1]
            self.borders[key] = Border(self.entering, self.now)
            return output

        return leave


@dataclass(frozen=True)
class OwnSublayer:
    """A sublayer of a ``DecoderLM``, and the junction behind it."""

    name: str
    """As in a trace: ``layers.3.mixer``, ``layers.3.ffn``, or ``layers.3.parallel`` for a sum of branches."""
    kind: str
    layer: int
    path: str
    module: nn.Module
    junction: Any


def own_sublayers(model: Any) -> Iterator[OwnSublayer]:
    """The sublayers of a ``DecoderLM`` in order.

    >>> from normstream.models import DecoderConfig, DecoderLM
    >>> [own.path for own in own_sublayers(DecoderLM(DecoderConfig(dim=8, n_layers=1, n_heads=2)))]
    ['layers.0.attention', 'layers.0.feed_forward']
    """
    for index, layer in enumerate(model.layers):
        kinds: tuple[str, ...] = layer.kinds
        for kind in kinds:
            shown = KINDS.get(kind, kind)
            path = f"layers.{index}.{kind}"
            junction = getattr(layer, f"after_{kind}")
            yield OwnSublayer(f"layers.{index}.{shown}", shown, index, path, getattr(layer, kind), junction)


def last_junction(layer: Any) -> Any:
    """The junction that ends a layer of a ``DecoderLM``: its join is the layer's, its read the next one's."""
    return getattr(layer, f"after_{layer.kinds[-1]}")
