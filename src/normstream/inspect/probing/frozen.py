"""The frozen world: real weights, but every branch hands on the value it had, after its fresh value was read.

Branches then cannot act on one another through the stream, so what moves a branch's fresh value acts on it directly.

A layer is given noise besides the stream that it had: deep inside a random Post-Norm model all tokens are alike, and
attention over equal values does not depend on its queries.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from normstream.inspect.anatomy import Call, Place, SublayerKind
from normstream.inspect.hooks import Changes, Record, Recorder, Run
from normstream.inspect.probing.silent import Branch, Port, constants, zeros
from normstream.inspect.probing.tokens import Spread, apart, at_token, count_moved, spread_of


@dataclass
class FrozenLayer:
    """One call of a layer in the frozen world."""

    recorder: Recorder
    record: Record
    entry: Port
    branches: tuple[Branch, ...]
    lengths: frozenset[int]
    """Sequence lengths of the model's stacks."""
    runs: dict[Call, Run] = field(default_factory=dict)

    @cached_property
    def _apart(self) -> Changes:
        return self.entry.changed(apart)

    @cached_property
    def base(self) -> Run:
        return self.recorder.replay(self.record, self._apart)

    @cached_property
    def _frozen(self) -> Changes:
        return constants({branch.update: self.base.output(branch.update) for branch in self.branches})

    def run(self, changes: Changes) -> Run:
        """A run with frozen updates."""
        return self.recorder.replay(self.record, self._apart | changes | self._frozen)

    @cached_property
    def from_input(self) -> Run:
        """With the layer's input bumped at one token."""
        return self.run(self._bump_at(self.entry))

    def from_output(self, call: Call) -> Run:
        """With a call's output bumped at one token."""
        if call not in self.runs:
            self.runs[call] = self.run(self._bump_at(Port(call, "output")))
        return self.runs[call]

    def _bump_at(self, port: Port) -> Changes:
        return port.changed(lambda given: at_token(given, self.lengths))

    def spread(self, before: Run, after: Run, branch: Branch) -> Spread:
        """Which tokens of a branch's fresh value differ, at its first member that does.

        What comes behind may mix tokens a little more (a short convolution on the update) and is not asked.
        """
        for call in branch.members:
            spread = spread_of(before.output(call), after.output(call), self.lengths)
            if spread != "nothing":
                return spread
        return "nothing"

    def spread_from(self, call: Call, branch: Branch) -> Spread:
        """Which tokens of a branch's fresh value move with a call's output."""
        return self.spread(self.base, self.from_output(call), branch)

    def fed_by(self, call: Call) -> tuple[Branch, ...]:
        """The branches that move with a call's output, or that it is the end of."""
        return tuple(
            branch for branch in self.branches if call == branch.update or self.spread_from(call, branch) != "nothing"
        )

    def kind(self, branch: Branch, readers: tuple[Call, ...], start_bumped: tuple[Run, Run]) -> SublayerKind:
        """Mixer or feed-forward: whether more tokens move in what comes out of a branch than in what goes into it.

        Args:
            branch: the branch.
            readers: its matrices on the stream.
            start_bumped: the whole model's run, and one with frozen updates and the stream bumped at one token.
        """
        kinds: Mapping[Spread, SublayerKind] = {"others": "mixer", "one": "ffn", "nothing": "other"}
        kind = kinds[self.spread(self.base, self.from_input, branch)]
        if kind != "ffn":
            return kind
        # The stream may enter a layer by several arguments, of which only the first was bumped.
        before, after = start_bumped
        given = [count_moved(before.input(c), after.input(c), self.lengths) or 0 for c in readers]
        made = [count_moved(before.output(c), after.output(c), self.lengths) or 0 for c in branch.members]
        first = next((n for n in made if n), 0)
        return "mixer" if given and any(given) and first > max(given) else "ffn"

    def inner_place(self, call: Call, branch: Branch, feeds_latent: bool, feeds_output: bool) -> Place:
        """What a norm inside a branch norms: queries, keys, values, a latent vector, or what comes before the output.

        Args:
            call: the norm.
            branch: the branch that moves with its output.
            feeds_latent: whether its output is the input of a matrix, and narrower than the stream.
            feeds_output: whether its output is the input of the matrix that writes to the stream, or of another matrix
                that is not latent: a block inside the branch.
        """
        spread = self.spread_from(call, branch)
        if spread == "nothing":
            return "no_effect"
        if feeds_output or self.spread(self.base, self.from_input, branch) == "one":
            return "sub"
        if feeds_latent:
            return "latent_kv" if spread == "others" else "latent_q"
        if self._reacts_without(call, branch):
            return "k" if spread == "others" else "q"
        return "v" if spread == "others" else "sub"

    def _reacts_without(self, call: Call, branch: Branch) -> bool:
        """Whether a branch still follows the layer's input when the output of a call in it is zero."""
        before, after = self.run(zeros([call])), self.run(zeros([call]) | self._bump_at(self.entry))
        return self.spread(before, after, branch) != "nothing"
