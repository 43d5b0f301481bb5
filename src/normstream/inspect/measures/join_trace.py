"""The trace of normstream's own models: any placement, one stream or several.

Hooks keep what goes into every join and what comes out. What a join leaves of a stream, and where in it the sum is, is
found by running it again: with an update of zeros, and with a random one. Nothing here knows a placement.

n hyper-connected streams, one tensor (B, T, n, D) to the model, are n streams to the trace: ``h_1`` ... ``h_n``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normstream.inspect.hooks import copied
from normstream.inspect.measures.streams import LayerTrace, StackTrace, Streams, Stretch, SublayerTrace, Trace
from normstream.junctions import Drop, GeoNormJoin, LerpJoin, State
from normstream.layers.layer import update_and_reports
from normstream.models import DecoderLM

KINDS = {"attention": "mixer", "feed_forward": "ffn", "cross_attention": "cross"}
"""Names of the kinds of sublayers in a trace, where they differ from those in a model."""
SPHERE_JOINS = (GeoNormJoin, LerpJoin)
"""Joins that turn the stream towards the update: there is no sum."""
SAME = 1e-3
"""Relative difference below which a tensor counts as a sum; anything else differs from it by about 1."""


@dataclass(frozen=True)
class Visit:
    """One call of a sublayer and of the join behind it."""

    input: Tensor
    output: Tensor
    state: State
    """What the join was given, beside the output."""
    joined: State


@torch.no_grad()
def trace_joins(model: DecoderLM, inputs: dict[str, Any]) -> Trace:
    """The trace of a ``DecoderLM``; see ``normstream.inspect.trace``."""
    blocks: list[Any] = list(model.layers)
    names = [{kind: f"layers.{index}.{kind}" for kind in block.kinds} for index, block in enumerate(blocks)]
    sublayers = {
        name: (getattr(block, kind), getattr(block, f"after_{kind}").join)
        for block, by_kind in zip(blocks, names, strict=True)
        for kind, name in by_kind.items()
    }
    visits, hidden, logits = _run(model, inputs, sublayers)
    layers = []
    for index, by_kind in enumerate(names):
        seen = {kind: (sublayers[name][1], visits[name]) for kind, name in by_kind.items()}
        layers.append(_layer(index, model.streams, seen))
    streams = tuple(layers[0].before)
    turned = [name for name, (_, join) in sublayers.items() if isinstance(join, SPHERE_JOINS)]
    note = f"no residual identity behind {', '.join(turned)}: the stream turns towards the update, nothing is added"
    return Trace((StackTrace("main", streams, tuple(layers), hidden),), logits, (note,) if turned else ())


def _run(
    model: DecoderLM, inputs: dict[str, Any], sublayers: dict[str, tuple[nn.Module, nn.Module]]
) -> tuple[dict[str, Visit], Tensor, Tensor]:
    """One forward pass: what every sublayer and its join were given and returned, the final hidden vectors, logits."""
    seen: dict[str, dict[str, Any]] = {name: {} for name in sublayers}
    hidden: list[Tensor] = []

    def entering(name: str, part: str) -> Callable[..., None]:
        return lambda module, args: seen[name].update({part: copied(args[0])})

    def leaving(name: str, part: str) -> Callable[..., None]:
        return lambda module, args, output: seen[name].update({part: copied(output)})

    def updating(name: str) -> Callable[..., None]:
        return lambda module, args, output: seen[name].update({"output": copied(update_and_reports(output)[0])})

    handles = [model.lm_head.register_forward_pre_hook(lambda module, args: hidden.append(args[0].clone()))]
    try:
        for name, (sublayer, join) in sublayers.items():
            handles.append(sublayer.register_forward_pre_hook(entering(name, "input")))
            handles.append(sublayer.register_forward_hook(updating(name)))
            handles.append(join.register_forward_pre_hook(entering(name, "state")))
            handles.append(join.register_forward_hook(leaving(name, "joined")))
        logits = model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return {name: Visit(**parts) for name, parts in seen.items()}, hidden[0], logits


def _layer(index: int, names: tuple[str, ...], seen: dict[str, tuple[Any, Visit]]) -> LayerTrace:
    sublayers: list[SublayerTrace] = []
    stretches: dict[str, list[Stretch]] = {}
    leaving: Streams = {}
    for kind, (join, visit) in seen.items():
        sublayer = _sublayer(index, kind, names, join, visit)
        sublayers.append(sublayer)
        leaving = split(names, visit.joined)
        if isinstance(join, SPHERE_JOINS):
            continue
        for stream, kept in sublayer.kept.items():
            found = stretches.setdefault(stream, [])
            continues = bool(found) and torch.equal(found[-1].end, kept)
            found.append(Stretch(kept, sublayer.after[stream], (sublayer.name,), continues))
    pieces = {stream: tuple(found) for stream, found in stretches.items()}
    return LayerTrace("main", index, sublayers[0].before, leaving, tuple(sublayers), pieces)


def _sublayer(index: int, kind: str, names: tuple[str, ...], join: Any, visit: Visit) -> SublayerTrace:
    before = split(names, visit.state)
    contributions = join.contributions(visit.output, *visit.state[len(names) :])
    if isinstance(join, SPHERE_JOINS):
        kept, after = before, split(names, visit.joined)
    else:
        kept, after = _sums(names, join, visit)
    return SublayerTrace(
        name=f"layers.{index}.{KINDS.get(kind, kind)}",
        stack="main",
        layer=index,
        kind=KINDS.get(kind, kind),
        before=before,
        kept=kept,
        input=visit.input,
        output=visit.output,
        update=split(names, contributions),
        after=after,
    )


def _sums(names: tuple[str, ...], join: Any, visit: Visit) -> tuple[Streams, Streams]:
    """What the join leaves of each stream, and the sums with the updates before any norm on them."""
    zeros = torch.zeros_like(visit.output)
    nothing = join.contributions(zeros, *visit.state[len(names) :])
    summed, silent = _candidates(join, visit.state, visit.output), _candidates(join, visit.state, zeros)
    places = _places(len(names), join, visit)
    kept = tuple(silent[i][place] - nothing[i] for i, place in enumerate(places))
    after = tuple(summed[i][place] for i, place in enumerate(places))
    return split(names, kept), split(names, after)


def _places(n_streams: int, join: Any, visit: Visit) -> list[int]:
    """Which candidate is each stream's sum, seen with random streams and a random update, whatever the data is.

    It depends on the streams, and the update moves it by its contribution: the first one that does, else the nearest.
    """
    weights = visit.state[n_streams:]
    generator = torch.Generator(visit.output.device).manual_seed(0)
    streams = tuple(_normal(stream, generator) for stream in visit.state[:n_streams])
    update, zeros = _normal(visit.output, generator), torch.zeros_like(visit.output)
    silent = tuple(torch.zeros_like(stream) for stream in streams)
    with_update = _candidates(join, (*streams, *weights), update)
    without = _candidates(join, (*streams, *weights), zeros)
    without_streams = _candidates(join, (*silent, *weights), zeros)
    added = [u - n for u, n in zip(*(join.contributions(o, *weights) for o in (update, zeros)), strict=True)]
    places = []
    for i, contribution in enumerate(added):
        errors = [
            math.inf if _distance(base, still) < SAME else _distance(high - base, contribution)
            for high, base, still in zip(with_update[i], without[i], without_streams[i], strict=True)
        ]
        places.append(next((place for place, error in enumerate(errors) if error < SAME), errors.index(min(errors))))
    return places


def _distance(one: Tensor, other: Tensor) -> float:
    """Relative to the larger one."""
    scale = max(one.double().norm().item(), other.double().norm().item())
    return (one.double() - other.double()).norm().item() / scale if scale else 0.0


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def _candidates(join: nn.Module, state: State, update: Tensor) -> list[list[Tensor]]:
    """For each stream what may be its sum with the update: what the join returns, and what its parts are given."""
    given: list[Tensor] = []
    parts = [part for part in join.children() if not isinstance(part, Drop)]
    handles = [part.register_forward_pre_hook(lambda module, args: given.append(args[0].clone())) for part in parts]
    try:
        joined = join(state, update)
    finally:
        for handle in handles:
            handle.remove()
    return [[stream, *(tensor for tensor in given if tensor.shape == stream.shape)] for stream in joined]


def split(names: tuple[str, ...], state: State) -> Streams:
    """The streams of a state by name; n streams in one tensor (B, T, n, D) are n of them."""
    streams: Streams = {}
    for name, tensor in zip(names, state, strict=False):
        if tensor.ndim == 3:
            streams[name] = tensor
        else:
            streams |= {f"{name}_{i + 1}": tensor[..., i, :] for i in range(tensor.shape[-2])}
    return streams
