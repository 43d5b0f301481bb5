"""The trace of a foreign model whose anatomy is known: tensors are those of the calls that it names.

A layer's stream is cut into stretches: at norms that stand on it, and wherever a sublayer reads it after another one's
update was added. Each stretch has a measured start and a measured end, so a wrong anatomy shows as a difference.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from normstream.inspect.anatomy import Anatomy, Call, LayerSite, StackAnatomy, Sublayer
from normstream.inspect.hooks import Record, Recorder, Run, tensors_in
from normstream.inspect.measures.streams import LayerTrace, StackTrace, Stretch, SublayerTrace, Trace

STREAM = "x"
"""The name of the one stream of a foreign model's stack."""
STANDING = ("trunk", "embedding")
"""Places of norms whose output the stream goes on with."""


@dataclass
class Piece:
    """A stretch while it grows: where the stream is at its start and end, and whose updates are added on the way."""

    start: Tensor
    end: Tensor
    after_norm: bool
    members: list[Sublayer] = field(default_factory=list)


class Visits:
    """The calls of one run; asking for one that did not happen is an error."""

    def __init__(self, run: Run) -> None:
        self.records = run.records

    def __getitem__(self, call: Call) -> Record:
        if call not in self.records:
            raise ValueError(
                f"the anatomy names {call}, which did not run on these inputs; take the anatomy with the same inputs"
            )
        return self.records[call]

    def entering(self, call: Call, like: Tensor | None = None) -> Tensor:
        """What went into a call, in the shape of the stream."""
        return _shaped(call, "input", self[call].input, like)

    def leaving(self, call: Call, like: Tensor | None = None) -> Tensor:
        """What came out of a call, in the shape of the stream."""
        return _shaped(call, "output", self[call].output, like)


def trace_calls(model: nn.Module, inputs: dict[str, Any], anatomy: Anatomy) -> Trace:
    """The trace of a model with the wiring of ``anatomy``; see ``normstream.inspect.trace``."""
    if empty := [stack.name for stack in anatomy.stacks if not stack.layers]:
        raise ValueError(f"stack {empty[0]!r} has no layers that were found, so no stream to trace; see the notes")
    with Recorder(model) as recorder:
        run = recorder.run(inputs)
    visits = Visits(run)
    logits = None if anatomy.head is None else next(tensors_in(run.result))
    return Trace(tuple(_stack(stack, visits) for stack in anatomy.stacks), logits)


def _shaped(call: Call, what: str, tensor: Tensor | None, like: Tensor | None) -> Tensor:
    """The tensor in the shape of the stream: some modules fold the axes of batch and tokens."""
    if tensor is None:
        raise ValueError(f"the {what} of {call} is no tensor of floats: this model's residual stream cannot be traced")
    if like is None or tensor.shape == like.shape:
        return tensor
    if tensor.numel() == like.numel():
        return tensor.reshape(like.shape)
    raise ValueError(
        f"the {what} of {call} should have the shape of the stream, {tuple(like.shape)}, but has "
        f"{tuple(tensor.shape)}: this model's residual stream cannot be traced"
    )


def _stack(stack: StackAnatomy, visits: Visits) -> StackTrace:
    layers = tuple(_layer(stack, site, visits) for site in stack.layers)
    final = [norm.call for norm in stack.norms if norm.place == "final"]
    last = max(final, key=lambda call: visits[call].start, default=None)
    hidden = layers[-1].after[STREAM] if last is None else visits.leaving(last)
    return StackTrace(stack.name, (STREAM,), layers, hidden)


def _layer(stack: StackAnatomy, site: LayerSite, visits: Visits) -> LayerTrace:
    pieces = _pieces(stack, site, visits)
    factors = [_factor(piece, site.skip, visits) for piece in pieces]
    sublayers, stretches = [], []
    for piece, factor in zip(pieces, factors, strict=True):
        kept = piece.start if factor is None else factor * piece.start
        names = tuple(member.name for member in piece.members)
        continues = bool(stretches) and factor is None and not piece.after_norm
        stretches.append(Stretch(kept, piece.end, names, continues))
        sublayers += _sublayers(stack, piece, factor, visits)
    before, after = pieces[0].start, pieces[-1].end
    return LayerTrace(
        stack.name, site.index, {STREAM: before}, {STREAM: after}, tuple(sublayers), {STREAM: tuple(stretches)}
    )


