"""What a wiring diagram shows: the residual streams and, for every kind of layer, its branches with all their norms.

``report.diagram`` draws it. ``wirings(anatomy)`` makes it of a probed model; those of normstream's own models, whose
streams may be several, are made in ``report.own_wiring``.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from normstream.inspect.anatomy import (
    Anatomy,
    Call,
    LayerSite,
    NormFacts,
    NormSite,
    Place,
    StackAnatomy,
    Sublayer,
    SublayerKind,
)
from normstream.inspect.paths import pattern, site_path

INSIDE: tuple[Place, ...] = ("q", "k", "v", "latent_q", "latent_kv", "sub", "context", "no_effect")
"""Places of norms that are drawn inside the sublayer."""
ENDS: tuple[Place, ...] = ("embedding", "final", "head")
"""Places of norms that are drawn before and behind the layers."""


@dataclass(frozen=True)
class Factor:
    """What something is multiplied by: one number, or one for each layer or channel between ``low`` and ``high``.

    >>> str(Factor(0.22, 0.22)), str(Factor(0.5, 1.0)), Factor().is_one
    ('0.22', '0.5 to 1', True)
    """

    low: float = 1.0
    high: float = 1.0

    @property
    def is_one(self) -> bool:
        return self.low == self.high == 1

    def __str__(self) -> str:
        return f"{self.low:.3g}" if self.low == self.high else f"{self.low:.3g} to {self.high:.3g}"


ONE = Factor()


def measured(value: float) -> Factor:
    """A factor that a probe has measured, with the digits that it is good for.

    >>> measured(1.0000119), measured(0.2200004)
    (Factor(low=1.0, high=1.0), Factor(low=0.22, high=0.22))
    """
    rounded = float(f"{value:.4g}")
    return ONE if abs(value - 1) < 2e-4 else Factor(rounded, rounded)


@dataclass(frozen=True)
class Mark:
    """A norm in the drawing; it stands for those of all layers of a section."""

    place: Place
    path: str
    """The module's path with * for the layer's index."""
    scope: Literal["stream", "per_head", "flattened", "latent"]
    facts: NormFacts


@dataclass(frozen=True)
class Source:
    """A stream that an input is made of: ``factor * norm(stream)``."""

    stream: str
    norm: Mark | None = None
    factor: Factor = ONE


@dataclass(frozen=True)
class Target:
    """How a stream takes an update: ``trunk(skip * stream + factor * update)``."""

    stream: str
    factor: Factor = ONE
    skip: Factor = ONE
    trunk: Mark | None = None


@dataclass(frozen=True)
class Branch:
    """One sublayer: the sum of its sources, normed, goes in; what comes out, normed, goes to its targets."""

    kind: SublayerKind
    path: str
    """The module's path with * for the layer's index."""
    sources: tuple[Source, ...]
    input_norms: tuple[Mark, ...]
    """On the sum of the sources; several stand beside each other, for different readers."""
    inner: tuple[Mark, ...]
    outputs: tuple[Mark, ...]
    """One behind the other."""
    targets: tuple[Target, ...]
    input_factor: Factor = ONE
    """Between the last input norm and the sublayer."""
    is_parallel: bool = False
    """Whether it reads the streams where the branch before it does."""
    shares_input: bool = False
    """Whether it reads behind the same norm as the branch before it."""


@dataclass(frozen=True)
class Section:
    """Layers that are wired alike."""

    layers: tuple[int, ...]
    path: str
    """The layer's path with * for its index."""
    is_shared: bool
    """Whether the same modules run for several layers."""
    skip: Factor
    """Gain of a stream through the whole layer, where the branches do not say at which add."""
    branches: tuple[Branch, ...]
    elsewhere: tuple[Mark, ...] = ()
    """Norms of these layers that have no place in the drawing."""


