"""Multipliers on the embedding, the residual additions and the logits, and whether the head is tied, in one line."""

from collections.abc import Iterator

from normstream.inspect.inspection import Inspection
from normstream.inspect.report.wiring import Branch, Factor, Wiring

Named = tuple[str, Factor]


def multipliers(inspection: Inspection) -> str:
    """What is multiplied by anything but 1, and, where there is a head, whether it shares the embedding's weights.

    For example ``embedding x 5, residual x 0.22, logits x 0.333, head tied to the embedding``. A stack is named where
    there are several, and so is a stream; a kind of sublayer where the kinds differ.
    """
    several = len(inspection.wiring) > 1
    words = [
        f"{name}{f' of the {wiring.stack}' * several} x {factor}"
        for wiring in inspection.wiring
        for name, factor in _factors(wiring)
        if not factor.is_one
    ]
    if inspection.model.is_tied is not None:
        words.append(f"head {'' if inspection.model.is_tied else 'not '}tied to the embedding")
    return ", ".join(words)


def _factors(wiring: Wiring) -> Iterator[Named]:
    """Every factor by its name, in the order in which a vector meets them."""
    branches = [branch for section in wiring.sections for branch in section.branches]
    yield "embedding", wiring.embedding_factor
    for stream in wiring.streams:
        of = f" (stream {stream})" * (len(wiring.streams) > 1)
        yield f"start{of}", _span([target.factor for target in wiring.start if target.stream == stream])
        yield f"read{of}", _span([s.factor for branch in branches for s in branch.sources if s.stream == stream])
        pairs = [(branch, target) for branch in branches for target in branch.targets if target.stream == stream]
        yield from _by_kind(f"residual{of}", [(branch, target.factor) for branch, target in pairs])
        yield from _by_kind(f"skip{of}", [(branch, target.skip) for branch, target in pairs])
    yield from _by_kind("input", [(branch, branch.input_factor) for branch in branches])
    yield "skip of the layer", _span([section.skip for section in wiring.sections])
    yield "logits", wiring.logit_factor


def _by_kind(name: str, pairs: list[tuple[Branch, Factor]]) -> list[Named]:
    """One factor for all sublayers, or one for each kind."""
    kinds = dict.fromkeys(branch.kind for branch, _ in pairs)
    spans = {kind: _span([factor for branch, factor in pairs if branch.kind == kind]) for kind in kinds}
    if len(set(spans.values())) == 1:
        return [(name, next(iter(spans.values())))]
    return [(f"{kind} {name}", span) for kind, span in spans.items()]


def _span(factors: list[Factor]) -> Factor:
    """From the lowest to the highest; one if there are none."""
    return Factor(min(f.low for f in factors), max(f.high for f in factors)) if factors else Factor()
