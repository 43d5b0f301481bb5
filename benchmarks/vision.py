"""Placements compared in vision Transformers, on scikit-learn's digits and on Fashion-MNIST.

    python -m benchmarks.vision

Pre-Norm, Post-Norm and SiameseNorm at two learning rates with three seeds; two runs at a time, each with one thread,
about 20 minutes on two cores. The comparisons go to ``runs/bench-vision-NAME``, and go on from there if they were
interrupted. Prints a table for each data set and writes ``benchmarks/results/vision.json``: every run's losses,
accuracy and validation curve. Accuracy is over the whole validation split: 359 digits, 10,000 pictures of clothes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console

from benchmarks.results import RESULTS
from benchmarks.tasks import SEEDS, record_of, row_of, table, task_run, write_record
from normstream.data.image_config import ImageDataConfig
from normstream.lab import CompareConfig, compare
from normstream.models import ViTConfig
from normstream.optim import ScheduleConfig
from normstream.training import TrainConfig

DataName = Literal["digits", "fashion-mnist"]
PATCH: Mapping[DataName, int] = {"digits": 2, "fashion-mnist": 4}
"""16 patches of a digit, 49 of a picture of clothes."""


@dataclass(frozen=True)
class Settings:
    """What is compared, and whether in earnest."""

    data: tuple[DataName, ...] = ("digits", "fashion-mnist")
    """Data sets."""
    quick: bool = False
    """Only a few steps of each run on few images, to see that it works."""
    jobs: int = 2
    """Runs at a time."""
    out: Path = RESULTS
    """Folder of the result file."""
    runs: Path = Path("runs")
    """Folder of the comparisons' own folders."""


def main(settings: Settings) -> Path:
    """Runs the comparisons, prints their tables and writes the result file; returns that."""
    torch.set_num_threads(settings.jobs)
    record = record_of("benchmarks.vision", data={})
    for name in settings.data:
        plan = plan_of(name, settings)
        summary = compare(plan, resume=plan.out.exists(), console=Console())
        rows = [row_of(run) for run in summary["runs"]]
        print(f"{name}\n\n{table(rows)}\n")
        record["data"][name] = {"config": summary["config"], "rows": rows}
    return write_record(settings.out, "vision", record, quick=settings.quick)


def plan_of(name: DataName, settings: Settings) -> CompareConfig:
    """The comparison on one data set."""
    model = ViTConfig(image_size=4 * PATCH[name], patch_size=PATCH[name], dim=64, n_layers=6, n_heads=4)
    base: TrainConfig = task_run("vision", model=model, data=ImageDataConfig(source=name))
    seeds, kind = SEEDS, ""
    if settings.quick:
        data = replace(base.data, max_images=200)
        base = replace(base, data=data, steps=20, eval_every=10, eval_batches=1, schedule=ScheduleConfig())
        seeds, kind = SEEDS[:1], "-quick"
    return CompareConfig(
        placements=("pre", "post", "siamese"),
        lrs=(1e-3, 4e-3),
        seeds=seeds,
        base=base,
        out=settings.runs / f"bench-vision-{name}{kind}",
        jobs=settings.jobs,
    )


if __name__ == "__main__":
    main(tyro.cli(Settings))