@dataclass(frozen=True)
class Wiring:
    """One stack of layers, from the embeddings to the head."""

    stack: str
    streams: tuple[str, ...]
    n_layers: int
    embeddings: tuple[str, ...]
    """Paths of the modules that the streams start from."""
    embedding_factor: Factor
    start: tuple[Target, ...]
    """How every stream takes the embedding."""
    sections: tuple[Section, ...]
    sources: tuple[Source, ...]
    """Of the final hidden vector."""
    final_norms: tuple[Mark, ...]
    head: str | None
    before_head: tuple[str, ...] = ()
    """Paths of matrices between the final hidden vector and the norms before the head."""
    head_norms: tuple[Mark, ...] = ()
    """Behind those matrices."""
    is_tied: bool = False
    logit_factor: Factor = ONE
    feeds_cross: bool = False
    """Whether another stack reads the result."""
    elsewhere: tuple[Mark, ...] = ()
    """Norms outside the layers that have no place in the drawing."""


def wirings(anatomy: Anatomy) -> tuple[Wiring, ...]:
    """The wiring of every stack of a probed model that has layers; those that are wired alike are put together."""
    last = anatomy.stacks[-1] if anatomy.stacks else None
    return tuple(_wiring(anatomy, stack, is_last=stack is last) for stack in anatomy.stacks if stack.layers)


def _wiring(anatomy: Anatomy, stack: StackAnatomy, is_last: bool) -> Wiring:
    outside = [site for site in stack.norms if site.layer is None or site.place in ENDS]
    embedding = [mark(site, stack) for site in outside if site.place == "embedding"]
    logits = anatomy.logit_multiplier if is_last else None
    head_norms = tuple(mark(site, stack) for site in outside if site.place == "head")
    return Wiring(
        stack=stack.name,
        streams=("x",),
        n_layers=len(stack.layers),
        embeddings=tuple(dict.fromkeys(call.path for call in stack.embeddings)),
        embedding_factor=measured(stack.embedding_multiplier),
        start=(Target("x", trunk=embedding[0] if embedding else None),),
        sections=gather([_section(stack, layer) for layer in stack.layers]),
        sources=(Source("x"),),
        final_norms=tuple(mark(site, stack) for site in outside if site.place == "final"),
        head=anatomy.head.path if anatomy.head and is_last else None,
        before_head=tuple(dict.fromkeys(call.path for call in stack.end_readers)) if head_norms else (),
        head_norms=head_norms,
        is_tied=anatomy.is_tied,
        logit_factor=ONE if logits is None else measured(logits),
        feeds_cross=not is_last,
        elsewhere=(*embedding[1:], *(mark(site, stack) for site in outside if site.place not in ENDS)),
    )


def _section(stack: StackAnatomy, layer: LayerSite) -> Section:
    sites = [site for site in stack.norms if site.layer == layer.index and site.place not in ENDS]
    branches, drawn = [], set()
    for before, sublayer in zip((None, *layer.sublayers), layer.sublayers, strict=False):
        own = _own_sites(sublayer, sites)
        drawn |= {site.call for group in own.values() for site in group}
        marks = {where: tuple(mark(site, stack) for site in found) for where, found in own.items()}
        branches.append(_branch(sublayer, before, marks, pattern(sublayer.output.path, layer.call.path)))
    elsewhere = tuple(mark(site, stack) for site in sites if site.call not in drawn)
    is_shared = any(other.call.path == layer.call.path for other in stack.layers if other is not layer)
    rest = layer.skip / math.prod(sublayer.skip for sublayer in layer.sublayers)
    path = pattern(layer.call.path, layer.call.path)
    return Section((layer.index,), path, is_shared, measured(rest), tuple(branches), elsewhere)


def _own_sites(sublayer: Sublayer, sites: Iterable[NormSite]) -> dict[str, list[NormSite]]:
    """The norms of a sublayer, by where they are drawn."""
    own: dict[str, list[NormSite]] = {"pre": [], "inside": [], "output": [], "trunk": []}
    for site in sites:
        if site.call == sublayer.trunk_norm:
            own["trunk"].append(site)
        elif sublayer.name in site.sublayers and site.place in ("pre", "output"):
            own[site.place].append(site)
        elif sublayer.name in site.sublayers and site.place in INSIDE:
            own["inside"].append(site)
    return own


