"""The figures that the junctions have to reach, from the rows of a result."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.harness import divided, total
from benchmarks.results import Target

Row = Mapping[str, Any]
HEADLINE = ("8192x1024", "fp32")
"""The CPU's figures are for this size and precision."""


def targets(rows: Sequence[Row], device: torch.device) -> list[Target]:
    """On a CPU those of one size; on a GPU for every precision at 16k rows or more and a width of 2048 or more."""
    if device.type == "cuda":
        wide = {(r["size"], r["precision"]) for r in rows if _is_wide(r["size"])}
        return [target for at in sorted(wide) for target in at_size(rows, *at, on_gpu=True)]
    return list(at_size(rows, *HEADLINE, on_gpu=False))


def at_size(rows: Sequence[Row], size: str, precision: str, *, on_gpu: bool) -> Iterator[Target]:
    """All figures at one size and precision."""
    found = {
        (row["placement"], row["variant"]): row
        for row in rows
        if (row["size"], row["precision"]) == (size, precision) and "placement" in row
    }
    where = f"{size}, {precision}"
    ours, one_stream = found.get(("siamese", "ours")), found.get(("pre", "ours"))
    inductor = found.get(("siamese", "inductor"))
    floors = {"forward": 0.90, "backward": 0.85} if on_gpu else {"both": 0.45}
    for phase, floor in floors.items():
        words = "forward + backward" if phase == "both" else phase
        values = ours["fractions"][phase] if ours else ()
        yield _target(f"SiameseNorm junction, of the copy rate, {words} ({where})", floor, True, values)
    yield _ratio(f"SiameseNorm junction / Inductor on its formula ({where})", 0.75 if on_gpu else 0.6, ours, inductor)
    yield _ratio(f"SiameseNorm junction / our Pre-Norm junction ({where})", 1.95, ours, one_stream)
    yield from _against_others(found, where, on_gpu)
    for placement in ("siamese", "pre"):
        row = found.get((placement, "ours"))
        label = f"`{placement}`, bytes kept / (units + numbers of the form) ({where})"
        yield _target(label, 1.0, False, [row["kept_bytes"] / row["least_kept_bytes"]] if row else ())
    if on_gpu:
        for phase, most in {"forward": 1, "backward": 2}.items():
            values = [ours["kernels"][phase]] if ours else ()
            yield _target(f"kernels of a SiameseNorm junction, {phase} ({where})", most, False, values)


def _against_others(found: Mapping[tuple[str, str], Row], where: str, on_gpu: bool) -> Iterator[Target]:
    """Our Pre-Norm junction against the best other (CPU), or against each (GPU)."""
    ours = found.get(("pre", "ours"))
    others = [row for name in ("liger", "quack", "inductor") if (row := found.get(("pre", name)))]
    if on_gpu:
        for row in others:
            yield _ratio(f"Pre-Norm junction / {row['variant']} ({where})", 1.0, ours, row)
        return
    best = [min(of_round) for of_round in zip(*(total(row["seconds"]) for row in others), strict=True)]
    names = ", ".join(row["variant"] for row in others)
    values = divided(total(ours["seconds"]), best) if ours and best else ()
    yield _target(f"Pre-Norm junction / best of {names or 'others'} ({where})", 1.0, False, values)


def _ratio(label: str, limit: float, above: Row | None, below: Row | None) -> Target:
    values = divided(total(above["seconds"]), total(below["seconds"])) if above and below else ()
    return _target(label, limit, False, values)


def _target(label: str, limit: float, at_least: bool, values: Sequence[float]) -> Target:
    reason = "" if values else "not run here, or not at this size and precision"
    return Target(label, limit, at_least, tuple(values), reason)


def _is_wide(size: str) -> bool:
    rows, width = map(int, size.split("x"))
    return rows >= 16_384 and width >= 2048
