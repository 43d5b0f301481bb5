"""Pre-Norm against SiameseNorm as a diffusion Transformer on generated shapes: noise MSE and the look of samples.

    python -m benchmarks.diffusion

Trains the default of the task diffusion with each placement, at its rate, with three seeds, two runs at a time with one
thread each. The report, with the samples of every run, goes to ``runs/bench-diffusion``; an interrupted benchmark goes
on from there. Prints a table and writes ``benchmarks/results/diffusion.json``. The distance is one in the features of a
small classifier, trained with the same seed for every run, and on few samples: compare it with nothing outside the
table.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from rich.console import Console

from benchmarks.results import RESULTS
from benchmarks.tasks import record_of, row_of, table, task_run, write_record
from normstream.diffusion.sampling import SamplingConfig
from normstream.lab import CompareConfig, compare
from normstream.optim import ScheduleConfig
from normstream.tasks.diffusion import Diffusion


@dataclass(frozen=True)
class Settings:
    """What is run."""

    quick: bool = False
    """Only a few steps of one seed, on few images, to see that it works."""
    jobs: int = 2
    """Runs at a time."""
    out: Path = RESULTS
    """Folder of the result file."""
    runs: Path = Path("runs")
    """Folder of the comparison's own folder."""


def plan_of(settings: Settings) -> CompareConfig:
    """The comparison."""
    base = task_run("diffusion")
    seeds, lrs = (0, 1, 2), Diffusion.lrs[-1:]  # the rate of the task's default
    if settings.quick:
        data = replace(base.data, max_images=60, image_size=8, samples=12, shown=1, sampling=SamplingConfig(steps=2))
        base = replace(base, steps=4, eval_every=2, eval_batches=1, data=data, schedule=ScheduleConfig())
        seeds = seeds[:1]
    folder = settings.runs / f"bench-diffusion{'-quick' if settings.quick else ''}"
    return CompareConfig(placements=("pre", "siamese"), lrs=lrs, seeds=seeds, base=base, out=folder, jobs=settings.jobs)


def main(settings: Settings) -> Path:
    """Runs the comparison, prints its table and writes the result file; returns that."""
    plan = plan_of(settings)
    torch.set_num_threads(settings.jobs)
    summary = compare(plan, resume=plan.out.exists(), console=Console())
    rows = [row_of(run) for run in summary["runs"]]
    record = record_of("benchmarks.diffusion", config=summary["config"], rows=rows)
    print(table(rows))
    return write_record(settings.out, "diffusion", record, quick=settings.quick)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
