"""What stands outside a stack's layers: embeddings and their norm, norms between layers, the final norm."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normstream.inspect.anatomy import Call, LayerSite, NormFacts, NormSite, Place
from normstream.inspect.hooks import Record, Recorder, Run
from normstream.inspect.inputs import token_embedding
from normstream.inspect.probing.layer_probe import distinct
from normstream.inspect.probing.silent import Gain, Port, bump_like, gain_of, has_moved, identities, zeros
from normstream.inspect.probing.subject import Subject

ROW_ERROR = 1e-4
"""Relative error up to which an embedding's output is a multiple of a row of its table."""


@dataclass
class Outside:
    """The surroundings of one stack."""

    places: dict[Call, Place] = field(default_factory=dict)
    """Of its norms outside the layers."""
    layer_before: dict[Call, int] = field(default_factory=dict)
    """Of its trunk norms: index of the layer that they stand behind."""
    embeddings: list[Call] = field(default_factory=list)
    embedding_multiplier: float = 1.0
    through_matrix: set[Call] = field(default_factory=set)
    """Embedding norms that reach the stream only through a matrix."""
    followers: frozenset[Call] = frozenset()
    """Calls whose input follows the end of the stack with no matrix between."""
    end_readers: tuple[Call, ...] = ()
    """Matrices among them."""

    def site(self, call: Call, layers: list[LayerSite], facts: NormFacts) -> NormSite:
        """One of its norms. A norm on the stream between layers stands behind the last sublayer before it."""
        index = self.layer_before.get(call)
        last = () if index is None else layers[index].sublayers[-1:]
        return NormSite(
            call=call,
            place=self.places[call],
            feeds=distinct(sublayer.kind for sublayer in last),
            sublayers=tuple(sublayer.name for sublayer in last),
            layer=index,
            scope="latent" if call in self.through_matrix else "stream",
            facts=facts,
        )


class Surroundings:
    """Looks around stacks in the silent world."""

    def __init__(self, recorder: Recorder, inputs: Mapping[str, Any], still: Run, subject: Subject) -> None:
        self.recorder, self.inputs, self.still, self.subject = recorder, inputs, still, subject
        self.norms = frozenset(call for call in still.records if call.path in subject.norms)
        self.table = token_embedding(subject.model)

    def bumped(self, call: Call) -> tuple[Tensor, Run]:
        """A bump on a call's output, and the run with it."""
        output = self.still.output(call)
        assert output is not None
        bump = bump_like(output)
        changes = Port(call, "output").changed(lambda given: given + bump)
        return bump, self.recorder.run(self.inputs, identities(self.norms) | changes)

    def leads(self, call: Call, port: Port) -> bool:
        """Whether a bump on a call's output arrives at a port."""
        return has_moved(port.of(self.still), port.of(self.bumped(call)[1]))

    def look(self, layers: list[Call], entry: Port, within: set[Call]) -> Outside:
        """At one stack.

        Args:
            layers: its layers.
            entry: where its stream can first be seen.
            within: the layers of all stacks.
        """
        outside = Outside()
        start, end = self._time(entry), self.still.records[layers[-1]].end
        _, ended = self.bumped(layers[-1])
        records = self.still.records.values()
        outside.followers = frozenset(
            r.call for r in records if r.start > end and has_moved(r.input, ended.input(r.call))
        )
        others = within - set(layers)
        for record in records:
            places = {record.call, *record.around}
            if record.output is None or places & others:
                continue
            if record.end < start:
                self._before(record, entry, outside)
            elif record.call in self.norms and not places & within:
                self._behind(record, layers, outside)
        outside.end_readers = self._end_readers(layers[-1], outside)
        return outside

    def _end_readers(self, last: Call, outside: Outside) -> tuple[Call, ...]:
        """Matrices that the end of the stack still reaches when norms behind it, final ones aside, hand on zeros."""
        others = {call for call in outside.followers & self.norms if outside.places.get(call) != "final"}
        readers = [
            call for call in self.still.records if call in outside.followers and call.path in self.subject.matrices
        ]
        if not others or not readers:
            return tuple(readers)
        quiet = identities(self.norms) | zeros(others)
        output = self.still.output(last)
        assert output is not None
        bump = bump_like(output)
        before = self.recorder.run(self.inputs, quiet)
        after = self.recorder.run(self.inputs, quiet | Port(last, "output").changed(lambda given: given + bump))
        return tuple(call for call in readers if has_moved(before.input(call), after.input(call)))

    def _time(self, port: Port) -> int:
        record = self.still.records[port.call]
        return record.start if port.side == "input" else record.end

    def _before(self, record: Record, entry: Port, outside: Outside) -> None:
        module = self.recorder.modules[record.call.path]
        is_norm = record.call in self.norms
        if not (is_norm or isinstance(module, nn.Embedding) or record.call.path in self.subject.matrices):
            return
        bump, run = self.bumped(record.call)
        gain = gain_of(entry.of(self.still), entry.of(run), bump)
        if gain.factor == 0:
            return
        if is_norm:
            outside.places[record.call] = "embedding"
            if not gain.is_exact:
                outside.through_matrix.add(record.call)
        else:
            outside.embeddings.append(record.call)
            if self.table is not None and module is self.table and gain.is_exact:
                outside.embedding_multiplier = _times_rows(gain, record, self.table.weight)

    def _behind(self, record: Record, layers: list[Call], outside: Outside) -> None:
        """A norm that runs after the first layer began: on the stream between two layers, or behind the last."""
        if record.call in outside.followers:
            outside.places[record.call] = "final"
            return
        starts = [self.still.records[layer].start for layer in layers]
        index = sum(start < record.start for start in starts) - 1
        is_between = 0 <= index < len(layers) - 1
        reads = is_between and self.leads(layers[index], Port(record.call, "input"))
        if reads and self.leads(record.call, Port(layers[index + 1], "input")):
            outside.places[record.call], outside.layer_before[record.call] = "trunk", index


def _times_rows(gain: Gain, record: Record, table: Tensor) -> float:
    """The gain from a row of the table: some embedding modules multiply their rows themselves."""
    assert record.output is not None
    row = record.output.reshape(-1, record.output.shape[-1])[0]
    if table.shape[-1] != row.numel():
        return gain.factor
    cosines = table @ row / table.norm(dim=-1).clamp(min=1e-12)
    source = table.detach()[int(torch.argmax(cosines))]
    inside = float(row @ source / (source @ source))
    if float((row - inside * source).norm()) > ROW_ERROR * float(row.norm()):
        return gain.factor
    return float(f"{gain.factor * inside:.6g}")
