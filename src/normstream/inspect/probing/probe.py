"""``anatomy_of``: where every norm of a model sits and what every branch of its layers does, found by running it.

No class, module name or model type is read. What is used: which modules are in a module list (layers), which are
embeddings, parameter shapes, and the values that flow between calls. See ``silent`` and ``frozen`` for the two worlds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from normstream.inspect.anatomy import Anatomy, Call, NormSite, StackAnatomy
from normstream.inspect.hooks import NO_CHANGES, Changes, Recorder, Run, repeats
from normstream.inspect.inputs import check_runs, make_inputs
from normstream.inspect.probing.frozen import FrozenLayer
from normstream.inspect.probing.functional import functional_norms
from normstream.inspect.probing.head import find_head, is_tied
from normstream.inspect.probing.layer_probe import LayerProbe, distinct
from normstream.inspect.probing.outside import Outside, Surroundings
from normstream.inspect.probing.silent import Port, SilentLayer, bump_like, constants, has_moved, identities
from normstream.inspect.probing.subject import Subject, layer_lists, prepare, silenced, with_callers
from normstream.inspect.probing.tokens import at_token, token_axis


@torch.random.fork_rng(devices=[])
def anatomy_of(model: nn.Module, inputs: Mapping[str, Any] | None = None, seed: int = 0) -> Anatomy:
    """The wiring of a model, by module paths of ``model``, which is not changed: a copy is run with drawn matrices.

    Args:
        model: any module with a list of layers.
        inputs: keyword arguments of its ``forward``; None makes them with ``make_inputs``.
        seed: for the drawn values.

    Raises:
        ValueError: if the model does not run with these inputs, or if it has neither norms nor a stream through layers.
            With norms but without a stream, their place is "unknown" and a note says which assumption failed.

    >>> class Layer(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.norm, self.ffn = nn.LayerNorm(8), nn.Linear(8, 8)
    ...     def forward(self, x):
    ...         return x + self.ffn(self.norm(x))
    >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Sequential(Layer(), Layer()))
    >>> for norm in anatomy_of(model).norms:
    ...     print(norm.call, norm.place, norm.feeds)
    1.0.norm pre ('ffn',)
    1.1.norm pre ('ffn',)
    """
    inputs = make_inputs(model, seed=seed) if inputs is None else inputs
    check_runs(model, inputs)
    subject = prepare(model, inputs, seed)
    with Recorder(subject.model) as recorder:
        probe = _Probe(subject, recorder, inputs)
        try:
            anatomy = probe.anatomy()
        except NoStream as problem:
            anatomy = probe.without_stream(str(problem))
    return replace(anatomy, is_tied=is_tied(model, anatomy.head))


class NoStream(ValueError):
    """There is nothing that the probe's two worlds could be applied to."""


@dataclass
class _Stack:
    """The calls of the lists of layers that share one stream, in order."""

    calls: list[Call]
    start: Port
    """Where the stream can first be seen."""
    entry: Port | None = None
    """Where a bump enters a layer, if that is not its input."""
    layers: list[LayerProbe] = field(default_factory=list)


