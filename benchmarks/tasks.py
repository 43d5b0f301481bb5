"""Placements compared in models other than dense decoders, one experiment a name.

    python -m benchmarks.tasks mlm

Each experiment is a comparison of ``normstream compare`` with its settings fixed below; two runs at a time, each with
one thread. The report goes to ``runs/bench-NAME``; an experiment that was interrupted goes on from there. Prints a
table and writes ``benchmarks/results/tasks-NAME.json``: every run's losses, metrics and validation curve.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console

from benchmarks.machine import commit, machine, versions
from benchmarks.results import RESULTS
from normstream.lab import CompareConfig, compare
from normstream.lab.plan import default_plan
from normstream.models import preset
from normstream.optim import ScheduleConfig
from normstream.training import TrainConfig
from normstream.training.files import write_json

Experiment = Literal["mlm", "moe"]
SEEDS = (0, 1, 2)
Row = dict[str, Any]


def task_run(task: str, **options: Any) -> TrainConfig:
    """What the runs of a comparison share by default, but for some."""
    return replace(default_plan(task).base, **options)


def mlm() -> CompareConfig:
    """Masked language modelling: Post-Norm with warm-up, Pre-Norm and SiameseNorm; evaluated often."""
    base = task_run("mlm", eval_every=20, schedule=ScheduleConfig(kind="linear", warmup=60))
    return CompareConfig(placements=("pre", "post", "siamese"), lrs=(2e-3,), seeds=SEEDS, base=base)


def moe() -> CompareConfig:
    """A mixture-of-experts decoder: Pre-Norm and SiameseNorm at two rates."""
    base = task_run("lm", model=preset("moe-tiny"), steps=300, schedule=ScheduleConfig(warmup=30))
    return CompareConfig(placements=("pre", "siamese"), lrs=(3e-3, 1e-2), seeds=SEEDS, base=base)


EXPERIMENTS: dict[Experiment, Callable[[], CompareConfig]] = {"mlm": mlm, "moe": moe}


@dataclass(frozen=True)
class Settings:
    """Which experiment, and whether in earnest."""

    experiment: tyro.conf.Positional[Experiment]
    """Name of the experiment."""
    quick: bool = False
    """Only a few steps of each run, to see that it works."""
    jobs: int = 2
    """Runs at a time."""
    out: Path = RESULTS
    """Folder of the result file."""
    runs: Path = Path("runs")
    """Folder of the comparison's own folder."""


def main(settings: Settings) -> Path:
    """Runs an experiment, prints its table and writes its result file; returns that."""
    plan = plan_of(settings)
    torch.set_num_threads(settings.jobs)
    summary = compare(plan, resume=plan.out.exists(), console=Console())
    rows = [row_of(run) for run in summary["runs"]]
    record = record_of(f"benchmarks.tasks {settings.experiment}", config=summary["config"], rows=rows)
    print(table(rows))
    if settings.experiment == "mlm":
        record["steps_to_reach"] = [
            row for target in ("post", "pre") for lr in plan.lrs for row in steps_to_reach(rows, target, lr)
        ]
        for row in record["steps_to_reach"]:
            print(reached(row))
    return write_record(settings.out, f"tasks-{settings.experiment}", record, quick=settings.quick)


def record_of(command: str, **measured: Any) -> Row:
    """What a result file says besides what was measured: when, on what, by which command."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "command": f"python -m {command}",
        **measured,
    }


def write_record(folder: Path, name: str, record: Row, *, quick: bool) -> Path:
    """Writes a result file and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{'-quick' if quick else ''}.json"
    write_json(path, record)
    print(f"wrote {path}")
    return path


def plan_of(settings: Settings) -> CompareConfig:
    """The comparison of an experiment."""
    plan = EXPERIMENTS[settings.experiment]()
    if settings.quick:
        base = replace(plan.base, steps=20, eval_every=10, eval_batches=1, schedule=ScheduleConfig())
        plan = replace(plan, base=base, seeds=SEEDS[:1])
    folder = settings.runs / f"bench-{settings.experiment}{'-quick' if settings.quick else ''}"
    return replace(plan, out=folder, jobs=settings.jobs)


