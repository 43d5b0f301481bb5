"""How many steps fit into a given time: measure a few warm steps of every placement, then divide."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from normstream.tasks import TaskData
from normstream.training.config import TrainConfig
from normstream.training.loop import train

WARM_STEPS = 3
TIMED_STEPS = 5
FEWEST_STEPS = 20
RESERVE = 0.05
SAFE_LR = 1e-12
"""A step costs the same at any learning rate, but at a high one the measuring run could end early."""


@dataclass(frozen=True)
class Cost:
    """Seconds that one run of a placement takes: a fixed part, one update, one evaluation."""

    fixed: float
    step: float
    evaluation: float

    def per_step(self, eval_every: int) -> float:
        """Seconds of a step with its share of the evaluations."""
        return self.step + self.evaluation / eval_every


def parse_budget(text: str) -> float:
    """Return the seconds that a text such as 90s, 5m or 1h30m means; ValueError for anything else.

    >>> parse_budget("1h30m"), parse_budget("90")
    (5400.0, 90.0)
    """
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    seconds = (
        sum(float(part) * unit for part, unit in zip(match.groups("0"), (3600, 60, 1), strict=True)) if match else 0
    )
    if not seconds > 0:
        raise ValueError(f"expected a time above 0 such as 90s, 5m or 1h30m, got {text!r}")
    return float(seconds)


def measure(
    config: TrainConfig, folder: Path, *, data: TaskData, clock: Callable[[], float] = time.perf_counter
) -> Cost:
    """Train for a few steps in a new folder and return what a run of this configuration costs.

    Raises:
        ValueError: if the run breaks within these steps, which its learning rate cannot be the cause of.
    """
    times: dict[str, list[float]] = {"train": [], "eval": []}

    def note(row: dict[str, Any]) -> None:
        if row["kind"] in times:
            times[row["kind"]].append(clock())

    steps = WARM_STEPS + TIMED_STEPS
    short = replace(
        config,
        optimizer=replace(config.optimizer, lr=SAFE_LR),
        schedule=replace(config.schedule, warmup=0),
        steps=steps,
        eval_every=steps,
    )
    started = clock()
    result = train(short, folder, data=data, on_row=note)
    total = clock() - started
    if result.steps < steps:
        raise ValueError(f"cannot measure the speed of {config.model.placement}: {result.cause} at any learning rate")
    step = (times["train"][-1] - times["train"][WARM_STEPS - 1]) / TIMED_STEPS
    evaluation = times["eval"][-1] - times["train"][-1]
    return Cost(max(0.0, total - steps * step - evaluation), step, evaluation)


def choose_steps(seconds: float, costs: Sequence[Cost], runs_per_placement: int, eval_every: int) -> int:
    """Return the number of steps, the same for every run, with which all runs fit into the time.

    steps = (seconds - fixed) / (runs * sum over placements of (step + evaluation / eval_every)), 5 % kept in reserve

    Raises:
        ValueError: if fewer than 20 steps fit.

    >>> choose_steps(100.0, [Cost(fixed=1.0, step=0.1, evaluation=0.0)] * 2, runs_per_placement=2, eval_every=50)
    227
    """
    fixed = runs_per_placement * sum(cost.fixed for cost in costs)
    per_step = runs_per_placement * sum(cost.per_step(eval_every) for cost in costs)
    steps = int(((1 - RESERVE) * seconds - fixed) / per_step)
    if steps < FEWEST_STEPS:
        needed = (fixed + FEWEST_STEPS * per_step) / (1 - RESERVE)
        raise ValueError(
            f"the budget is too small: {FEWEST_STEPS} steps of every run need about {needed:.0f} s here, "
            f"{seconds:.0f} s are left after loading the data and measuring; give more time, fewer runs or a smaller "
            "model"
        )
    return steps
