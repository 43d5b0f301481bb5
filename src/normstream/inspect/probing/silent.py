"""The silent world: matrices in the layers are zero and norms are identities, so only the residual stream is left.

A layer is then a linear map of its stream, and two bits can be read off every module exactly: does its input follow
the layer's input (it reads the stream), and does its output reach the layer's output (it writes to the stream)?
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from normstream.inspect.anatomy import Call
from normstream.inspect.hooks import Changes, InputChange, Record, Recorder, Run
from normstream.inspect.probing.tokens import at_token, spread_of

BUMP = 4.0
"""Size of a bump. Larger ones could overflow an exponential on the way."""
MOVED = 1e-6
"""Smallest change, relative to the tensor's largest value, that is no rounding error."""
PROPORTIONAL = 1e-3
"""Largest part of a change that a gain may leave unexplained."""


class Port(NamedTuple):
    """One end of a call, where a tensor can be seen and changed."""

    call: Call
    side: Literal["input", "output"]

    def of(self, run: Run) -> Tensor | None:
        return run.input(self.call) if self.side == "input" else run.output(self.call)

    def changed(self, change: InputChange) -> Changes:
        if self.side == "input":
            return Changes(inputs={self.call: change})
        return Changes(outputs={self.call: lambda given, output: change(output)})


class Gain(NamedTuple):
    """How a bump at one port arrives at another: as ``factor`` times itself, if ``is_exact``."""

    factor: float
    is_exact: bool


NO_GAIN = Gain(0.0, True)


@dataclass(frozen=True)
class Branch:
    """Modules that one after the other carry one update to the stream."""

    members: tuple[Call, ...]
    """Outermost calls that do not carry the stream and write to it, in the order in which they end."""
    norms: tuple[Call, ...]
    """Norm calls among them or inside them that write to the stream: output norms."""
    after: Port | None
    """Where the stream can first be seen with the update in it."""
    multiplier: Gain
    """From the last member's output to there."""
    stream_gain: Gain
    """From the layer's input to there."""

    @property
    def update(self) -> Call:
        return self.members[-1]


def identities(norms: Iterable[Call]) -> Changes:
    """Every norm hands on its input."""
    return Changes(outputs=dict.fromkeys(norms, _identity))


def zeros(calls: Iterable[Call]) -> Changes:
    """Calls that hand on zeros."""
    return Changes(outputs=dict.fromkeys(calls, lambda given, output: torch.zeros_like(output)))


def constants(values: Mapping[Call, Tensor | None]) -> Changes:
    """Calls that hand on what they are told, whatever they computed."""
    return Changes(outputs={call: _constant(value) for call, value in values.items() if value is not None})


def _identity(given: Tensor | None, output: Tensor) -> Tensor:
    assert given is not None  # a norm has an input
    return given.to(output.dtype).reshape(output.shape)


def _constant(value: Tensor):
    return lambda given, output: value


def bump_like(tensor: Tensor) -> Tensor:
    """Random values of size ``BUMP`` in the shape of a tensor, always the same."""
    return BUMP * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor.dtype)


def has_moved(before: Tensor | None, after: Tensor | None) -> bool:
    """Whether two runs differ in a tensor by more than rounding; a tensor that only one of them has is a difference."""
    if before is None or after is None:
        return before is not after
    if before.shape != after.shape:
        return True
    if not before.numel():
        return False
    return bool((after - before).abs().max() > MOVED * before.abs().max().clamp(min=MOVED))


def gain_of(before: Tensor | None, after: Tensor | None, bump: Tensor) -> Gain:
    """Least-squares factor in ``after - before = factor * bump``; for tensors of other sizes the ratio of the norms."""
    if not has_moved(before, after) or before is None or after is None or before.shape != after.shape:
        return NO_GAIN
    change, bump = (after - before).flatten().double(), bump.flatten().double()
    if change.numel() != bump.numel():
        return Gain(float(change.norm() / bump.norm()), False)
    factor = float(change @ bump / (bump @ bump))
    return Gain(float(f"{factor:.6g}"), bool((change - factor * bump).norm() <= PROPORTIONAL * change.norm()))


