"""One layer in both worlds: its sublayers and its norms' places."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from normstream.inspect.anatomy import Call, LayerSite, NormSite, Place, Sublayer, SublayerKind
from normstream.inspect.hooks import Run
from normstream.inspect.probing.frozen import FrozenLayer
from normstream.inspect.probing.silent import Branch, Gain, Port, SilentLayer, gain_of
from normstream.inspect.probing.subject import Subject


@dataclass
class LayerProbe:
    """What the silent and the frozen world say about one call of a layer.

    ``look`` has to be called in the silent world, everything else in the real one.
    """

    index: int
    """Of the layer in its stack."""
    subject: Subject
    silent: SilentLayer
    frozen: FrozenLayer | None = None
    foreign: frozenset[Call] = frozenset()
    """Calls whose input follows another stack's output in the silent world."""
    cross: frozenset[Call] = frozenset()
    """Updates that another stack moves."""
    start_bumped: tuple[Run, Run] | None = None
    """The model's run, and the frozen one with the stack's stream bumped at one token where it starts."""

    def look(self) -> None:
        """Makes every bump that will be needed while the matrices are zero."""
        for call in (*self.norms, *self.matrices):
            self.silent.bits(call)
        for call in self.matrices:
            if self.silent.base.output(call) is not None:
                self.silent.leads(call, self.silent.end)
        _ = self.silent.branches, self.silent.skip

    @cached_property
    def norms(self) -> tuple[Call, ...]:
        return tuple(record.call for record in self.silent.calls() if record.call.path in self.subject.norms)

    @cached_property
    def matrices(self) -> tuple[Call, ...]:
        return tuple(record.call for record in self.silent.calls() if record.call.path in self.subject.matrices)

    @property
    def branches(self) -> tuple[Branch, ...]:
        return self.silent.branches

    @cached_property
    def real(self) -> FrozenLayer:
        assert self.frozen is not None
        return self.frozen

    @cached_property
    def kinds(self) -> dict[Branch, SublayerKind]:
        return {branch: self._kind(branch) for branch in self.branches}

    def _kind(self, branch: Branch) -> SublayerKind:
        if branch.update in self.cross:
            return "cross"
        assert self.start_bumped is not None
        return self.real.kind(branch, self._readers(branch), self.start_bumped)

    def _readers(self, branch: Branch) -> tuple[Call, ...]:
        """Matrices on the stream that run inside the branch, or move it from outside."""
        reading = [c for c in self.matrices if self.silent.reads(c)]
        return tuple(c for c in reading if self._is_inside(c, branch) or branch in self.real.fed_by(c))

    def _is_inside(self, call: Call, branch: Branch) -> bool:
        return bool({call, *self.silent.base.records[call].around} & set(branch.members))

    @cached_property
    def names(self) -> dict[Branch, str]:
        names, seen = {}, Counter()
        for branch in self.branches:
            kind = self.kinds[branch]
            seen[kind] += 1
            names[branch] = f"layers.{self.index}.{kind}" + (f"_{seen[kind]}" if seen[kind] > 1 else "")
        return names

    # Sublayers -------------------------------------------------------------------------------------------------

    def layer(self) -> LayerSite:
        sublayers = tuple(self._sublayer(branch) for branch in self.branches)
        return LayerSite(self.index, self.silent.record.call, self.silent.skip.factor, sublayers)

    def _sublayer(self, branch: Branch) -> Sublayer:
        pre = self._pre_norms(branch)
        readers = self._with_twins(self._readers(branch))
        return Sublayer(
            name=self.names[branch],
            kind=self.kinds[branch],
            layer=self.index,
            output=self._output(branch),
            update=branch.update,
            multiplier=branch.multiplier.factor,
            reads=pre or readers,
            pre_norm=pre[0] if pre else None,
            output_norm=branch.norms[-1] if branch.norms else None,
            trunk_norm=self._trunk_norm(branch),
            readers=readers,
            writers=self._with_twins(c for c in self.matrices if self._writes_to(c, branch)),
            parallel_to=self._parallel_to(branch),
            skip=self._skip(branch),
        )

    def _holds_stream(self, branch: Branch) -> bool:
        """Whether what one of its readers makes goes on as it is to its last matrix, past matrices that are silent."""
        readers = self._readers(branch)
        writers = [c for c in self.matrices if self._writes_to(c, branch)]
        others = (c for c in self.matrices if c not in (*readers, *writers) and branch in self.real.fed_by(c))
        return next(others, None) is not None and any(self._goes_on(r, w) for r in readers for w in writers)

    def _goes_on(self, reader: Call, writer: Call) -> bool:
        bump, run = self.silent.from_output(reader, along_stream=True)
        gain = gain_of(self.silent.stream_runs[0].input(writer), run.input(writer), bump)
        return gain.factor != 0 and gain.is_exact

    def _pre_norms(self, branch: Branch) -> tuple[Call, ...]:
        return tuple(c for c in self.norms if self.silent.bits(c) == (True, False) and branch in self.real.fed_by(c))

    def _writes_to(self, matrix: Call, branch: Branch) -> bool:
        return self.silent.leads(matrix, Port(branch.update, "output")) and self.silent.leads(matrix, self.silent.end)

    def _with_twins(self, calls: Iterable[Call]) -> tuple[Call, ...]:
        """The calls, and the matrices at their place in other members of a list inside the layer that did not run.

        Experts that no token was sent to.
        """
        found = tuple(calls)
        ran = {call.path for call in self.matrices}
        idle = [path for path in self._twins if path not in ran]
        places = {place for call in found for place in self._twins.get(call.path, ())}
        return found + tuple(Call(path) for path in idle if places & set(self._twins[path]))

    @cached_property
    def _twins(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """For every matrix: the lists around it within the layer, each with the path inside the member."""
        prefix = f"{self.silent.record.call.path}."
        paths = [path for path in self.subject.matrices if path.startswith(prefix)]
        return {path: tuple(self.subject.places_in_lists(path, len(prefix))) for path in sorted(paths)}

    def _output(self, branch: Branch) -> Call:
        """The first member with a matrix in it: what comes behind is a norm, a dropout, a small convolution."""
        holding = [c for c in branch.members if any(self._is_at_or_in(path, c) for path in self.subject.matrices)]
        return holding[0] if holding else branch.members[0]

    def _is_at_or_in(self, path: str, call: Call) -> bool:
        return path == call.path or path.startswith(f"{call.path}.")

    def _trunk_norm(self, branch: Branch) -> Call | None:
        """The first norm on the stream behind the update, unless something else reads the sum before."""
        standing = next((c for c in self._standing if self._is_seen(branch, c)), None)
        entries = (c for c in (*self.norms, *self.matrices) if c not in self._standing and self.silent.reads(c))
        earlier = (c for c in entries if standing is not None and self._start(c) < self._start(standing))
        return None if any(self._is_seen(branch, c) for c in earlier) else standing

    @cached_property
    def _standing(self) -> tuple[Call, ...]:
        """Norms that the stream runs through."""
        return tuple(c for c in self.norms if self.silent.bits(c) == (True, True))

    def _is_seen(self, branch: Branch, call: Call) -> bool:
        """Whether a branch's update is in a call's input."""
        return self.silent.reaches(branch.update, Port(call, "input"))

    def _start(self, call: Call) -> int:
        return self.silent.base.records[call].start

    def _parallel_to(self, branch: Branch) -> tuple[str, ...]:
        """Later branches whose inputs do not move with this one's update."""
        later = self.branches[self.branches.index(branch) + 1 :]
        return tuple(self.names[other] for other in later if not self._sees(other, branch))

    def _sees(self, branch: Branch, earlier: Branch) -> bool:
        entries = [c for c in self.norms if self.silent.reads(c) and branch in self.real.fed_by(c)]
        return any(self._is_seen(earlier, c) for c in (*entries, *self._readers(branch)))

    def _skip(self, branch: Branch) -> float:
        """The stream's gain behind the addition over that behind the addition before it, or at the layer's input."""
        ordered: list[Gain] = [Gain(1.0, True)]
        for other in self.branches:
            if other.after == branch.after:
                break
            ordered.append(other.stream_gain)
        return float(f"{branch.stream_gain.factor / ordered[-1].factor:.6g}") if ordered[-1].factor else 1.0

    # Norms -----------------------------------------------------------------------------------------------------

    def sites(self, before: Sublayer | None) -> list[NormSite]:
        """The places of the layer's norms; ``before`` is the last sublayer of the layers before, None for the first."""
        return [self._site(call, before) for call in self.norms]

    def _site(self, call: Call, before: Sublayer | None) -> NormSite:
        place, branches = self._place(call, has_branch_before=before is not None)
        feeds = distinct(self.kinds[branch] for branch in branches)
        names = tuple(self.names[branch] for branch in branches)
        if place == "trunk" and not branches and before is not None:
            feeds, names = distinct([before.kind]), (before.name,)
        scope = self._scope(call, place)
        return NormSite(call, place, feeds, names, self.index, scope, self.subject.norms[call.path])

    def _place(self, call: Call, has_branch_before: bool) -> tuple[Place, tuple[Branch, ...]]:
        match self.silent.bits(call):
            case (True, True):
                behind = self._behind(call)
                return ("trunk" if behind or has_branch_before else "embedding"), behind
            case (False, True):
                return "output", tuple(branch for branch in self.branches if call in branch.norms)
            case (True, False):
                fed = self.real.fed_by(call)
                return ("pre" if fed else "no_effect"), fed
        fed = self.real.fed_by(call)
        if not fed:
            return "no_effect", ()
        return ("context" if call in self.foreign else self._inner_place(call, fed[0])), fed

    def _behind(self, call: Call) -> tuple[Branch, ...]:
        """Branches that are added between the norm on the stream before this one and this one."""
        earlier = self._standing[: self._standing.index(call)]
        return tuple(
            branch
            for branch in self.branches
            if self._is_seen(branch, call) and not any(self._is_seen(branch, c) for c in earlier)
        )

    def _inner_place(self, call: Call, branch: Branch) -> Place:
        output = self.real.base.output(call)
        fed = [c for c in self.matrices if _is_same(output, self.real.base.input(c))]
        is_narrow = self.subject.norms[call.path].width < self.silent.bump.shape[-1]
        return self.real.inner_place(
            call,
            branch,
            feeds_latent=bool(fed) and is_narrow,
            feeds_output=any(self.silent.writes(c) for c in fed) or (bool(fed) and not is_narrow),
        )

    def _scope(self, call: Call, place: Place) -> Literal["stream", "per_head", "flattened", "latent"]:
        if place in ("latent_q", "latent_kv"):
            return "latent"
        if place in ("pre", "output", "trunk", "embedding", "context"):
            return "stream"
        given = self.real.base.input(call)
        if given is None:
            return "flattened"
        lengths = [length for length in self.silent.lengths if given.numel() % length == 0]
        features = max((given.numel() // length for length in lengths), default=0)
        return "per_head" if given.ndim > 3 or features > self.subject.norms[call.path].width else "flattened"

    def problems(self) -> Iterator[str]:
        """What could not be shown about the layer, in sentences."""
        where = str(self.silent.record.call)
        if not self.silent.carries(self.silent.end):
            yield f"{where}: its output does not follow its input when its branches are silent: no residual stream"
        elif not self.silent.skip.is_exact:
            yield f"{where}: its output is not a multiple of its input when its branches are silent; skip is a mean"
        if not self.branches:
            yield f"{where}: nothing in it writes to the stream"
        for branch in self.branches:
            if self.kinds[branch] == "other":
                yield f"{self.names[branch]} ({branch.update}): does not react to its layer's input"
            if self._holds_stream(branch):
                yield (
                    f"{self.names[branch]} ({branch.update}): a stream of its own runs inside it, to which other "
                    f"matrices add; the branches in there could not be separated and count as one {self.kinds[branch]}"
                )
            if not branch.multiplier.is_exact:
                yield (
                    f"{self.names[branch]} ({branch.update}): what is added is not a multiple of its output "
                    "(a gain for each channel, or several copies of the stream); multiplier is a mean"
                )


def distinct(kinds: Iterable[SublayerKind]) -> tuple[SublayerKind, ...]:
    """Every kind once, in order of first appearance."""
    found: dict[SublayerKind, None] = {}
    for kind in kinds:
        found[kind] = None
    return tuple(found)


def _is_same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.numel() == b.numel() and bool(torch.equal(a.flatten(), b.flatten()))
