"""What a rescaled model's parameters, eps and config become, so that the stream h is h / 2^k and the logits stay.

Six roles of a parameter, each with a power of two that its value is multiplied by; a parameter may have several:

    start    what the stream starts from (embeddings, or the gain and bias of a norm on them)         2^-k
    writer   what is added to the stream: the last matrices of a branch with their biases, or the     2^-k
             gain and bias of the norm behind them
    trunk    gain and bias of a norm that the stream itself goes through                              2^-k
    reader   a matrix that reads the stream without a norm; its bias stays                            2^k
    inner    rows that feed a norm whose eps has to change although its input would not               2^-k
    head     gain and bias of the norm before a tied head, whose matrix has become smaller            2^k

The eps of every norm that reads the stream is multiplied by 4^-k. One number of a config serves many norms, so those
inside branches change with it; ``N(2^-k x; 4^-k eps) = N(x; eps)`` keeps their output, and ``inner`` gives them 2^-k x.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from normstream.checkpoints.rescaling.changes import EpsChange, Plan, Role, Scaling
from normstream.checkpoints.rescaling.feeders import (
    Bench,
    feeders_of,
    is_matrix,
    make_bench,
    near,
    output_axis,
    present,
)
from normstream.checkpoints.rescaling.stacked import reading_parameters, writing_parameters
from normstream.checkpoints.rescaling.stream_start import multiplied, starting_modules
from normstream.inspect.anatomy import Anatomy, Call, NormSite, Place, StackAnatomy, Sublayer
from normstream.inspect.hooks import Changes, Recorder
from normstream.names import shortened

READS_STREAM = ("pre", "trunk", "final")
"""Places of norms whose input is the stream."""


class Planner:
    """Works out the changes of one model; nothing is changed.

    Args:
        model: in evaluation mode.
        inputs: keyword arguments of its ``forward``.
        anatomy: of the model.
        k: power of two to divide the stream by.
        eps: paths of the norms whose eps is multiplied by 4^-k.
    """

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Any], anatomy: Anatomy, k: int, eps: frozenset[str]
    ) -> None:
        self.model, self.inputs, self.anatomy, self.k, self.eps = model, inputs, anatomy, k, eps
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.sites = {site.call: site for site in anatomy.norms}
        self.layers = {layer.call: layer for stack in anatomy.stacks for layer in stack.layers}
        self.scalings: dict[tuple[str, Role, tuple[int, ...] | None], Scaling] = {}
        self.inexact: list[str] = []
        self.untied: str | None = None
        self.benches: dict[Call, Bench] = {}

    def plan(self) -> Plan:
        """All changes.

        Raises:
            ValueError: for a model whose function cannot be kept, saying why.
        """
        sublayers = [sublayer for stack in self.anatomy.stacks for sublayer in stack.sublayers]
        ends = {call.path for sublayer in sublayers for call in (*sublayer.writers, *sublayer.readers)}
        keep = frozenset(layer.path for layer in self.layers) | ends
        with Recorder(self.model) as recorder:
            self.recorder, self.run = recorder, recorder.run(self.inputs, keep=keep)
            for stack in self.anatomy.stacks:
                self._start(stack)
                for layer in stack.layers:
                    for sublayer in layer.sublayers:
                        self._sublayer(layer.call, sublayer)
                for site in stack.norms:
                    self._norm(stack, site)
                self._behind(stack)
            self._head()
        self._check_eps()
        return Plan(
            self.k,
            tuple(self.scalings.values()),
            self.eps_changes(),
            {},
            self.untied,
            tuple(self.inexact),
            self._unused(),
        )

    def eps_changes(self) -> tuple[EpsChange, ...]:
        """The norms whose eps becomes another."""
        facts = {site.call.path: site.facts for site in self.anatomy.norms}
        return tuple(EpsChange(path, facts[path].eps or 0.0, -2 * self.k) for path in sorted(self.eps) if path in facts)

    # One part of the model after the other -----------------------------------------------------------------------

    def _start(self, stack: StackAnatomy) -> None:
        modules = dict(self.model.named_modules())
        inside = tuple(f"{call.path}." for call in self.layers)
        outside = [
            path
            for path, module in modules.items()
            if not f"{path}.".startswith(inside) and any(True for _ in module.parameters(recurse=False))
        ]
        head = [] if self.anatomy.head is None else list(modules[self.anatomy.head.path].parameters())
        embedding_norms = [
            site.call
            for site in stack.norms
            if place_of(site, self.anatomy) == "embedding" and site.call.path in self.eps
        ]
        targets: list[tuple[Call, Role]] = [
            (stack.layers[0].call, "start"),
            *((call, "inner") for call in embedding_norms),
        ]
        for target, role in targets:
            found = starting_modules(self.model, self.inputs, target, outside, head)
            if found is None:
                raise ValueError(
                    f"what arrives at {target} cannot be scaled by the parameters before it: a norm without a gain "
                    "gives it unit length, or a fixed table (sinusoidal positions) is a part of it"
                )
            for path in found:
                for parameter in modules[path].parameters(recurse=False):
                    self._add(parameter, role, -self.k)

    def _sublayer(self, layer: Call, sublayer: Sublayer) -> None:
        if sublayer.pre_norm is None:
            for call in sublayer.readers:
                self._read_raw(call)
        if sublayer.output_norm is not None:
            self._gain(self.sites[sublayer.output_norm], "writer", -self.k)
            if sublayer.output_norm.path in self.eps:
                self._write(layer, sublayer, "inner")
        else:
            self._write(layer, sublayer, "writer")

    def _norm(self, stack: StackAnatomy, site: NormSite) -> None:
        place = place_of(site, self.anatomy)
        if place == "trunk" and not self._is_last(stack, site):
            self._gain(site, "trunk", -self.k)
        if place in (*READS_STREAM, "output", "embedding") or site.call.path not in self.eps:
            return
        layer = next((call for call in self.layers if f"{site.call.path}.".startswith(f"{call.path}.")), None)
        found = () if layer is None else feeders_of(self._bench(layer), site.call)
        for feeder in found:
            self._scale_output(feeder.call, "inner", -self.k, feeder.rows)
        if not found:
            self.inexact.append(
                f"the eps of {site.call} is the same number of the config as that of the norms on the stream, "
                "and nothing linear feeds it"
            )

    def _behind(self, stack: StackAnatomy) -> None:
        """Matrices behind the last layer that read the stream without a norm, and norms there that do not read it."""
        last = stack.layers[-1].call
        if any(site.place == "trunk" and self._is_last(stack, site) for site in stack.norms):
            return
        halve = Changes(outputs={last: lambda given, output: output / 2})
        run = self.recorder.run(self.inputs, halve)
        for call, record in self.run.records.items():
            is_outside = not any(f"{call.path}.".startswith(f"{layer.path}.") for layer in self.layers)
            if not is_outside or record.start < self.run.records[last].end or record.input is None:
                continue
            given = run.input(call)
            if is_matrix(self.recorder.modules[call.path]) and given is not None and near(2 * given, record.input):
                self._read_raw(call)

    def _head(self) -> None:
        """A tied head has become smaller with the embedding: the norm before it makes up for that, or it is untied."""
        call = self.anatomy.head
        if call is None:
            return
        exponent = self._scaled_with_start(self.recorder.modules[call.path])
        if not exponent or self.untied is not None:
            return
        nearest = sorted(self.sites.values(), key=lambda site: -self.run.records[site.call].start)
        before = next((site for site in nearest if self._feeds_head(site, call)), None)
        if before is not None and before.facts.gain in ("plain", "one_plus_w"):
            self._gain(before, "head", -exponent)
        else:
            self.untied = call.path

    def _scaled_with_start(self, head: nn.Module) -> int:
        """Power of two that a head's matrix has been multiplied by because the stream starts from it."""
        own = {self.names[id(parameter)] for parameter in head.parameters(recurse=False) if parameter.ndim > 1}
        return sum(s.exponent for s in self.scalings.values() if s.parameter in own and s.role in ("start", "inner"))

    # What they consist of ---------------------------------------------------------------------------------------

    def _read_raw(self, call: Call) -> None:
        module = self.recorder.modules[call.path]
        if call == self.anatomy.head and self.anatomy.is_tied and self._scaled_with_start(module):
            self.untied = call.path
            matrix = next(name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim > 1)
            own = f"{call.path}.{matrix}"
            self.scalings[own, "reader", None] = Scaling(own, "reader", self.k)
            return
        for parameter in reading_parameters(self.recorder, self.run.records.get(call), module):
            self._add(parameter, "reader", self.k)

    def _write(self, layer: Call, sublayer: Sublayer, role: Role) -> None:
        if not sublayer.writers:
            raise ValueError(f"{sublayer.name} adds something to the stream that no matrix was found to write")
        own: list[nn.Parameter] = []
        for call in sublayer.writers:
            own += writing_parameters(self.recorder, self.run.records.get(call), self.recorder.modules[call.path])
        for parameter in (*own, *self._beside(layer, sublayer, own)):
            self._add(parameter, role, -self.k)

    def _beside(self, layer: Call, sublayer: Sublayer, own: list[nn.Parameter]) -> tuple[nn.Parameter, ...]:
        """A vector that is added behind the last matrices, if halving those alone does not halve the branch."""
        bench = self._bench(layer)
        whole = present(bench.run.output(sublayer.output), sublayer.output)
        loose = [
            parameter
            for module in self.recorder.modules[layer.path].modules()
            if not is_matrix(module)
            for parameter in module.parameters(recurse=False)
            if parameter.ndim == 1
        ]
        for chosen in ((), *((parameter,) for parameter in loose)):
            with multiplied([*own, *chosen], 0.5):
                output = bench.recorder.replay(bench.record).output(sublayer.output)
            if near(2 * present(output, sublayer.output), whole):
                return chosen
        raise ValueError(
            f"{sublayer.name} does not become smaller with its last matrices alone: "
            + ", ".join(str(call) for call in sublayer.writers)
        )

    def _scale_output(self, call: Call, role: Role, exponent: int, rows: tuple[int, ...] | None) -> None:
        module, record = self.recorder.modules[call.path], self._bench(self._layer_of(call)).run.records[call]
        axis = output_axis(module, present(record.input, call), present(record.output, call))
        for parameter in module.parameters(recurse=False):
            self._add(parameter, role, exponent, rows=rows, axis=axis if parameter.ndim > 1 else 0)

    def _gain(self, site: NormSite, role: Role, exponent: int) -> None:
        module, gain = self.recorder.modules[site.call.path], site.facts.gain
        if gain not in ("plain", "one_plus_w"):
            raise ValueError(
                f"{site.call} puts a vector of unit length on the stream, and has no gain that could be scaled: the "
                "scale of this stream is fixed"
            )
        for parameter in module.parameters():
            is_gain = gain == "one_plus_w" and not (site.facts.has_bias and _is_bias(module, parameter, site))
            self._add(parameter, role, exponent, is_zero_centred=is_gain)

    def _add(self, parameter: nn.Parameter, role: Role, exponent: int, **options: Any) -> None:
        scaling = Scaling(self.names[id(parameter)], role, exponent, **options)
        known = self.scalings.setdefault((scaling.parameter, role, scaling.rows), scaling)
        if known != scaling:
            raise ValueError(f"{scaling.parameter} is used in two places that need different factors")

    # What the run says ------------------------------------------------------------------------------------------

    def _bench(self, layer: Call) -> Bench:
        if layer not in self.benches:
            self.benches[layer] = make_bench(self.recorder, self.run.records[layer])
        return self.benches[layer]

    def _layer_of(self, call: Call) -> Call:
        around = self.run.records[call].around
        return next((other for other in around if other in self.layers), call)

    def _is_last(self, stack: StackAnatomy, site: NormSite) -> bool:
        """Whether a stack ends with this norm: it then gives what a final norm gives, and keeps its gain."""
        is_shared = any(other.path == site.call.path and other != site.call for other in self.run.records)
        end, given = self.run.output(stack.layers[-1].call), self.run.output(site.call)
        return not is_shared and end is not None and given is not None and torch.equal(end, given)

    def _feeds_head(self, site: NormSite, head: Call) -> bool:
        """Whether the head is given the norm's output, or a multiple of it."""
        given, output = self.run.input(head), self.run.output(site.call)
        if given is None or output is None or given.shape != output.shape:
            return False
        scale = (given * output).sum() / output.square().sum()
        return near(scale * output, given)

    def _check_eps(self) -> None:
        if fixed := sorted(norms_on_stream(self.anatomy) - self.eps):
            self.inexact.append(f"the eps of norms on the stream is fixed in the model's code: {shortened(fixed)}")

    def _unused(self) -> tuple[str, ...]:
        """A note on matrices inside the layers that did not run, and for which nothing spoke."""
        ran, known = {call.path for call in self.run.records}, {scaling.parameter for scaling in self.scalings.values()}
        inside = tuple(f"{call.path}." for call in self.layers)
        idle = [
            path
            for path, module in self.recorder.modules.items()
            if path.startswith(inside) and path not in ran and is_matrix(module)
        ]
        if idle := [path for path in idle if not any(name.startswith(f"{path}.") for name in known)]:
            return (f"these matrices did not run on the given input and were left alone: {shortened(idle)}",)
        return ()


def norms_on_stream(anatomy: Anatomy) -> frozenset[str]:
    """Paths of the norms whose input is the stream, and which have an eps."""
    return frozenset(
        site.call.path for site in anatomy.norms if place_of(site, anatomy) in READS_STREAM and site.facts.eps
    )


def place_of(site: NormSite, anatomy: Anatomy) -> Place:
    """The place of a norm; inside the first layer, one on the embedding is one that the stream goes through."""
    inside = tuple(f"{layer.call.path}." for stack in anatomy.stacks for layer in stack.layers)
    return "trunk" if site.place == "embedding" and site.call.path.startswith(inside) else site.place


def _is_bias(norm: nn.Module, parameter: nn.Parameter, site: NormSite) -> bool:
    """Whether a parameter is what a norm gives for zeros."""
    zeros = torch.zeros(1, 1, site.facts.features, dtype=parameter.dtype)
    return torch.equal(norm(zeros).detach().flatten(), parameter.detach().flatten())
