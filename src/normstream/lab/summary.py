"""The summary of a comparison: one JSON file that every table, picture and sentence is made from."""

import csv
import io
import statistics
from pathlib import Path
from typing import Any

from normstream.lab.words import task_of
from normstream.training.divergence import WINDOW as LAST
from normstream.training.files import read_json, write_json, write_text
from normstream.training.metrics import finite
from normstream.training.spikes import DEVIATIONS, MIN_VALUES, WINDOW

FORMAT = 2
DIVERGED_MEANING = (
    f"a loss or a gradient norm is not finite, or the mean of the last {LAST} training losses lies above the larger of "
    "the first loss and that of a guess that knows nothing"
)
STABLE_MEANING = (
    "going up from the smallest learning rate tried at which no seed diverged or collapsed, the last one before some "
    "seed does; at rates below, a collapse only means that nothing has been learnt yet"
)
SPIKE_MEANING = (
    f"a step whose training loss lies more than {DEVIATIONS:g} standard deviations above the mean of the steps before "
    f"it (at least {MIN_VALUES}, at most {WINDOW})"
)
CSV_COLUMNS = (
    "placement", "lr", "seed", "status", "val_loss", "best_val_loss", "train_loss", "diverged", "diverged_step",
    "collapsed", "cause", "spikes", "max_grad_norm", "parameters", "steps", "tokens_per_second", "seconds", "path",
)  # fmt: skip
KEYS = (
    *("format", "task", "created", "command", "normstream", "environment", "data", "placements", "lrs", "seeds"),
    *("tokens_per_run", "start", "config", "budget", "runs", "unfinished", "table", "conclusion"),
)
DATA_KEYS = ("source", "corpus_hash", "tokenizer", "unit", "train_size", "baseline_loss")
RUN_KEYS = (*CSV_COLUMNS, "metrics", "baseline_loss", "curve", "layers")
NUMERIC = ("val_loss", "best_val_loss", "spikes", "max_grad_norm", "tokens_per_second")


def mean(values: list[float | int]) -> float | None:
    """The mean, or None when there is nothing to average."""
    return statistics.fmean(values) if values else None


def spread(values: list[float]) -> float | None:
    """The sample standard deviation (n - 1), unknown (None) with fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def table(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each placement and learning rate that has a finished run, means taken over its seeds.

    A run without a finite loss is counted in `n_diverged` and left out of the means, so `n_losses` says over how
    many seeds they were taken. `metrics` has the mean and the standard deviation of each of the task's metrics.
    """
    groups: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for run in summary["runs"]:
        if run["status"] == "finished":
            groups.setdefault((run["lr"], run["placement"]), []).append(run)
    rows = []
    for (lr, placement), runs in groups.items():
        numbers = {key: [run[key] for run in runs if run[key] is not None] for key in NUMERIC}
        rows.append(
            {
                "placement": placement,
                "lr": lr,
                "val_loss_mean": mean(numbers["val_loss"]),
                "val_loss_std": spread(numbers["val_loss"]),
                "metrics": {metric.name: over_seeds(runs, metric.name) for metric in task_of(summary).metrics},
                "best_val_loss_mean": mean(numbers["best_val_loss"]),
                "n_seeds": len(runs),
                "n_losses": len(numbers["val_loss"]),
                "n_diverged": sum(run["diverged"] for run in runs),
                "n_collapsed": sum(run["collapsed"] for run in runs),
                "spikes_mean": mean(numbers["spikes"]),
                "max_grad_norm": max(numbers["max_grad_norm"], default=None),
                "parameters": runs[0]["parameters"],
                "tokens_per_second": mean(numbers["tokens_per_second"]),
            }
        )
    return rows


def over_seeds(runs: list[dict[str, Any]], metric: str) -> dict[str, float | None]:
    """Mean and standard deviation of a metric over those runs that have it.

    >>> over_seeds([{"metrics": {"accuracy": 90.0}}, {"metrics": {}}], "accuracy")
    {'mean': 90.0, 'std': None}
    """
    values = [value for run in runs if (value := run["metrics"].get(metric)) is not None]
    return {"mean": mean(values), "std": spread(values)}


def csv_columns(summary: dict[str, Any]) -> list[str]:
    """The columns of `summary.csv`: the task's metrics follow the loss.

    >>> csv_columns({"task": "lm"}) == list(CSV_COLUMNS)
    True
    """
    after = CSV_COLUMNS.index("val_loss") + 1
    return [*CSV_COLUMNS[:after], *(metric.name for metric in task_of(summary).metrics), *CSV_COLUMNS[after:]]


def largest_stable_rate(rows: list[dict[str, Any]]) -> float | None:
    """Going up from the smallest rate at which no seed diverged or collapsed, the last one before some seed does.

    Below that smallest rate a collapse only means that nothing has been learnt yet. What diverged and collapsed mean is
    defined in ``normstream.training.divergence``. None if some seed failed at every rate.

    >>> rows = [{"lr": lr, "n_diverged": 0, "n_collapsed": int(lr in (1e-4, 0.01))} for lr in (0.1, 1e-4, 1e-3, 0.01)]
    >>> largest_stable_rate(rows)
    0.001
    """
    stable = None
    for row in sorted(rows, key=lambda row: row["lr"]):
        failed = row["n_diverged"] or row["n_collapsed"]
        if failed and stable is not None:
            break
        stable = stable if failed else row["lr"]
    return stable


def write_summary(summary: dict[str, Any], folder: Path) -> None:
    """Write `summary.json` and `summary.csv` (one line for each run) into the folder, each as a whole or not at all."""
    write_json(folder / "summary.json", finite(summary))
    lines = io.StringIO()
    writer = csv.DictWriter(lines, csv_columns(summary), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(run["metrics"] | run for run in summary["runs"])
    write_text(folder / "summary.csv", lines.getvalue())


def read_summary(path: Path) -> dict[str, Any]:
    """Read `summary.json`; ValueError when it is not one of ours, of another format or task, or incomplete."""
    summary = read_json(path)
    if summary.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {summary.get('format')!r}, expected {FORMAT}; read it with the version that wrote it"
        )
    missing = missing_keys(summary)
    if missing:
        raise ValueError(f"{path} is incomplete: {', '.join(missing)} missing; restore the file")
    task_of(summary)
    return summary


def missing_keys(summary: dict[str, Any]) -> list[str]:
    """The keys that a summary, its data and its runs should have and do not.

    >>> missing_keys(dict.fromkeys(KEYS) | {"data": dict.fromkeys(DATA_KEYS), "runs": [dict.fromkeys(RUN_KEYS[1:])]})
    ['runs[0].placement']
    """
    missing = [key for key in KEYS if key not in summary]
    missing += [f"data.{key}" for key in DATA_KEYS if key not in summary.get("data", DATA_KEYS)]
    for index, run in enumerate(summary.get("runs", [])):
        missing += [f"runs[{index}].{key}" for key in RUN_KEYS if key not in run]
    return missing
