"""How time and memory of a training step grow with depth, width, length and vocabulary.

    python -m benchmarks.scaling

One size is varied at a time; ``y = factor x^exponent`` is fitted to each row of points by least squares between the
logarithms. Parts that do not grow (the embedding while depth grows, say) pull an exponent down at small sizes, so the
one between the last two points is reported too.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro

from benchmarks import models
from benchmarks.harness import Clock, Seconds, interleave, quartiles, total
from benchmarks.results import Result, compact
from benchmarks.settings import Common
from benchmarks.shapes import ModelShape
from benchmarks.training_step import Step, batches

Axis = Literal["n_layers", "dim", "seq_len", "vocab_size"]
HEAD_DIM = 64
BASE = {
    "cpu": ModelShape(dim=128, n_layers=6, n_heads=2, ffn_dim=352, vocab_size=512, seq_len=256, batch=1),
    "cuda": ModelShape(dim=1024, n_layers=12, n_heads=16, ffn_dim=2752, vocab_size=32_000, seq_len=1024, batch=4),
}
POINTS: dict[Axis, dict[str, tuple[int, ...]]] = {
    "n_layers": {"cpu": (6, 12, 24, 48, 96), "cuda": (6, 12, 24, 48, 96)},
    "dim": {"cpu": (64, 128, 256, 512, 1024), "cuda": (512, 1024, 2048, 3072)},
    "seq_len": {"cpu": (256, 512, 1024, 2048, 4096, 8192), "cuda": (256, 512, 1024, 2048, 4096, 8192)},
    "vocab_size": {"cpu": (512, 2048, 8192, 32_768), "cuda": (8192, 32_768, 131_072)},
}
"""The sizes on a CPU are small, so that the whole takes under six minutes on two cores; results name every point."""


@dataclass(frozen=True, kw_only=True)
class Settings(Common):
    """What to measure."""

    rounds: int = 7
    """Steps of each point that are measured."""
    placements: tuple[str, ...] = ("pre", "siamese")
    """With our operations, eager."""
    axes: tuple[Axis, ...] = ("n_layers", "dim", "seq_len", "vocab_size")
    """What is varied."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 is autocast."""
    largest: int | None = None
    """Leave out points above it."""


class Fit(NamedTuple):
    """``y = factor x^exponent``."""

    exponent: float
    factor: float
    residual: float
    """Root mean square of ln(y) - ln(fitted y): 0.05 is about 5 percent."""
    last: float
    """The exponent between the last two points alone."""


def fit(xs: Sequence[float], ys: Sequence[float]) -> Fit:
    """Least squares between the logarithms.

    Raises:
        ValueError: for fewer than two points, or numbers that are not positive.

    >>> fit([1, 2, 4], [3, 12, 48])
    Fit(exponent=2.0, factor=3.0, residual=0.0, last=2.0)
    """
    if len(xs) < 2 or min(*xs, *ys) <= 0:
        raise ValueError("a fit needs two points or more, all of them positive")
    a, b = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mean_a, mean_b = math.fsum(a) / len(a), math.fsum(b) / len(b)
    slope = math.fsum((p - mean_a) * (q - mean_b) for p, q in zip(a, b, strict=True))
    slope /= math.fsum((p - mean_a) ** 2 for p in a)
    errors = [q - mean_b - slope * (p - mean_a) for p, q in zip(a, b, strict=True)]
    residual = math.sqrt(math.fsum(e * e for e in errors) / len(errors))
    last = (b[-1] - b[-2]) / (a[-1] - a[-2])
    return Fit(*(round(value, 6) for value in (slope, math.exp(mean_b - slope * mean_a), residual, last)))


def main(settings: Settings) -> Path:
    """Measures, prints the exponents, writes the result file and returns its path."""
    result = settings.start("scaling", base=asdict(BASE[settings.resolved_device]))
    clock = settings.build_clock()
    for axis in settings.axes:
        measure(axis, settings, clock, result)
    return result.write(settings.out)


def shapes(axis: Axis, device: str, largest: int | None = None) -> Iterator[tuple[int, ModelShape]]:
    """The points of an axis; with the width grow the heads in number and the feed-forward.

    >>> [(point, shape.n_heads, shape.ffn_dim) for point, shape in shapes("dim", "cpu", largest=128)]
    [(64, 1, 192), (128, 2, 352)]
    """
    base = BASE[device]
    for point in POINTS[axis][device]:
        if largest is not None and point > largest:
            continue
        if axis == "dim":
            ffn_dim = -(-8 * point // 96) * 32
            yield point, replace(base, dim=point, n_heads=point // HEAD_DIM, ffn_dim=ffn_dim)
        else:
            yield point, replace(base, **{axis: point})


def measure(axis: Axis, settings: Settings, clock: Clock, result: Result) -> None:
    """Adds a row for each placement: its points and the exponents of time and memory."""
    points = dict(shapes(axis, result.device.type, settings.largest))
    steps: dict[tuple[str, int], Step] = {}
    for point, shape in points.items():
        data = batches(shape, result.device, count=1)
        for placement in settings.placements:
            trainee = models.ours(shape, placement, "ops")
            steps[placement, point] = Step(trainee, data, settings.precision)
    timed = {f"{placement} {point}": step.case for (placement, point), step in steps.items()}
    seconds = interleave(timed, clock, rounds=settings.rounds, warm_up=1)
    for placement in settings.placements:
        own = {point: steps[placement, point] for point in points}
        result.rows.append({"axis": axis, "placement": placement} | curves(placement, own, points, seconds))
        print(line(result.rows[-1]))


def curves(
    placement: str, steps: Mapping[int, Step], points: Mapping[int, ModelShape], seconds: Seconds
) -> dict[str, Any]:
    """All points of one placement along one axis, and what is fitted to them."""
    rows = []
    for point, step in steps.items():
        whole, memory = total(seconds[f"{placement} {point}"]), step.memory()
        row = {"point": point, "shape": asdict(points[point]), "ms": quartiles([1e3 * t for t in whole])}
        rows.append(row | memory._asdict() | {"seconds": compact(whole)})
    xs = [row["point"] for row in rows]
    measured = {
        "time": [row["ms"].median for row in rows],
        "kept_bytes": [row["kept_bytes"] for row in rows],
        "peak_bytes": [row["peak_bytes"] for row in rows],
    }
    fits = {name: fit(xs, ys)._asdict() for name, ys in measured.items() if None not in ys and len(xs) > 1}
    return {"points": rows, "fits": fits}


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    said = [
        f"{name} ~ {row['axis']}^{found['exponent']:.2f} "
        f"(residual {found['residual']:.2f}, at the end {found['last']:.2f})"
        for name, found in row["fits"].items()
    ]
    return f"  {row['placement']:<10} " + "; ".join(said)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
