"""Values inside branches that are too large for fp16 although the stream is not, and splits that keep the function.

A branch that is linear in the rows of one matrix (values in attention; the up projection of a gated feed-forward, or
of one with ReLU) can carry less between those rows and its last matrix: rows and their biases times 2^-j, the last
matrix times 2^j. Before an output norm the last matrix itself can be scaled, if that norm's eps follows. What feeds a
non-linearity alone (a gate, queries and keys) cannot be split.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from normstream.checkpoints.rescaling.changes import EpsChange, Scaling
from normstream.checkpoints.rescaling.check import power_for
from normstream.checkpoints.rescaling.feeders import Bench, Feeder, linear_rows, make_bench, output_axis, present
from normstream.checkpoints.rescaling.report import LARGEST, BranchRow
from normstream.inspect.anatomy import Anatomy, Call, NormFacts, Sublayer
from normstream.inspect.hooks import Recorder


@dataclass(frozen=True)
class Split:
    """One branch with values that are too large, and what scales its parameters against each other."""

    rows: tuple[BranchRow, ...]
    scalings: tuple[Scaling, ...] = ()
    eps: tuple[EpsChange, ...] = ()


def split_branches(
    model: nn.Module, inputs: Mapping[str, Any], anatomy: Anatomy, headroom: float, *, per_norm_eps: bool
) -> tuple[Split, ...]:
    """Every branch with a matrix that is given or returns more than fp16 holds, and the split where there is one.

    Args:
        model: after the stream was rescaled; it is not changed.
        headroom: how far below 65,504 a split brings what it can.
        per_norm_eps: whether each norm can have an eps of its own.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    facts = {site.call.path: site.facts for site in anatomy.norms}
    splits = []
    with Recorder(model) as recorder:
        layers = [layer for stack in anatomy.stacks for layer in stack.layers]
        run = recorder.run(inputs, keep=frozenset(layer.call.path for layer in layers))
        for layer in layers:
            bench = make_bench(recorder, run.records[layer.call])
            for sublayer in layer.sublayers:
                branch = _Branch(bench, sublayer, names, facts, headroom, per_norm_eps)
                if branch.too_large:
                    splits.append(branch.split())
    return tuple(splits)


class _Branch:
    """One sublayer on its layer's bench."""

    def __init__(
        self,
        bench: Bench,
        sublayer: Sublayer,
        names: Mapping[int, str],
        facts: Mapping[str, NormFacts],
        headroom: float,
        per_norm_eps: bool,
    ) -> None:
        self.facts = facts
        self.bench, self.sublayer, self.names = bench, sublayer, names
        self.headroom, self.per_norm_eps = headroom, per_norm_eps
        records = bench.run.records
        ends = [call for call in (*sublayer.readers, *sublayer.writers) if call in records]
        first = min((records[call].start for call in ends), default=0)
        last = max((records[call].end for call in ends), default=0)
        self.matrices = [call for call in bench.matrices if first <= records[call].start and records[call].end <= last]
        self.too_large = [row for call in self.matrices for row in self._rows(call) if row.peak > LARGEST]

    def _rows(self, call: Call) -> list[BranchRow]:
        """What a matrix is given and returns, as far as it is inside the branch."""
        record = self.bench.run.records[call]
        sides: dict[str, Tensor | None] = {}
        if call not in self.sublayer.readers:
            sides["input"] = record.input
        if call not in self.sublayer.writers or self.sublayer.output_norm is not None:
            sides["output"] = record.output
        peaks = {side: tensor.abs().max().item() for side, tensor in sides.items() if tensor is not None}
        why = "it feeds a non-linearity, or nothing linear feeds it"
        return [BranchRow(self.sublayer.name, str(call), side, peak, None, peak, why) for side, peak in peaks.items()]

    def split(self) -> Split:
        """The exact split where there is one; rows that it does not reach stay as they are."""
        rows = {(row.call, row.side): row for row in self.too_large}
        scalings: list[Scaling] = []
        eps: list[EpsChange] = []
        for writer in self.sublayer.writers:
            if writer not in self.matrices:
                continue
            source = self._source(writer)
            if source is not None:
                scalings += self._between(source, writer, rows)
            if (str(writer), "output") in rows and self.sublayer.output_norm is not None:
                scalings += self._before_norm(writer, self.sublayer.output_norm, rows, eps)
        return Split(tuple(rows.values()), tuple(scalings), tuple(eps))

    def _source(self, writer: Call) -> Feeder | None:
        inside = [call for call in self.bench.before(writer) if call in self.matrices]
        found = (linear_rows(self.bench, call, writer) for call in inside)
        return next((feeder for feeder in found if feeder is not None), None)

    def _between(self, source: Feeder, writer: Call, rows: dict[tuple[str, str], BranchRow]) -> list[Scaling]:
        reached = [key for key in ((str(source.call), "output"), (str(writer), "input")) if key in rows]
        if not reached:
            return []
        power = max(power_for(rows[key].peak, self.headroom) for key in reached)
        why = f"{source.call} / 2^{power}, {writer} x 2^{power}"
        for key in reached:
            rows[key] = replace(rows[key], split=power, after=rows[key].peak / 2**power, why=why)
        return [*self._scalings(source, -power, bias=True), *self._scalings(Feeder(writer, None), power, bias=False)]

    def _before_norm(
        self, writer: Call, norm: Call, rows: dict[tuple[str, str], BranchRow], eps: list[EpsChange]
    ) -> list[Scaling]:
        key = str(writer), "output"
        if not self.per_norm_eps:
            rows[key] = replace(rows[key], why=f"{norm} shares its eps with other norms, so it can have no other scale")
            return []
        power = power_for(rows[key].peak, self.headroom)
        why = f"{writer} / 2^{power}, eps of {norm} / 4^{power}"
        rows[key] = replace(rows[key], split=power, after=rows[key].peak / 2**power, why=why)
        eps.append(EpsChange(norm.path, self.facts[norm.path].eps or 0.0, -2 * power))
        return self._scalings(Feeder(writer, None), -power, bias=True)

    def _scalings(self, feeder: Feeder, exponent: int, *, bias: bool) -> list[Scaling]:
        module, record = self.bench.recorder.modules[feeder.call.path], self.bench.run.records[feeder.call]
        axis = output_axis(module, present(record.input, feeder.call), present(record.output, feeder.call))
        return [
            Scaling(
                self.names[id(parameter)], "split", exponent, rows=feeder.rows, axis=axis if parameter.ndim > 1 else 0
            )
            for parameter in module.parameters(recurse=False)
            if bias or parameter.ndim > 1
        ]