def row_of(run: Mapping[str, Any]) -> Row:
    """What the result file keeps of a run."""
    keys = ("placement", "lr", "seed", "val_loss", "best_val_loss", "metrics", "diverged", "collapsed", "seconds")
    curve = {key: run["curve"][key] for key in ("val_step", "val_loss")}
    return {key: run[key] for key in (*keys, "parameters")} | {"curve": curve}


def table(rows: Sequence[Row]) -> str:
    """Mean and standard deviation over seeds of the loss and of every metric, as Markdown.

    >>> print(table([{"placement": "pre", "lr": 0.1, "val_loss": 2.0, "metrics": {"accuracy": 0.5}, "diverged": False,
    ...               "collapsed": False}]))
    | placement | rate | loss | accuracy | failed |
    |---|---|---|---|---|
    | `pre` | 0.1 | 2.000 | 0.500 | 0 of 1 |
    """
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"] or {}))
    lines = [
        f"| placement | rate | loss | {' | '.join([*names, 'failed'])} |",
        f"|---|---|---|{'---|' * len(names)}---|",
    ]
    for placement, lr in dict.fromkeys((row["placement"], row["lr"]) for row in rows):
        own = [row for row in rows if (row["placement"], row["lr"]) == (placement, lr)]
        values = [
            [row["val_loss"] for row in own],
            *([(row["metrics"] or {}).get(name) for row in own] for name in names),
        ]
        failed = sum(row["diverged"] or row["collapsed"] for row in own)
        cells = " | ".join(map(mean_and_spread, values))
        lines.append(f"| `{placement}` | {lr:g} | {cells} | {failed} of {len(own)} |")
    return "\n".join(lines)


def mean_and_spread(values: Sequence[float | None]) -> str:
    """The mean, and the standard deviation of several; a dash if there is no value.

    >>> mean_and_spread([1.0, 2.0]), mean_and_spread([None])
    ('1.500 ± 0.707', '-')
    """
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    spread = f" ± {statistics.stdev(known):.3f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.3f}{spread}"


def steps_to_reach(rows: Sequence[Row], target: str, lr: float) -> list[Row]:
    """For every other placement and seed, when it is first at the last loss of ``target`` with that rate and seed.

    >>> rows = [{"placement": name, "lr": 1.0, "seed": 0, "curve": {"val_step": [1, 2], "val_loss": losses}}
    ...         for name, losses in (("post", [3.0, 2.0]), ("pre", [2.0, 1.0]))]
    >>> [(row["placement"], row["step"], row["of"]) for row in steps_to_reach(rows, "post", 1.0)]
    [('pre', 1, 2)]
    """
    last = {row["seed"]: row["curve"] for row in rows if (row["placement"], row["lr"]) == (target, lr)}
    found = []
    for row in rows:
        if row["lr"] != lr or row["placement"] == target:
            continue
        curve, goal = row["curve"], last[row["seed"]]
        points, low = zip(curve["val_step"], curve["val_loss"], strict=True), goal["val_loss"][-1]
        step = min((step for step, loss in points if None not in (loss, low) and loss <= low), default=None)
        found.append(
            {
                "placement": row["placement"],
                "target": target,
                "lr": lr,
                "seed": row["seed"],
                "step": step,
                "of": goal["val_step"][-1],
            }
        )
    return found


def reached(row: Row) -> str:
    """One line for people.

    >>> reached({"placement": "pre", "target": "post", "lr": 0.1, "seed": 0, "step": 60, "of": 100})
    'pre, rate 0.1, seed 0: at the last loss of post after 60 of its 100 steps'
    """
    where = f"after {row['step']} of its {row['of']} steps" if row["step"] else f"not within its {row['of']} steps"
    return f"{row['placement']}, rate {row['lr']:g}, seed {row['seed']}: at the last loss of {row['target']} {where}"


if __name__ == "__main__":
    main(tyro.cli(Settings))