@dataclass
class SilentLayer:
    """One call of a layer in the silent world. Bumps are made on demand and remembered."""

    recorder: Recorder
    record: Record
    entry: Port
    """Where its stream begins: the layer's input."""
    norms: frozenset[Call]
    """Every norm call of the model."""
    lengths: frozenset[int]
    runs: dict[tuple[Call, bool], tuple[Tensor, Run]] = field(default_factory=dict)

    def _replay(self, changes: Changes) -> Run:
        return self.recorder.replay(self.record, identities(self.norms) | changes)

    @cached_property
    def base(self) -> Run:
        return self._replay(Changes())

    @cached_property
    def bump(self) -> Tensor:
        entering = self.entry.of(self.base)
        assert entering is not None
        return bump_like(entering)

    @cached_property
    def bumped(self) -> Run:
        """With a bump on the layer's input."""
        return self._replay(self.entry.changed(lambda given: given + self.bump))

    def from_output(self, call: Call, along_stream: bool = False) -> tuple[Tensor, Run]:
        """A bump on a call's output, and the run with it; ``along_stream`` without the side paths."""
        cut = along_stream and bool(self.side_paths)
        if (call, cut) not in self.runs:
            output = self.base.output(call)
            assert output is not None
            bump = bump_like(output)
            changes = zeros(self.side_paths) if cut else Changes()
            self.runs[call, cut] = (
                bump,
                self._replay(changes | Port(call, "output").changed(lambda given: given + bump)),
            )
        return self.runs[call, cut]

    # Two bits --------------------------------------------------------------------------------------------------

    def reads(self, call: Call) -> bool:
        """Whether a call's input follows the layer's input."""
        return has_moved(self.base.input(call), self.bumped.input(call))

    def writes(self, call: Call) -> bool:
        """Whether a bump on a call's output reaches the layer's output."""
        return self.base.output(call) is not None and self.reaches(call, self.end)

    def reaches(self, call: Call, port: Port) -> bool:
        """Whether a bump on a call's output arrives at a port."""
        return port == Port(call, "output") or has_moved(port.of(self.base), port.of(self.from_output(call)[1]))

    def leads(self, call: Call, port: Port) -> bool:
        """Whether it arrives there without the side paths."""
        _, run = self.from_output(call, along_stream=True)
        return port == Port(call, "output") or has_moved(port.of(self.stream_runs[0]), port.of(run))

    @property
    def end(self) -> Port:
        return Port(self.record.call, "output")

    def calls(self) -> list[Record]:
        """The calls inside the layer, behind its entry, in the order in which they began."""
        start = self.base.records[self.entry.call].end if self.entry.side == "output" else 0
        return [r for r in self.base.records.values() if r.call != self.record.call and r.start > start]

    # The stream ------------------------------------------------------------------------------------------------

    @cached_property
    def side_paths(self) -> frozenset[Call]:
        """Calls through which some of the stream comes back to it beside the skip: it is there without them too.

        Norms before an expert that hands on its input, and modules that mix tokens without a matrix.
        """
        found = [*self._mixing_calls(), *(r.call for r in self.calls() if r.call in self.norms and self.reads(r.call))]
        suspects = [call for call in found if self.writes(call)]
        if suspects and self._survives(suspects):
            return frozenset(suspects)
        return frozenset(call for call in suspects if self._survives([call]))

    def _survives(self, cut: list[Call]) -> bool:
        before = self._replay(zeros(cut))
        after = self._replay(zeros(cut) | self.entry.changed(lambda given: given + self.bump))
        return has_moved(self.end.of(before), self.end.of(after))

    def _mixing_calls(self) -> list[Call]:
        """The innermost calls that turn a change of one token into a change of others although matrices are zero."""
        run = self._replay(self.entry.changed(lambda given: at_token(given, self.lengths)))

        def spread(port: Port) -> str:
            return spread_of(port.of(self.base), port.of(run), self.lengths)

        if spread(self.end) != "others":
            return []
        mixing = [
            record
            for record in self.calls()
            if spread(Port(record.call, "input")) == "one" and spread(Port(record.call, "output")) == "others"
        ]
        return [r.call for r in mixing if not any(r.call in other.around for other in mixing)]

    @cached_property
    def stream_runs(self) -> tuple[Run, Run]:
        """Without the side paths: as it is, and with a bump on the layer's input."""
        cut = zeros(self.side_paths)
        bumped = self._replay(cut | self.entry.changed(lambda given: given + self.bump))
        return (self._replay(cut), bumped) if self.side_paths else (self.base, self.bumped)

    def carries(self, port: Port) -> bool:
        """Whether a port sees the stream."""
        before, after = self.stream_runs
        return has_moved(port.of(before), port.of(after))

    @cached_property
    def skip(self) -> Gain:
        """Along the stream, from the layer's input to its output."""
        before, after = self.stream_runs
        return gain_of(self.end.of(before), self.end.of(after), self.bump)

    # Branches --------------------------------------------------------------------------------------------------

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """In the order in which their updates are ready."""
        groups: list[list[Call]] = []
        for call in sorted(self._writers(self.record.call), key=lambda c: self.base.records[c].end):
            joined = [group for group in groups if any(self.leads(c, self._seen_at(call)) for c in group)]
            groups = [group for group in groups if group not in joined]
            groups.append([c for group in joined for c in group] + [call])
        return tuple(self._branch(tuple(group)) for group in groups)

    def _writers(self, around: Call) -> Iterator[Call]:
        """The outermost calls that write to the stream without carrying it."""
        for record in self.calls():
            if record.around[-1] != around:
                continue
            is_side = record.call in self.side_paths
            carries = not is_side and self.carries(self._seen_at(record.call))
            if record.output is None or (carries and record.call not in self.norms):
                yield from self._writers(record.call)
            elif not carries and self.writes(record.call) and not (is_side and record.call in self.norms):
                yield record.call

    def _seen_at(self, call: Call) -> Port:
        """Where to see what a call hands on. Norms hand on their input; what they compute of zeros may be no number."""
        return Port(call, "input" if call in self.norms else "output")

    def _branch(self, members: tuple[Call, ...]) -> Branch:
        inside = {r.call for r in self.calls() if r.call in members or set(members) & set(r.around)}
        norms = tuple(c for c in self.base.records if c in inside & self.norms and self.bits(c) == (False, True))
        ports = self._ports_behind(members[-1])
        after = next((port for port in ports if self.carries(port) and self.leads(members[-1], port)), None)
        if after is None:
            return Branch(members, norms, None, NO_GAIN, NO_GAIN)
        bump, run = self.from_output(members[-1], along_stream=True)
        still, moved = self.stream_runs
        return Branch(
            members,
            norms,
            after,
            multiplier=gain_of(after.of(still), after.of(run), bump),
            stream_gain=gain_of(after.of(still), after.of(moved), self.bump),
        )

    def bits(self, call: Call) -> tuple[bool, bool]:
        """Of a norm: whether it reads the stream, and whether the stream goes on with its output."""
        return self.reads(call), self.writes(call) and call not in self.side_paths

    def _ports_behind(self, call: Call) -> list[Port]:
        """Both ends of every call, in the order in which they are passed, from the end of a call on."""
        records = self.base.records.values()
        starts = [(record.start, Port(record.call, "input")) for record in records]
        ends = [(record.end, Port(record.call, "output")) for record in records if record.call not in self.side_paths]
        passed = sorted(starts + ends, key=lambda pair: pair[0])
        return [port for time, port in passed if time > self.base.records[call].end]
