"""Who needs warm-up: translation with Post-Norm, Pre-Norm and SiameseNorm, by optimizer and length of the warm-up.

    python -m benchmarks.warmup

The experiment of Xiong et al. 2020 (arXiv 2002.04745, section 3.2) at a small scale: English number words and dates
into German, an encoder and a decoder of six blocks of width 64, biases, ReLU, LayerNorm, Xavier's start, no gradient
clipping, no weight decay. The learning rate rises linearly over the warm-up, or starts at its peak if there is none,
and then falls linearly to a tenth of it. Two runs at a time, each with one thread; about half an hour on two cores. The
comparisons go to ``runs/bench-warmup``, and go on from there if they were interrupted.

Prints the table of docs/translation.md and writes ``benchmarks/results/warmup.json``.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console

from benchmarks.results import RESULTS
from benchmarks.tasks import SEEDS, Row, mean_and_spread, record_of, row_of, task_run, write_record
from normstream.data.translation import DecodingConfig, TranslationConfig
from normstream.lab import CompareConfig, compare
from normstream.models import EncoderDecoderConfig
from normstream.norms import NormConfig
from normstream.optim import OptimizerConfig, ScheduleConfig

Kind = Literal["adamw", "sgd", "radam"]
NAMES: dict[Kind, str] = {"adamw": "Adam", "sgd": "SGD", "radam": "RAdam"}
"""Without weight decay AdamW is Adam."""
PEAKS: dict[Kind, float] = {"adamw": 3e-3, "sgd": 0.5, "radam": 3e-3}
WARMUPS: dict[Kind, tuple[int, ...]] = {"adamw": (0, 50, 400), "sgd": (0, 400), "radam": (0, 400)}
PLACEMENTS = ("post", "pre", "siamese")


@dataclass(frozen=True)
class Settings:
    """What is run."""

    steps: int = 500
    """Updates of each run."""
    seeds: tuple[int, ...] = SEEDS
    """Of the start and of the order of the pairs."""
    quick: bool = False
    """Only a few steps of a few runs, to see that it works."""
    jobs: int = 2
    """Runs at a time."""
    out: Path = RESULTS
    """Folder of the result file."""
    runs: Path = Path("runs")
    """Folder of the comparisons' own folders."""


def main(settings: Settings) -> Path:
    """Runs all comparisons, prints the table and writes the result file; returns that."""
    torch.set_num_threads(settings.jobs)
    if settings.quick:
        settings = replace(settings, steps=4, seeds=settings.seeds[:1])
    rows: list[Row] = []
    for kind, warmups in WARMUPS.items():
        for warmup in warmups[:1] if settings.quick else warmups:
            plan = plan_of(kind, warmup, settings)
            summary = compare(plan, resume=plan.out.exists(), console=Console())
            rows += [row_of(run) | {"optimizer": kind, "warmup": warmup} for run in summary["runs"]]
    record = record_of("benchmarks.warmup", steps=settings.steps, rows=rows)
    print(table(rows))
    return write_record(settings.out, "warmup", record, quick=settings.quick)


def plan_of(kind: Kind, warmup: int, settings: Settings) -> CompareConfig:
    """All placements and seeds with one optimizer and one warm-up."""
    base = task_run(
        "translation",
        model=EncoderDecoderConfig(
            dim=64,
            n_layers=6,
            n_heads=4,
            activation="relu",
            bias="all",
            norm=NormConfig(kind="layer", eps=1e-5, bias=True),
            init="xavier",
            tied=True,
        ),
        data=TranslationConfig(decoding=DecodingConfig(n_pairs=200)),
        optimizer=OptimizerConfig(kind=kind, betas=(0.9, 0.98), weight_decay=0.0),
        schedule=ScheduleConfig("linear", warmup=warmup),
        clip=None,
        steps=settings.steps,
        batch_size=16,
        eval_every=min(100, settings.steps),
        eval_batches=16,
        stats_every=min(200, settings.steps),
        checkpoint_every=400,
    )
    folder = settings.runs / f"bench-warmup{'-quick' if settings.quick else ''}" / f"{kind}-{warmup}"
    return CompareConfig(
        placements=PLACEMENTS, lrs=(PEAKS[kind],), seeds=settings.seeds, base=base, out=folder, jobs=settings.jobs
    )


def table(rows: list[Row]) -> str:
    """Exact match, BLEU and loss of every cell, mean and standard deviation over seeds, as Markdown.

    >>> row = {"optimizer": "sgd", "warmup": 0, "placement": "pre", "val_loss": 1.0, "diverged": True}
    >>> print(table([row | {"collapsed": False, "metrics": {"exact_match": 5.0, "bleu": 30.0}}]).splitlines()[-1])
    | SGD | 0 | `pre` | 5.000 | 30.000 | 1.000 | 1 of 1 |
    """
    heads = ("optimizer", "warm-up", "placement", "exact match (%)", "BLEU", "loss", "failed")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for cell in dict.fromkeys((row["optimizer"], row["warmup"], row["placement"]) for row in rows):
        own = [row for row in rows if (row["optimizer"], row["warmup"], row["placement"]) == cell]
        scores = [[(row["metrics"] or {}).get(name) for row in own] for name in ("exact_match", "bleu")]
        values = " | ".join(map(mean_and_spread, [*scores, [row["val_loss"] for row in own]]))
        failed = sum(row["diverged"] or row["collapsed"] for row in own)
        kind, warmup, placement = cell
        lines.append(f"| {NAMES[kind]} | {warmup} | `{placement}` | {values} | {failed} of {len(own)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Settings))
