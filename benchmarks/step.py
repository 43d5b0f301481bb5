"""How fast a training step is: time, tokens, share of the machine's own rate of matrix products, memory.

    python -m benchmarks.step

Our models, eager and compiled, with our operations and without them, take turns with those of other libraries of the
same size on the same data: forward, backward, clipping and fused AdamW.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor

from benchmarks import models
from benchmarks.harness import Clock, Seconds, divided, interleave, quartiles, total
from benchmarks.machine import gemm_cases
from benchmarks.models import Trainee, n_parameters
from benchmarks.results import Result, compact
from benchmarks.settings import Common
from benchmarks.shapes import SHAPES, ModelShape
from benchmarks.step_targets import targets
from benchmarks.training_step import Step, batches
from normstream.ops import calls, status

PEERS = {"llama": models.llama, "x-transformers": models.x_transformers, "litgpt": models.litgpt}
REFERENCE = "pre/ops/compiled"
OURS = (
    *("pre/ops/eager", "pre/plain/eager", REFERENCE, "pre/plain/compiled"),
    *("siamese/ops/eager", "siamese/plain/eager", "siamese/ops/compiled", "siamese/plain/compiled"),
    *("siamese_hybrid_pre/ops/eager", "siamese_hybrid_pre/ops/compiled", "post/ops/compiled"),
    *("pre/ops/whole", "siamese/ops/whole", "siamese/rebuilt/eager"),
)
THEIRS = ("official/eager", *(f"{peer}/{mode}" for peer in PEERS for mode in ("eager", "compiled")))
GEMM_SIZES = {"cpu": (1024, 1536, 2048), "cuda": (4096, 8192)}


@dataclass(frozen=True, kw_only=True)
class Settings(Common):
    """What to measure."""

    rounds: int = 9
    """Steps of each variant that are measured."""
    size: str = "small"
    """tiny, small (width 384), 400m (1024), 1.3b (2048), wide (4096)."""
    precisions: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    """bf16 is autocast with parameters in float32."""
    variants: tuple[str, ...] = ("*",)
    """Patterns of names such as siamese/ops/compiled or llama/eager."""


def main(settings: Settings) -> Path:
    """Measures, prints the figures to reach, writes the result file and returns its path."""
    shape = SHAPES[settings.size]
    suffix = "" if settings.size == "small" else f"-{settings.size}"
    result = settings.start(f"step{suffix}", shape=asdict(shape))
    clock = settings.build_clock()
    for precision in settings.precisions:
        print(precision)
        measure(shape, precision, settings, clock, result)
        torch._dynamo.reset()
    result.targets = targets(result.rows, result.device, shape)
    return result.write(settings.out)


def measure(shape: ModelShape, precision: str, settings: Settings, clock: Clock, result: Result) -> None:
    """Adds one row for each variant that runs."""
    data = batches(shape, result.device)
    chosen = [name for name in (*OURS, *THEIRS) if any(fnmatch(name, pattern) for pattern in settings.variants)]
    steps = {name: step for name in chosen if (step := prepare(name, shape, data, precision, result)) is not None}
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    sizes = GEMM_SIZES[result.device.type] if shape.dim > 64 else (64,)
    products = gemm_cases(sizes, dtype, result.device)
    timed = {name: step.case for name, step in steps.items()}
    seconds = interleave(timed | products, clock, rounds=settings.rounds, warm_up=1)
    rates = [[2 * size**3 / t for t in seconds[f"product of {size}"]["product"]] for size in sizes]
    best = [max(of_round) for of_round in zip(*rates, strict=True)]
    for size, rate in zip(sizes, rates, strict=True):
        speed = {"gflops": quartiles([r / 1e9 for r in rate]), "seconds": seconds[f"product of {size}"]}
        result.rows.append({"precision": precision, "variant": f"product of {size}"} | speed)
    for name, step in steps.items():
        result.rows.append(row(name, step, shape, seconds, best))
        print(line(result.rows[-1]))


def prepare(name: str, shape: ModelShape, data: Sequence[Tensor], precision: str, result: Result) -> Step | None:
    """The variant after its first steps, compiled and with its optimizer's state; None with the reason noted."""
    print(f"  preparing {name}")
    try:
        trainee = build(name, shape)
    except ImportError as error:
        result.skip(name, f"{name.split('/')[0]} cannot be imported here ({error})")
        return None
    check_size(name, trainee, shape)
    step = Step(trainee, data, precision)
    for _ in range(2):
        before = calls.total()
        for phase in step.case.values():
            phase()
        step.fused_calls = calls.total() - before
    if name.endswith(("/ops/eager", "/rebuilt/eager")) and not step.fused_calls:
        result.skip(name, f"no fused operation ran ({status()})")
        return None
    return step


def build(name: str, shape: ModelShape) -> Trainee:
    """The model of ``placement/how/mode`` (see ``models.ours``), of ``official/eager`` or of ``library/mode``."""
    first, *backend, mode = name.split("/")
    if backend:
        return models.ours(shape, first, backend[0], mode)
    if first == "official":
        return models.official(shape)
    peer: Callable[..., Trainee] = PEERS[first]
    return peer(shape, compiled=mode == "compiled")


def check_size(name: str, trainee: Trainee, shape: ModelShape) -> None:
    """Raises ValueError unless the model has as many parameters as Pre-Norm, within one percent."""
    norms = (2 * shape.n_layers + 1) * shape.dim
    expected = shape.matrix_parameters + shape.vocab_size * shape.dim + norms
    found = n_parameters(trainee.module)
    if shape.dim > 64 and abs(found / expected - 1) > 0.01:
        raise ValueError(f"{name} has {found:,} parameters, not {expected:,}")


def row(name: str, step: Step, shape: ModelShape, seconds: Seconds, gemm_rates: list[float]) -> dict[str, Any]:
    """What is said of one variant; ``gemm_rates`` is the best of each round, in operations a second."""
    own = seconds[name]
    whole = total(own)
    shares = [shape.step_flops / t / rate for t, rate in zip(whole, gemm_rates, strict=True)]
    times: Mapping[str, Sequence[float]] = own | {"step": whole}
    against = divided(whole, total(seconds[REFERENCE])) if REFERENCE in seconds else []
    return {
        "precision": step.precision,
        "variant": name,
        "parameters": n_parameters(step.module),
        "fused_calls": step.fused_calls,
        "ms": {phase: quartiles([1e3 * t for t in values]) for phase, values in times.items()},
        "tokens_per_second": quartiles([shape.tokens / t for t in whole]),
        "mfu": quartiles(shares),
        **({"to_reference": quartiles(against)} if against else {}),
        **step.memory()._asdict(),
        "seconds": {phase: compact(values) for phase, values in own.items()},
        "shares": compact(shares),
    }


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    against = f", {row['to_reference']} of {REFERENCE}" if "to_reference" in row else ""
    return (
        f"  {row['variant']:<32} {row['ms']['step'].median:8.1f} ms, MFU {row['mfu'].median:.2f}, "
        f"{row['kept_bytes'] / 2**20:.0f} MiB kept{against}"
    )


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
