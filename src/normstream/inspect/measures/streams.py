"""What a trace is: the residual streams around every sublayer of one forward pass, as tensors under names.

    before --(scaled or as it is)--> kept --(+ update)--> after --(trunk norm, if any)--> the next sublayer's before

``update`` is what is really added: behind output norms, multipliers and dropout. ``output`` is what the sublayer's
module returns, which many tools take for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

Streams = dict[str, Tensor]
"""A tensor for each residual stream, by its name. Models with one stream call it ``x``."""


def check_evaluating(model: nn.Module) -> None:
    """Raises ValueError for a model in training mode."""
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes the streams; call model.eval() first")


@dataclass(frozen=True)
class SublayerTrace:
    """One sublayer: what it took from the streams and what it gave them."""

    name: str
    """``layers.3.mixer``"""
    stack: str
    layer: int
    kind: str
    """mixer, ffn, cross or other; parallel where normstream adds several sublayers as one."""
    before: Streams
    """The streams as the sublayer reads them."""
    kept: Streams
    """What the addition leaves of ``before``: itself, or times a skip multiplier."""
    input: Tensor
    """What enters the sublayer: a norm of the stream, or the stream."""
    output: Tensor
    """What the sublayer's module returns, before output norm and multiplier."""
    update: Streams
    """What is really added."""
    after: Streams
    """``kept + update``, before a trunk norm; as measured wherever the model itself has this sum."""


@dataclass(frozen=True)
class Stretch:
    """A piece of a stream without a norm on it: ``end = kept + the updates of its members``, if the trace is right."""

    kept: Tensor
    """What comes out of this stretch when nothing is added: the stream at its start, or times a skip multiplier."""
    end: Tensor
    members: tuple[str, ...]
    """Names of the sublayers whose updates are added between the two."""
    continues: bool
    """Whether ``kept`` is the end of the stretch before: their differences then add up."""


@dataclass(frozen=True)
class LayerTrace:
    """One layer: the streams at its borders, its sublayers in order."""

    stack: str
    index: int
    before: Streams
    after: Streams
    """The streams that leave the layer: behind a trunk norm that belongs to it."""
    sublayers: tuple[SublayerTrace, ...]
    stretches: dict[str, tuple[Stretch, ...]]
    """The pieces of each stream; none for a stream to which updates are not added but turned into."""


@dataclass(frozen=True)
class StackTrace:
    """One stack: its layers, and the final hidden vectors."""

    name: str
    streams: tuple[str, ...]
    layers: tuple[LayerTrace, ...]
    hidden: Tensor
    """Behind the final norm, if there is one."""

    @property
    def sublayers(self) -> tuple[SublayerTrace, ...]:
        return tuple(sublayer for layer in self.layers for sublayer in layer.sublayers)


@dataclass(frozen=True)
class Trace:
    """The residual streams of one forward pass; ``named()`` gives all tensors in one flat dictionary."""

    stacks: tuple[StackTrace, ...]
    logits: Tensor | None
    """None for a model without a head."""
    notes: tuple[str, ...] = field(default=())
    """What is not defined for this model, in sentences."""

    @property
    def sublayers(self) -> tuple[SublayerTrace, ...]:
        return tuple(sublayer for stack in self.stacks for sublayer in stack.sublayers)

    def named(self) -> dict[str, Tensor]:
        """Every tensor by name, with the name of the stack in front where there are several.

        layers.3.before.x          the stream as it enters layer 3
        layers.3.mixer.before.x    as the sublayer reads it; also kept, update and after, one a stream
        layers.3.mixer.input       the sublayer's input; also output
        layers.3.after.x
        hidden, logits
        """
        tensors = {}
        for stack in self.stacks:
            prefix = f"{stack.name}." if len(self.stacks) > 1 else ""
            tensors |= {prefix + name: tensor for name, tensor in _named(stack)}
        return tensors | ({} if self.logits is None else {"logits": self.logits})


def _named(stack: StackTrace) -> Iterator[tuple[str, Tensor]]:
    for layer in stack.layers:
        yield from _by_stream(f"layers.{layer.index}.before", layer.before)
        for sublayer in layer.sublayers:
            for part in ("before", "kept", "update", "after"):
                yield from _by_stream(f"{sublayer.name}.{part}", getattr(sublayer, part))
            yield f"{sublayer.name}.input", sublayer.input
            yield f"{sublayer.name}.output", sublayer.output
        yield from _by_stream(f"layers.{layer.index}.after", layer.after)
    yield "hidden", stack.hidden


def _by_stream(name: str, streams: Streams) -> Iterator[tuple[str, Tensor]]:
    for stream, tensor in streams.items():
        yield f"{name}.{stream}", tensor