def _branch(sublayer: Sublayer, before: Sublayer | None, marks: dict[str, tuple[Mark, ...]], path: str) -> Branch:
    is_parallel = before is not None and sublayer.name in before.parallel_to
    shares_input = before is not None and is_parallel and _same(sublayer.pre_norm, before.pre_norm)
    return Branch(
        kind=sublayer.kind,
        path=path,
        sources=(Source("x"),),
        input_norms=marks["pre"],
        inner=marks["inside"],
        outputs=marks["output"],
        targets=(
            Target("x", measured(sublayer.multiplier), measured(sublayer.skip), next(iter(marks["trunk"]), None)),
        ),
        is_parallel=is_parallel,
        shares_input=shares_input,
    )


def _same(one: Call | None, other: Call | None) -> bool:
    return one is not None and one == other


def mark(site: NormSite, stack: StackAnatomy) -> Mark:
    """The norm at a site, as it is drawn."""
    path = site_path(site, stack)
    return Mark(site.place, path, site.scope, replace(site.facts, path=path))


def gather(sections: Sequence[Section]) -> tuple[Section, ...]:
    """Sections of layers that are wired alike, in the order of their first layers; factors become ranges."""
    alike: dict[Section, list[Section]] = {}
    for section in sections:
        alike.setdefault(_plain(replace(section, layers=())), []).append(section)
    return tuple(
        replace(_merged(group), layers=tuple(layer for section in group for layer in section.layers))
        for group in alike.values()
    )


def _plain(value: Any) -> Any:
    """A value without what may differ between layers that are wired alike: factors, names, eps and casts of norms."""
    if isinstance(value, Factor):
        return ONE
    if isinstance(value, NormFacts):
        return replace(value, path="", eps=None, cast="unknown")
    if isinstance(value, Mark):
        value = replace(value, path="")
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _plain(getattr(value, field.name)) for field in fields(value)})
    return value


def _merged(values: Sequence[Any]) -> Any:
    """One value for several that are wired alike: every factor from the lowest to the highest, the rest the first's."""
    first = values[0]
    if isinstance(first, Factor):
        return Factor(min(factor.low for factor in values), max(factor.high for factor in values))
    if isinstance(first, tuple):
        return tuple(_merged(same) for same in zip(*values, strict=False))
    if is_dataclass(first) and not isinstance(first, type | NormFacts):
        names = [field.name for field in fields(first)]
        return replace(first, **{name: _merged([getattr(value, name) for value in values]) for name in names})
    return first


def marks(wiring: Wiring) -> list[tuple[Mark, Branch | None, tuple[int, ...]]]:
    """Every norm of a wiring in the order of the drawing, with its branch and the layers that it is in."""
    found: list[tuple[Mark, Branch | None, tuple[int, ...]]] = []
    found += [(target.trunk, None, ()) for target in wiring.start if target.trunk]
    for section in wiring.sections:
        for branch in section.branches:
            own = [*(source.norm for source in branch.sources), *branch.input_norms, *branch.inner, *branch.outputs]
            own += [target.trunk for target in branch.targets]
            found += [(one, branch, section.layers) for one in own if one]
        found += [(one, None, section.layers) for one in section.elsewhere]
    found += [(source.norm, None, ()) for source in wiring.sources if source.norm]
    return found + [(one, None, ()) for one in (*wiring.final_norms, *wiring.head_norms, *wiring.elsewhere)]


def normed_streams(wirings: Iterable[Wiring]) -> set[tuple[str, str]]:
    """Stack and name of every stream that has a norm on it in some layer: it goes on with the norm's output."""
    return {
        (wiring.stack, target.stream)
        for wiring in wirings
        for section in wiring.sections
        for branch in section.branches
        for target in branch.targets
        if target.trunk
    }


def ranges(numbers: Sequence[int]) -> str:
    """Layer indices in words.

    >>> ranges([0, 1, 2, 5]), ranges([0, 2, 4, 6, 8]), ranges([3])
    ('0 to 2, 5', '0, 2 ... 8', '3')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    steps = {b - a for a, b in pairwise(numbers)}
    if len(runs) > 3 and len(steps) == 1:
        return f"{numbers[0]}, {numbers[1]} ... {numbers[-1]}"
    said = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(said if len(said) <= 6 else [*said[:4], "...", said[-1]])
