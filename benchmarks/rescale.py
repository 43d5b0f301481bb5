"""Rescaling under stress: models whose residual stream reaches 2.5e5, four times what fp16 holds.

    python -m benchmarks.rescale

Each model is a tiny random one of its family with the eps that its class has by default, small embeddings (std 0.02, as
models are initialized); what its second layer writes is scaled up until max |h| is 2.5e5, as the massive activations of
trained models come out of one early layer. It is then rescaled by 2^6. Errors are largest
differences of the logits over the largest logit, against the original in float64.

Writes ``benchmarks/results/rescale.json``.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import nn

from benchmarks.machine import commit, versions
from benchmarks.results import RESULTS
from benchmarks.tiny_models import tiny_model
from normstream.checkpoints.precise import difference, exact_answer
from normstream.checkpoints.rebuild import eps_of_config, rebuild
from normstream.checkpoints.rescaling.changes import Scaling
from normstream.checkpoints.rescaling.check import run_in, stream_peaks
from normstream.checkpoints.rescaling.plan import Planner
from normstream.checkpoints.rescaling.report import RescaleReport
from normstream.checkpoints.rescaling.rescale import apply, rescale
from normstream.inspect.anatomy import Anatomy
from normstream.inspect.inputs import make_inputs
from normstream.inspect.probing.norm_facts import find_norms
from normstream.inspect.probing.probe import anatomy_of
from normstream.training.files import write_json

TEN = ("llama", "qwen3", "gemma2", "gemma3_text", "glm4", "olmo2", "gpt2", "deepseek_v3", "phi", "cohere2")
MORE = ("granite", "t5", "mixtral", "gpt_neox", "vit", "bert")
PEAK = 2.5e5
K = 6
EMBEDDING_STD = 0.02
PUSHED_LAYER = 1
MOST_PUSHES = 30


@dataclass(frozen=True)
class Row:
    """One family."""

    family: str
    peak_before: float
    peak_after: float
    error_fp64: float
    is_bit_equal_fp32: bool
    error_eps_left_alone: float
    """In float64, with everything but eps rescaled."""
    is_finite_fp16_before: bool
    is_finite_fp16_after: bool
    error_fp16_after: float | None
    error_fp16_fp32_gains: float | None
    """With the zero-centred gains in float32; None where there are none."""
    error_bf16_before: float | None
    method: str
    still_too_large: tuple[str, ...]
    """Values inside branches that are above 65,504 and cannot be split."""


@dataclass(frozen=True)
class Settings:
    """Which families, and where the result goes."""

    families: Annotated[tuple[str, ...], tyro.conf.arg(help="Model types of transformers.")] = TEN + MORE
    out: Path = RESULTS / "rescale.json"


def pushed(family: str, peak: float = PEAK, seed: int = 0) -> tuple[nn.Module, dict[str, Any], Anatomy]:
    """A tiny model whose second layer writes so much that the stream reaches ``peak``, its inputs and its anatomy."""
    model = tiny_model(family, seed)
    inputs = make_inputs(model, n_tokens=13)
    defaults = type(model.config)()  # type: ignore[operator]
    eps = eps_of_config(model, inputs, find_norms(model, inputs))
    model = rebuild(model, {key: getattr(defaults, key) for key in eps})
    anatomy = anatomy_of(model, inputs)
    with torch.no_grad():
        for table in {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}:
            table.mul_(EMBEDDING_STD / table.std())
    plan = Planner(model, inputs, anatomy, 1, frozenset()).plan()
    layers = tuple(f"{stack.layers[PUSHED_LAYER].call.path}." for stack in anatomy.stacks)
    writers = [
        scaling for scaling in plan.scalings if scaling.role == "writer" and scaling.parameter.startswith(layers)
    ]
    for _ in range(MOST_PUSHES):
        reached = max(stream_peaks(model, inputs, anatomy).values())
        if math.isclose(reached, peak, rel_tol=1e-4):
            return model, inputs, anatomy
        multiply(model, writers, peak / reached)
    raise ArithmeticError(f"the stream of {family} could not be pushed to {peak:g}")


@torch.no_grad()
def multiply(model: nn.Module, writers: Sequence[Scaling], factor: float) -> None:
    """Multiplies what the sublayers write to the stream, in place."""
    for scaling in writers:
        parameter = model.get_parameter(scaling.parameter)
        one = 1.0 if scaling.is_zero_centred else 0.0
        parameter.copy_((one + parameter) * factor - one)


def measure(family: str) -> Row:
    """Rescales one family."""
    model, inputs, anatomy = pushed(family)
    result = rescale(model, inputs, k=K, anatomy=anatomy)
    reference = exact_answer(model, inputs)
    alone = apply(model, Planner(model, inputs, anatomy, K, frozenset()).plan())
    bf16 = run_in(model, torch.bfloat16, inputs, anatomy, reference)
    eps_left_alone = difference(exact_answer(alone, inputs), reference)
    return row(family, result.report, eps_left_alone, bf16.error)


def row(family: str, report: RescaleReport, eps_left_alone: float, bf16: float | None) -> Row:
    """What the table says about one report."""
    gains = report.fp16_fp32_gains
    return Row(
        family=family,
        peak_before=report.peak_before,
        peak_after=report.peak_after,
        error_fp64=report.error_fp64,
        is_bit_equal_fp32=report.is_bit_equal_fp32,
        error_eps_left_alone=eps_left_alone,
        is_finite_fp16_before=report.fp16_before.is_finite,
        is_finite_fp16_after=report.fp16_after.is_finite,
        error_fp16_after=report.fp16_after.error,
        error_fp16_fp32_gains=None if gains is None else gains.error,
        error_bf16_before=bf16,
        method=report.method,
        still_too_large=tuple(f"{b.side} of {b.call}" for b in report.branches if b.after > 65504),
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as a table in Markdown."""
    names = ["model", "max \\|h\\| after", "float64 error", "float32 bit-equal", "eps left alone", "fp16 before"]
    names += ["fp16 after", "fp16 error", "with fp32 gains", "bf16 error before"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for r in rows:
        errors = (r.error_fp16_after, r.error_fp16_fp32_gains, r.error_bf16_before)
        cells = [
            r.family,
            f"{r.peak_after:.4g}",
            f"{r.error_fp64:.1e}",
            "yes" if r.is_bit_equal_fp32 else "no",
            f"{r.error_eps_left_alone:.1e}",
            "finite" if r.is_finite_fp16_before else "overflows",
            "finite" if r.is_finite_fp16_after else "overflows",
            *("-" if error is None else f"{error:.1e}" for error in errors),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints and writes."""
    settings = tyro.cli(Settings, description=__doc__)
    rows = [measure(family) for family in settings.families]
    print(table(rows))
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    about = {"date": date, "commit": commit(), "versions": versions(), "k": K, "peak": PEAK}
    write_json(settings.out, {**about, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