def _pieces(stack: StackAnatomy, site: LayerSite, visits: Visits) -> list[Piece]:
    """The layer's stream from its input to its output, cut at norms on it and where a sublayer reads a sum."""
    layer = visits[site.call]
    stream = visits.entering(site.call)
    calls = {norm.call for norm in stack.norms if norm.place in STANDING}
    inside = [call for call in calls if layer.start < visits[call].start and visits[call].end < layer.end]
    waiting = sorted(site.sublayers, key=lambda sublayer: visits[sublayer.update].end)
    pieces, start, after_norm = [], stream, False
    for call in sorted(inside, key=lambda call: visits[call].start):
        ready = [sublayer for sublayer in waiting if visits[sublayer.update].end < visits[call].start]
        waiting = waiting[len(ready) :]
        piece = Piece(start, visits.entering(call, stream), after_norm, ready)
        pieces += _cut(piece, visits)
        start, after_norm = visits.leaving(call, stream), True
    return pieces + _cut(Piece(start, visits.leaving(site.call, stream), after_norm, waiting), visits)


def _cut(piece: Piece, visits: Visits) -> list[Piece]:
    """Cuts a piece wherever a member reads the stream with all updates before it in it."""
    pieces, current = [], Piece(piece.start, piece.end, piece.after_norm)
    for member in piece.members:
        read = _read(member, piece.start, visits)
        beside = [other for other in current.members if _are_parallel(other, member)]
        if read is not None and current.members and not beside:
            current.end = read
            pieces.append(current)
            current = Piece(read, piece.end, after_norm=False)
        current.members.append(member)
    return [*pieces, current]


def _are_parallel(one: Sublayer, other: Sublayer) -> bool:
    return other.name in one.parallel_to or one.name in other.parallel_to


def _read(sublayer: Sublayer, stream: Tensor, visits: Visits) -> Tensor | None:
    """The stream as a sublayer reads it; None if no module is given just that."""
    for call in sublayer.reads:
        read = visits[call].input
        if read is not None and read.numel() == stream.numel():
            return read.reshape(stream.shape)
    return None


def _update(sublayer: Sublayer, stream: Tensor, visits: Visits) -> Tensor:
    update = visits.leaving(sublayer.update, stream)
    return update if sublayer.multiplier == 1 else sublayer.multiplier * update


def _factor(piece: Piece, skip: float, visits: Visits) -> Tensor | None:
    """The factor on the stream in a piece, for each channel, if the layer has a skip multiplier; else None.

    It is fitted to all tokens. A wrong update shows all the same, since it is no multiple of the stream.
    """
    if skip == 1 or not piece.members:
        return None
    start_TD, end_TD = (tensor.double().reshape(-1, tensor.shape[-1]) for tensor in (piece.start, piece.end))
    updates = [_update(member, piece.start, visits).double().reshape(end_TD.shape) for member in piece.members]
    squares_D = start_TD.square().sum(0)
    fitted_D = ((end_TD - sum(updates)) * start_TD).sum(0) / squares_D
    return fitted_D.where(squares_D > 0, skip).to(piece.start.dtype)


def _sublayers(stack: StackAnatomy, piece: Piece, factor: Tensor | None, visits: Visits) -> Iterator[SublayerTrace]:
    reached = piece.start
    for member in piece.members:
        read, update = _read(member, piece.start, visits), _update(member, piece.start, visits)
        before = reached if read is None else read
        kept = before if factor is None else factor * before
        reached = piece.end if len(piece.members) == 1 else kept + update
        yield SublayerTrace(
            name=member.name,
            stack=stack.name,
            layer=member.layer,
            kind=member.kind,
            before={STREAM: before},
            kept={STREAM: kept},
            input=before if member.pre_norm is None else visits.leaving(member.pre_norm),
            output=visits.leaving(member.output, piece.start),
            update={STREAM: update},
            after={STREAM: reached},
        )
