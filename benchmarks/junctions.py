"""How fast one junction is: time, bytes moved against a plain copy, bytes kept for the backward pass.

    python -m benchmarks.junctions

Ours against plain torch, against Inductor on the same formula, and on a GPU against Liger-Kernel and QuACK. Every size
and precision is one interleaved comparison, in which the copies take turns with the junctions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import junction_cases as cases
from benchmarks.harness import (
    Case,
    Clock,
    Seconds,
    divided,
    interleave,
    quartiles,
    total,
)
from benchmarks.junction_targets import targets
from benchmarks.machine import copy_cases
from benchmarks.memory import kept_tensors
from benchmarks.results import Result, compact
from benchmarks.settings import Common
from benchmarks.traffic import Dtypes, Shape, shape_of
from normstream.ops import calls, status

PLACEMENTS = (
    *("pre", "post", "peri", "deepnorm", "keel", "residual", "siamese"),
    *("siamese_hybrid_pre", "siamese_hybrid_pre/attention"),
)
FEW = ("pre", "siamese")
SIZES = {"cpu": ("8192x1024", "4096x4096", "2048x384"), "cuda": ("16384x2048", "16384x4096", "32768x1024")}
LEAST_MS = {"cpu": 20.0, "cuda": 2.0}
Precision = Literal["fp32", "bf16", "mixed"]
VariantName = Literal["ours", "eager", "inductor", "liger", "quack"]


@dataclass(frozen=True, kw_only=True)
class Settings(Common):
    """What to measure. The first size is measured with all placements, the others with pre and siamese."""

    threads: int | None = 1
    """Threads of torch on a CPU."""
    rounds: int = 11
    """Samples of each case."""
    least_ms: float | None = None
    """A case that is faster is called several times a round; None takes 20 on a CPU and 2 on a GPU."""
    sizes: tuple[str, ...] | None = None
    """Tokens x width; None takes the defaults of the device."""
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "mixed")
    """mixed: streams in float32, updates and z in bfloat16, as under autocast."""
    placements: tuple[str, ...] = PLACEMENTS
    """name/attention is the junction before an attention, where it differs from that before a feed-forward."""
    variants: tuple[VariantName, ...] = ("ours", "eager", "inductor", "liger", "quack")
    """What to compare."""


class Variant(NamedTuple):
    """One way to run one junction."""

    placement: str
    name: str
    forward: cases.Forward
    parameters: list[nn.Parameter]
    shape: Shape
    inputs: cases.Tensors

    @property
    def key(self) -> str:
        return f"{self.placement} by {self.name}"

    def case(self, dtypes: Dtypes) -> Case:
        """Forward and backward."""
        return cases.case(self.forward, self.inputs, self.parameters, dtypes)


class Comparison(NamedTuple):
    """One size in one precision."""

    rows: int
    dim: int
    precision: str
    device: torch.device

    @property
    def dtypes(self) -> Dtypes:
        return cases.PRECISIONS[self.precision]

    @property
    def size(self) -> str:
        return f"{self.rows}x{self.dim}"

    @property
    def elements(self) -> int:
        return self.rows * self.dim


def main(settings: Settings) -> Path:
    """Measures, prints the figures to reach, writes the result file and returns its path."""
    sizes = settings.sizes or SIZES[settings.resolved_device]
    result = settings.start("junctions", sizes=sizes)
    clock = settings.build_clock(ahead=3.0)
    for size in sizes:
        rows, dim = map(int, size.split("x"))
        placements = settings.placements if size == sizes[0] else [p for p in settings.placements if p in FEW]
        for precision in settings.precisions:
            comparison = Comparison(rows, dim, precision, result.device)
            print(f"{size}, {precision}")
            measure(comparison, placements, settings, clock, result)
            torch._dynamo.reset()
    result.targets = targets(result.rows, result.device)
    return result.write(settings.out)


def measure(
    comparison: Comparison, placements: Sequence[str], settings: Settings, clock: Clock, result: Result
) -> None:
    """Adds one row for each placement and variant, and for each way to copy."""
    inputs = cases.tensors(comparison.dtypes, comparison.rows, comparison.dim, comparison.device)
    variants = [
        variant
        for placement in placements
        for name in settings.variants
        if (variant := build(placement, name, comparison, inputs, result)) is not None
    ]
    like = torch.empty(comparison.rows, comparison.dim, dtype=comparison.dtypes.stream, device=comparison.device)
    copies = copy_cases(like)
    timed = {variant.key: variant.case(comparison.dtypes) for variant in variants}
    least_ms = LEAST_MS[comparison.device.type] if settings.least_ms is None else settings.least_ms
    seconds = interleave(timed | copies, clock, rounds=settings.rounds, least_seconds=least_ms / 1e3)
    copied = 2 * like.nbytes
    rates = [[copied / t for t in seconds[name]["copy"]] for name in copies]
    best_rates = [max(of_round) for of_round in zip(*rates, strict=True)]
    about = {"size": comparison.size, "precision": comparison.precision}
    for name, rate in zip(copies, rates, strict=True):
        speed = quartiles([r / 2**30 for r in rate])
        result.rows.append(
            about | {"variant": name, "gib_per_second": speed, "seconds": compact(seconds[name]["copy"])}
        )
    for variant in variants:
        result.rows.append(about | row(variant, comparison, seconds, best_rates))
        print(line(result.rows[-1]))


def build(
    placement: str, name: VariantName, comparison: Comparison, inputs: cases.Tensors, result: Result
) -> Variant | None:
    """A variant that has run once, or None with the reason noted."""
    of = cases.junction(placement, comparison.dim, comparison.device)
    shape, parameters, dtypes = shape_of(of), list(of.parameters()), comparison.dtypes
    inputs = inputs.of(shape)
    if name in ("liger", "quack"):
        if placement != "pre":
            return None
        why = library_misfit(name, comparison)
        if why is not None:
            result.skip(f"{name}, {comparison.precision}", why)
            return None
        by_library = cases.by_liger if name == "liger" else cases.by_quack
        norm: Any = of.read.norm  # pyright: ignore[reportAttributeAccessIssue]
        return Variant(placement, name, by_library(norm.weight, norm.eps), [norm.weight], shape, inputs)
    if name == "inductor":
        return Variant(placement, name, cases.by_inductor(of, dtypes), parameters, shape, inputs)
    forward = cases.by_backend(of, "auto" if name == "ours" else "plain", dtypes)
    variant = Variant(placement, name, forward, parameters, shape, inputs)
    before = calls.total()
    for phase in variant.case(dtypes).values():
        phase()
    if name == "ours" and calls.total() == before:
        result.skip("ours", f"no fused operation ran ({status()})")
        return None
    return variant


def library_misfit(name: str, comparison: Comparison) -> str | None:
    """Why a library cannot run this, or None."""
    package = {"liger": "liger_kernel", "quack": "quack"}[name]
    try:
        __import__(package)
    except ImportError:
        return f"{package} is not installed"
    if comparison.device.type != "cuda":
        return f"{package} has kernels for GPUs only"
    if name == "liger" and comparison.precision == "mixed":
        return "its stream has the dtype of the update"
    return None


def row(variant: Variant, comparison: Comparison, seconds: Seconds, rates: list[float]) -> dict[str, Any]:
    """What is said of one variant; ``rates`` is the best copy rate of each round, in bytes a second."""
    own, shape, dtypes = seconds[variant.key], variant.shape, comparison.dtypes
    moved = {"forward": shape.forward, "backward": shape.backward(dtypes.update == dtypes.stream)}
    least = {phase: traffic.nbytes(dtypes, comparison.elements) for phase, traffic in moved.items()}
    times = own | {"both": total(own)}
    least_of = least | {"both": sum(least.values())}
    fractions = {phase: [least_of[phase] / t / r for t, r in zip(times[phase], rates, strict=True)] for phase in times}
    others = {"inductor": f"{variant.placement} by inductor", "pre": f"pre by {variant.name}"}
    return {
        "placement": variant.placement,
        "variant": variant.name,
        "ms": {phase: quartiles([1e3 * t for t in values]) for phase, values in times.items()},
        "units": {phase: traffic.units for phase, traffic in moved.items()},
        "least_bytes": least,
        "of_copy_rate": {phase: quartiles(values) for phase, values in fractions.items()},
        **{
            f"to_{name}": quartiles(divided(times["both"], total(seconds[key])))
            for name, key in others.items()
            if key in seconds
        },
        **kept(variant, comparison),
        **kernels(variant, comparison),
        "seconds": {phase: compact(values) for phase, values in own.items()},
        "fractions": {phase: compact(values) for phase, values in fractions.items()},
    }


def kept(variant: Variant, comparison: Comparison) -> dict[str, int]:
    """Bytes kept for backward besides z and the parameters, and the least that there can be."""
    shape = variant.shape
    with kept_tensors() as tensors:
        outputs = cases.outputs(variant.forward, variant.inputs, comparison.dtypes)
    z = outputs[shape.n_streams :]
    return {
        "kept_bytes": tensors.nbytes(without=[*variant.parameters, *z]),
        "least_kept_bytes": shape.kept_bytes(comparison.dtypes, comparison.elements, comparison.rows),
    }


def kernels(variant: Variant, comparison: Comparison) -> dict[str, dict[str, int]]:
    """How many kernels each direction launches on a GPU; nothing on a CPU."""
    if comparison.device.type != "cuda":
        return {}
    counts = {}
    for name, phase in variant.case(comparison.dtypes).items():
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            phase()
            torch.cuda.synchronize()
        on_gpu = [event.name for event in seen.events() or () if event.device_type == DeviceType.CUDA]
        counts[name] = sum(not name.startswith(("Memcpy", "Memset")) for name in on_gpu)
    return {"kernels": counts}


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    ms, fraction = row["ms"]["both"].median, row["of_copy_rate"]["both"].median
    against = f", {row['to_inductor'].median:.2f} of Inductor's time" if "to_inductor" in row else ""
    name = f"{row['placement']} by {row['variant']}"
    return f"  {name:<42} {ms:8.2f} ms, {fraction:.2f} of the copy rate{against}"


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
