"""What a run folder says about its run, as an entry of the summary."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from normstream.training.metrics import read_metrics
from normstream.training.run_folder import RunFolder

POINTS = 100
RESULT_KEYS = (
    *("parameters", "steps", "val_loss", "best_val_loss", "train_loss", "diverged", "diverged_step", "cause"),
    *("collapsed", "baseline_loss", "spikes", "tokens_per_second", "seconds"),
)


def read_run(folder: Path, steps: int) -> dict[str, Any]:
    """Return the measured part of a summary's entry; values of a run that has not ended are None or empty.

    Args:
        folder: the run folder; it need not exist yet.
        steps: steps of a whole run, which the curves are thinned by.

    Raises:
        ValueError: if the run has ended but its metrics are gone.
    """
    run = RunFolder(folder)
    result = run.read_result()
    known = asdict(result) if result else {"diverged": False, "collapsed": False}
    known["collapsed"] = known["collapsed"] and not known["diverged"]  # one failure is enough to tell of a run
    rows = read_metrics(run.metrics) if run.metrics.is_file() else []
    if result and not any(row["kind"] == "train" for row in rows):
        raise ValueError(
            f"{run.metrics} has no training rows although the run has ended; restore it, or remove {folder} to repeat "
            "the run"
        )
    norms = [row["grad_norm"] for row in rows if row["kind"] == "train" and row["grad_norm"] is not None]
    return {
        "status": "finished" if result else "pending",
        **{key: known.get(key) for key in RESULT_KEYS},
        "metrics": known.get("metrics", {}),
        "max_grad_norm": max(norms, default=None),
        "curve": curve(rows, steps),
        "layers": layers(rows),
    }


def curve(rows: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Thin the training rows to at most 100 points; a point stands for the steps up to it, since the point before.

    The loss is the mean over these steps. The gradient norm is the largest, so that no peak is lost.
    """
    width = math.ceil(steps / POINTS)
    bins: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "train":
            bins.setdefault((row["step"] - 1) // width, []).append(row)
    losses = [[row["loss"] for row in part if row["loss"] is not None] for part in bins.values()]
    norms = [[row["grad_norm"] for row in part if row["grad_norm"] is not None] for part in bins.values()]
    evaluations = [row for row in rows if row["kind"] == "eval"]
    metrics = dict.fromkeys(key for row in evaluations for key in row if key not in ("kind", "step", "loss"))
    return {
        "step": [part[-1]["step"] for part in bins.values()],
        "train_loss": [sum(part) / len(part) if part else None for part in losses],
        "grad_norm": [max(part, default=None) for part in norms],
        "val_step": [row["step"] for row in evaluations],
        "val_loss": [row["loss"] for row in evaluations],
        "val_metrics": {name: [row.get(name) for row in evaluations] for name in metrics},
    }


def layers(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The last per-layer statistics, None if there are none."""
    last = next((row for row in reversed(rows) if row["kind"] == "layers"), None)
    if last is None:
        return None
    experts = {"experts": last["experts"]} if "experts" in last else {}
    return {"step": last["step"], "grad_norm": last["grad_norm"]["layers"], "rms": last["rms"]} | experts
