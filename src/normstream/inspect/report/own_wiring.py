"""The wiring of normstream's own models, found by running every junction on random streams: no placement is known here.

A junction is described if each of its results is a sum of streams, updates and outputs of its norms, with a constant or
a learned vector before each. That is solved for by least squares in float64. Rotations of the stream, weights that
depend on the token and sums over several sublayers are no such sums: ``own_wiring`` then returns None.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normstream.inspect.anatomy import NormFacts, Place, SublayerKind
from normstream.inspect.report.wiring import ONE, Branch, Factor, Mark, Section, Source, Target, Wiring, gather
from normstream.junctions import Drop
from normstream.models import DecoderLM

TOKENS, EXACT = 24, 1e-9
KINDS: dict[str, SublayerKind] = {"attention": "mixer", "feed_forward": "ffn", "cross_attention": "cross"}
INNER: dict[str, Place] = {"v_norm": "v", "context_norm": "sub", "hidden_norm": "sub"}
"""Places by the names of our own modules; those of q and k norms depend on the kind of attention."""


class NotASumError(Exception):
    """A junction whose result is no sum of streams, updates and outputs of norms."""


@dataclass(frozen=True)
class Term:
    """A summand: a stream, the update ``o`` or the output of a norm, times a factor."""

    name: str
    factor: Factor


class Half:
    """One run of a join or a read on random values: what its norms were given and returned, and its results."""

    def __init__(self, module: nn.Module, given: Mapping[str, Tensor], *args: Any) -> None:
        self.known, self.inputs = dict(given), {}
        norms = {name: part for name, part in module.named_children() if not isinstance(part, Drop)}

        def keep(name: str) -> Any:
            def hook(part: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
                self.inputs[name], self.known[name] = args[0].clone(), output.clone()

            return hook

        handles = [part.register_forward_hook(keep(name)) for name, part in norms.items()]
        try:
            self.result = module(*args)
        finally:
            for handle in handles:
                handle.remove()

    def term(self, value: Tensor, without: str = "") -> Term:
        """The one summand of a value."""
        terms = self.terms(value, without)
        if len(terms) != 1:
            raise NotASumError
        return terms[0]

    def terms(self, value: Tensor, without: str = "") -> list[Term]:
        """The summands of a value; NotASumError if there are none that give it exactly."""
        names = [name for name, known in self.known.items() if known.shape == value.shape and name != without]
        if not names:
            raise NotASumError
        columns = torch.stack([self.known[name].reshape(-1) for name in names], dim=1)
        weights = torch.linalg.lstsq(columns, value.reshape(-1, 1)).solution[:, 0]
        low = high = weights
        if not _is_exact(columns @ weights, value.reshape(-1)):
            by_channel = torch.stack([self.known[name].reshape(-1, value.shape[-1]).T for name in names], dim=-1)
            wanted = value.reshape(-1, value.shape[-1]).T.unsqueeze(-1)
            solved = torch.linalg.lstsq(by_channel, wanted).solution
            if not _is_exact(by_channel @ solved, wanted):
                raise NotASumError
            low, high = solved.amin(0)[:, 0], solved.amax(0)[:, 0]
        largest = torch.maximum(low.abs(), high.abs())
        return [
            Term(name, Factor(_number(low[i]), _number(high[i])))
            for i, name in enumerate(names)
            if largest[i] > EXACT * largest.max()
        ]


def _is_exact(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).norm() <= EXACT * wanted.norm())


def _number(weight: Tensor) -> float:
    return float(f"{weight.item():.6g}")


@torch.no_grad()
def own_wiring(model: DecoderLM, facts: Mapping[str, NormFacts]) -> Wiring | None:
    """The wiring of a ``DecoderLM``, or None where a junction is no sum.

    Args:
        model: any placement.
        facts: what its norms compute, by path (``normstream.inspect.probing.norm_facts.find_norms``).
    """
    try:
        return _OwnModel(copy.deepcopy(model).double().eval(), facts).wiring()
    except NotASumError:
        return None


class _OwnModel:
    """A copy of a model in float64, and random streams for its junctions."""

    def __init__(self, model: Any, facts: Mapping[str, NormFacts]) -> None:
        self.model, self.facts = model, facts
        self.generator = torch.Generator().manual_seed(0)

    def wiring(self) -> Wiring:
        model, config = self.model, self.model.config
        junctions = self._junctions()
        start = self._start(junctions[0][1].join)
        state: tuple[Tensor, ...] = junctions[0][1].join((), self._random())
        if len(state) != len(model.streams) or any(stream.ndim != 3 for stream in state):
            raise NotASumError  # n hyper-connected streams in one tensor, or something beside the streams
        sections = []
        for layer, block in enumerate(model.layers):
            branches: list[Branch] = []
            for kind in block.kinds:
                path, before = junctions.pop(0)
                own_path, after = junctions[0]
                branch = self._branch(layer, kind, (f"{path}.read", before.read), (f"{own_path}.join", after.join))
                branches += _side_by_side(branch, block, kind, self) if kind == "parallel" else [branch]
            sections.append(Section((layer,), "layers.*", False, ONE, tuple(branches)))
        path, last = junctions[0]
        sources, final_norms, factor = self._read(f"{path}.read", last.read, "final")
        if not factor.is_one:
            raise NotASumError
        embedding, logits = config.embedding_multiplier, config.logit_multiplier
        names = ("tok_embeddings", "pos_embeddings") if model.pos_embeddings is not None else ("tok_embeddings",)
        return Wiring(
            stack="main",
            streams=model.streams,
            n_layers=len(model.layers),
            embeddings=names,
            embedding_factor=Factor(embedding, embedding),
            start=start,
            sections=gather(sections),
            sources=sources,
            final_norms=final_norms,
            head="lm_head",
            is_tied=config.tied,
            logit_factor=Factor(logits, logits),
        )

    def _junctions(self) -> list[tuple[str, Any]]:
        found = [("before_layers", self.model.before_layers)]
        for layer, block in enumerate(self.model.layers):
            found += [(f"layers.{layer}.after_{kind}", getattr(block, f"after_{kind}")) for kind in block.kinds]
        return found

    def _random(self) -> Tensor:
        return torch.randn(1, TOKENS, self.model.config.dim, generator=self.generator, dtype=torch.float64)

    def _streams(self) -> dict[str, Tensor]:
        return {name: self._random() for name in self.model.streams}

    def mark(self, path: str, place: Place) -> Mark:
        """The norm at a path; in junctions it is named by its half, as ``read.norm``."""
        facts = self.facts.get(path) or self._facts_of_heads(path)
        scope = "stream"
        if place in ("q", "k", "v"):
            scope = "flattened" if facts.width > self.model.config.resolved_head_dim else "per_head"
        elif place.startswith("latent"):
            scope = "latent"
        short = ".".join(path.split(".")[-2:])
        return Mark(place, short, scope, replace(facts, path=short))

    def _facts_of_heads(self, path: str) -> NormFacts:
        """Of a norm that is the part ``norm`` of a module with a gain for each head (``HeadNorm``)."""
        if f"{path}.norm" not in self.facts:
            raise NotASumError  # a point-wise replacement of a norm: nothing to say about it
        whole = self.model.get_submodule(path)
        gain = "none" if whole.weight is None else "one_plus_w" if whole.zero_centered else "plain"
        return replace(self.facts[f"{path}.norm"], gain=gain, has_bias=whole.bias is not None)

    def _start(self, join: nn.Module) -> tuple[Target, ...]:
        embedding = self._random()
        half = Half(join, {"e": embedding}, (), embedding)
        targets = []
        for stream, value in zip(self.model.streams, half.result, strict=True):
            term = half.term(value)
            if term.name == "e":
                targets.append(Target(stream, term.factor))
                continue
            inner = half.term(half.inputs[term.name], without=term.name)
            if not term.factor.is_one:
                raise NotASumError
            targets.append(
                Target(stream, inner.factor, trunk=self.mark(f"before_layers.join.{term.name}", "embedding"))
            )
        return tuple(targets)

    def _read(self, path: str, read: nn.Module, place: Place) -> tuple[tuple[Source, ...], tuple[Mark, ...], Factor]:
        """Sources, the norm of their sum, and the factor behind it."""
        streams = self._streams()
        half = Half(read, streams, tuple(streams.values()))
        state, z = half.result
        if len(state) != len(streams) or any(a is not b for a, b in zip(state, streams.values(), strict=True)):
            raise NotASumError
        terms = half.terms(z)
        if len(terms) == 1 and terms[0].name in half.inputs:
            norm = terms[0]
            summands = half.terms(half.inputs[norm.name], without=norm.name)
            sources = tuple(self._source(path, half, term, place) for term in summands)
            return sources, (self.mark(f"{path}.{norm.name}", place),), norm.factor
        return tuple(self._source(path, half, term, place) for term in terms), (), ONE

    def _source(self, path: str, half: Half, term: Term, place: Place) -> Source:
        if term.name in self.model.streams:
            return Source(term.name, None, term.factor)
        stream = half.term(half.inputs[term.name], without=term.name)
        if stream.name not in self.model.streams or not stream.factor.is_one:
            raise NotASumError
        return Source(stream.name, self.mark(f"{path}.{term.name}", place), term.factor)

    def _branch(self, layer: int, kind: str, read: tuple[str, nn.Module], join: tuple[str, nn.Module]) -> Branch:
        sources, input_norms, input_factor = self._read(*read, "pre")
        outputs, targets = self._join(*join)
        path = f"layers.{layer}.{kind}"
        return Branch(
            kind=KINDS.get(kind, "other"),
            path=f"layers.*.{kind}",
            sources=sources,
            input_norms=input_norms,
            inner=self.inner(path),
            outputs=outputs,
            targets=targets,
            input_factor=input_factor,
        )

    def inner(self, path: str) -> tuple[Mark, ...]:
        """The norms inside a sublayer."""
        sublayer = self.model.get_submodule(path)
        places: dict[str, Place] = {**INNER, "q_norm": "q", "k_norm": "k"}
        if isinstance(getattr(sublayer, "kv_norm", None), nn.Module):
            places |= {"q_norm": "latent_q", "kv_norm": "latent_kv"}
        names = [name for name in places if getattr(sublayer, name, None) is not None]
        return tuple(self.mark(f"{path}.{name}", places[name]) for name in names)

    def _join(self, path: str, join: nn.Module) -> tuple[tuple[Mark, ...], tuple[Target, ...]]:
        """The norms on the update, and how every stream takes it."""
        streams, update = self._streams(), self._random()
        half = Half(join, {**streams, "o": update}, tuple(streams.values()), update)
        if len(half.result) != len(streams):
            raise NotASumError
        outputs: dict[str, Mark] = {}
        targets = []
        for stream, value in zip(streams, half.result, strict=True):
            terms, trunk = half.terms(value), None
            if len(terms) == 1 and terms[0].name in half.inputs and terms[0].factor.is_one:
                name = terms[0].name
                trunk = self.mark(f"{path}.{name}", "trunk")
                terms = half.terms(half.inputs[name], without=name)
            by_name = {term.name: term.factor for term in terms}
            skip = by_name.pop(stream, None)
            if skip is None or len(by_name) > 1:
                raise NotASumError
            for name in by_name:
                if name in half.inputs:
                    outputs[name] = self.mark(f"{path}.{name}", "output")
            if by_name:
                targets.append(Target(stream, next(iter(by_name.values())), skip, trunk))
        return tuple(outputs.values()), tuple(targets)


def _side_by_side(branch: Branch, block: Any, kind: str, own: _OwnModel) -> list[Branch]:
    """The branches of a parallel block: each adds its own part of the one update."""
    parallel = getattr(block, kind)
    path = next(name for name, module in own.model.named_modules() if module is parallel)
    branches = []
    for i, part in enumerate(parallel.kinds):
        norms = (own.mark(f"{path}.{part}_norm", "pre"),) if parallel.has_norms else branch.input_norms
        branches.append(
            replace(
                branch,
                kind=KINDS.get(part, "other"),
                path=f"layers.*.{kind}.{part}",
                input_norms=norms,
                inner=own.inner(f"{path}.{part}"),
                is_parallel=i > 0,
                shares_input=i > 0 and not parallel.has_norms,
            )
        )
    return branches