class _Probe:
    """One probing of one model. The attributes are filled in the order of ``anatomy``."""

    def __init__(self, subject: Subject, recorder: Recorder, inputs: Mapping[str, Any]) -> None:
        self.subject, self.recorder, self.inputs = subject, recorder, inputs
        self.notes = list(subject.notes)
        self.lists = layer_lists(subject.model, subject.matrices)
        self.kept, self.is_stale = {path for paths in self.lists for path in paths}, False
        self.real = self._run()
        if not repeats(self.real, self._run()):
            self.notes.append("two runs with the same inputs differ: the probe cannot tell that from effects")
        self.subject = with_callers(subject, {call.path for call in self.real.records})
        self.norms = frozenset(call for call in self.real.records if call.path in subject.norms)
        self.stacks: list[_Stack] = []

    def anatomy(self) -> Anatomy:
        """Raises NoStream if there are no layers with a stream through them."""
        self.stacks = self._listed_stacks()
        records = [[self.real.records[call] for call in stack.calls] for stack in self.stacks]
        with silenced(self.subject, self.real, records):
            self._look_inside()
            around = Surroundings(self.recorder, self.inputs, self.still, self.subject)
            self.stacks = self._joined(around)
            within = {call for stack in self.stacks for call in stack.calls}
            outsides = [around.look(stack.calls, stack.start, within) for stack in self.stacks]
        self.real = self._run() if self.is_stale else self.real
        self._freeze(outsides)
        stacks = [self._stack(n, outside) for n, outside in enumerate(outsides)]
        self._place_rest(stacks)
        return self._whole(stacks, max(self.real.records[stack.calls[-1]].end for stack in self.stacks))

    def without_stream(self, problem: str) -> Anatomy:
        """What can be said although no stream was found. Raises ValueError if there are no norms either."""
        if not self.norms:
            raise ValueError(problem)
        self.notes.append(problem)
        unknown = [
            NormSite(call, "unknown", (), (), None, "stream", self.subject.norms[call.path])
            for call in self.real.records
            if call in self.norms
        ]
        return self._whole([StackAnatomy("main", (), tuple(unknown), (), 1.0)], end=0)

    def _whole(self, stacks: list[StackAnatomy], end: int) -> Anatomy:
        head, multiplier = find_head(self.recorder, self.inputs, self.real, self.subject, end)
        functional = functional_norms(self.subject.model, self.inputs, self.subject.norms)
        if functional:
            self.notes.append(
                f"{sum(functional.values())} operations normalize outside of any norm module, as in "
                f"{next(iter(functional))}: they are counted, not placed, and no part of what the placement is called"
            )
        return Anatomy(tuple(stacks), head, False, multiplier, sum(functional.values()), tuple(self.notes))

    def _run(self, changes: Changes = NO_CHANGES) -> Run:
        return self.recorder.run(self.inputs, changes, frozenset(self.kept))

    def _keep(self, *paths: str) -> None:
        """Makes calls of more modules replayable; the real run is repeated once the matrices have values again."""
        self.kept |= set(paths)
        self.still, self.is_stale = self._run(identities(self.norms)), True

    # Stacks ----------------------------------------------------------------------------------------------------

    def _listed_stacks(self) -> list[_Stack]:
        found = []
        for paths in self.lists:
            calls = [call for call in self.real.records if call.path in paths]
            idle = [path for path in paths if path not in {call.path for call in calls}]
            if idle:
                more = f" and {len(idle) - 1} more members of its list" if len(idle) > 1 else ""
                self.notes.append(f"{idle[0]}{more}: did not run with these inputs, not probed")
            if calls:
                found.append(calls)
        if not found:
            raise NoStream(
                "expected a list of layers (nn.ModuleList, nn.Sequential) with matrices in each that are called, "
                "found none: the places of norms are unknown"
            )
        found.sort(key=lambda calls: self.real.records[calls[0]].start)
        return [_Stack(calls, Port(calls[0], "input")) for calls in found]

    def _look_inside(self) -> None:
        """Looks into the layers in the silent world; drops lists that no stream runs through."""
        self.still = self._run(identities(self.norms))
        for stack in self.stacks:
            self._fill(stack)
        self._open_stages()
        streams = [s for s in self.stacks if any(la.silent.carries(la.silent.end) for la in s.layers)]
        if not streams:
            streams = [self._one_layer()]
        dropped = [str(stack.calls[0]) for stack in self.stacks if stack not in streams and streams[0].entry is None]
        if dropped:
            self.notes.append(f"{', '.join(dropped)} and what follows in the same list: no stream runs through them")
        self.stacks = streams
        for stack in self.stacks:
            for layer in stack.layers:
                layer.look()

    def _open_stages(self) -> None:
        """Where a list's members break the stream and have lists of layers inside, those are the layers instead."""
        for stack in [s for s in self.stacks if not all(la.silent.carries(la.silent.end) for la in s.layers)]:
            inside = [
                [f"{call.path}.{path}" for path in paths]
                for call in stack.calls
                for paths in layer_lists(self.recorder.modules[call.path], self._matrices_in(call.path))
            ]
            if not inside:
                continue
            self._keep(*(path for paths in inside for path in paths))
            stages = [[call for call in self.still.records if call.path in paths] for paths in inside]
            opened = [_Stack(calls, Port(calls[0], "input")) for calls in stages if calls]
            for stage in opened:
                self._fill(stage)
            if all(la.silent.carries(la.silent.end) for stage in opened for la in stage.layers):
                self.stacks = [s for s in self.stacks if s is not stack] + opened
        self.stacks.sort(key=lambda s: self.still.records[s.calls[0]].start)

    def _matrices_in(self, path: str) -> frozenset[str]:
        return frozenset(m.removeprefix(f"{path}.") for m in self.subject.matrices if m.startswith(f"{path}."))

    def _fill(self, stack: _Stack) -> None:
        for index, call in enumerate(stack.calls):
            entry = stack.entry or Port(call, "input")
            lengths = self._lengths(entry.of(self.still))
            silent = SilentLayer(self.recorder, self.still.records[call], entry, self.norms, lengths)
            stack.layers.append(LayerProbe(index, self.subject, silent))

    def _one_layer(self) -> _Stack:
        """The innermost call around all members of lists, taken for a single layer if a stream runs through it."""
        members = [self.still.records[call] for stack in self.stacks for call in stack.calls]
        whole = [call for call in members[0].around if all(call in member.around for member in members)][-1]
        self._keep(whole.path)
        before = [r.call for r in self.still.records.values() if r.end < members[0].start and r.around[-1:] == (whole,)]
        for entry in [Port(whole, "input"), *(Port(call, "output") for call in reversed(before))]:
            if entry.of(self.still) is None:
                continue
            stack = _Stack([whole], Port(members[0].call, "input"), entry)
            self._fill(stack)
            silent = stack.layers[0].silent
            if silent.carries(silent.end) and silent.reads(members[0].call):
                self.notes.append(
                    f"no module in a list is a layer with a stream through it: {whole} is taken for the only layer"
                )
                return stack
        raise NoStream(
            "expected layers whose output follows their input when all matrices are zero, or parts of layers in lists; "
            "found neither: there is no residual stream, the places of norms are unknown"
        )

    def _lengths(self, entering: Tensor | None) -> frozenset[int]:
        """Sequence lengths of the inputs; where the stream has none of them, its own."""
        given = [value for value in self.inputs.values() if isinstance(value, Tensor) and not value.is_floating_point()]
        lengths = {value.shape[-1] for value in given if value.ndim > 1}
        if entering is not None and entering.ndim > 1 and token_axis(entering, lengths) is None:
            lengths.add(entering.shape[-2])
        return frozenset(lengths)

    def _joined(self, around: Surroundings) -> list[_Stack]:
        """Stacks whose stream goes on in another one's layers are one."""
        joined: list[_Stack] = []
        for stack in self.stacks:
            if not joined or not around.leads(joined[-1].calls[-1], stack.start):
                joined.append(stack)
                continue
            for layer in stack.layers:
                layer.index += len(joined[-1].calls)
            joined[-1].calls, joined[-1].layers = joined[-1].calls + stack.calls, joined[-1].layers + stack.layers
        return joined

    # Both worlds -----------------------------------------------------------------------------------------------

    @cached_property
    def updates(self) -> dict[Call, LayerProbe]:
        """The last call of every branch, and the layer it is in."""
        return {branch.update: la for stack in self.stacks for la in stack.layers for branch in la.branches}

    @cached_property
    def frozen(self) -> Changes:
        return constants({call: self.real.output(call) for call in self.updates})

    def _freeze(self, outsides: list[Outside]) -> None:
        cross = self._moved_by_other_stacks()
        for n, stack in enumerate(self.stacks):
            foreign = frozenset(call for m, outside in enumerate(outsides) if m != n for call in outside.followers)
            bumped = self._start_bumped(stack)
            for layer in stack.layers:
                silent = layer.silent
                record = self.real.records[silent.record.call]
                layer.frozen = FrozenLayer(self.recorder, record, silent.entry, silent.branches, silent.lengths)
                layer.foreign, layer.cross, layer.start_bumped = foreign, cross, (self.real, bumped)

    def _start_bumped(self, stack: _Stack) -> Run:
        lengths = stack.layers[0].silent.lengths
        return self.recorder.run(self.inputs, self.frozen | stack.start.changed(lambda given: at_token(given, lengths)))

    def _moved_by_other_stacks(self) -> frozenset[Call]:
        """Updates that move when an earlier stack gets another input, with all updates frozen.

        A stack that starts from the end of an earlier one (a stage behind a down-sampling) has no such updates.
        """
        moved: set[Call] = set()
        for n, stack in enumerate(self.stacks[:-1]):
            entering = stack.start.of(self.real)
            assert entering is not None
            bump = bump_like(entering)
            run = self.recorder.run(
                self.inputs, self.frozen | stack.start.changed(lambda given, bump=bump: given + bump)
            )
            others = [s for s in self.stacks[n + 1 :] if not has_moved(s.start.of(self.real), s.start.of(run))]
            later = {branch.update for s in others for layer in s.layers for branch in layer.branches}
            moved |= {call for call in later if has_moved(self.real.output(call), run.output(call))}
        return frozenset(moved)

    def _stack(self, n: int, outside: Outside) -> StackAnatomy:
        layers, sites, last = [], [], None
        for layer in self.stacks[n].layers:
            layers.append(layer.layer())
            sites += layer.sites(last)
            last = next(reversed(layers[-1].sublayers), last)
            self.notes += layer.problems()
        outer = [outside.site(call, layers, self.subject.norms[call.path]) for call in outside.places]
        before = [site for site in outer if site.place == "embedding"]
        return StackAnatomy(
            name=self._names()[n],
            layers=tuple(layers),
            norms=(*before, *sites, *(site for site in outer if site not in before)),
            embeddings=tuple(outside.embeddings),
            embedding_multiplier=outside.embedding_multiplier,
            end_readers=outside.end_readers,
        )

    def _names(self) -> list[str]:
        if len(self.stacks) == 1:
            return ["main"]
        is_cross = any(layer.cross for layer in self.stacks[-1].layers)
        if len(self.stacks) == 2 and is_cross:
            return ["encoder", "decoder"]
        return [f"stack_{index}" for index in range(len(self.stacks))]

    def _place_rest(self, stacks: list[StackAnatomy]) -> None:
        """Norms that stand in no layer and on no stream: they feed branches from outside, or belong to the head."""
        placed = {site.call for stack in stacks for site in stack.norms}
        end = max(self.real.records[stack.calls[-1]].end for stack in self.stacks)
        for call in self.real.records:
            if call not in self.norms or call in placed:
                continue
            n, site = self._rest(call, is_behind=self.real.records[call].start > end)
            stacks[n] = replace(stacks[n], norms=(*stacks[n].norms, site))

    def _rest(self, call: Call, is_behind: bool) -> tuple[int, NormSite]:
        facts = self.subject.norms[call.path]
        if is_behind:
            return len(self.stacks) - 1, NormSite(call, "head", (), (), None, "stream", facts)
        output = self.real.output(call)
        assert output is not None
        bump = bump_like(output)
        run = self.recorder.run(self.inputs, self.frozen | Port(call, "output").changed(lambda given: given + bump))
        fed = [
            (la, b)
            for u, la in self.updates.items()
            for b in la.branches
            if b.update == u and _moved(self.real, run, u)
        ]
        if any(has_moved(stack.start.of(self.real), stack.start.of(run)) for stack in self.stacks):
            return 0, NormSite(call, "embedding", (), (), None, "latent", facts)
        if not fed:
            self.notes.append(f"{call}: stands in no layer and on no stream, and no branch moves with it")
            return 0, NormSite(call, "unknown", (), (), None, "stream", facts)
        n = next(n for n, stack in enumerate(self.stacks) if fed[0][0] in stack.layers)
        kinds = distinct(layer.kinds[branch] for layer, branch in fed)
        names = tuple(layer.names[branch] for layer, branch in fed)
        return n, NormSite(call, "pre", kinds, names, None, "latent", facts)


def _moved(before: Run, after: Run, call: Call) -> bool:
    return has_moved(before.output(call), after.output(call))
