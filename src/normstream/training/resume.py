"""Going on with a run that was stopped: from which checkpoint, and whether with the same config.

With an equal config, the resumed run equals the uninterrupted one bit for bit (on the CPU with the same number of
threads and versions; on a GPU also under ``torch.use_deterministic_algorithms(True)``).
"""

import os
import shutil
import warnings
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from normstream.optim import learning_rate
from normstream.training.checkpoint import Checkpoint, list_checkpoints, read_checkpoint, remove_leftovers
from normstream.training.config import TrainConfig
from normstream.training.run_folder import RunFolder

HARMLESS = frozenset(
    {
        *("eval_every", "eval_batches", "stats_every", "checkpoint_every", "keep_checkpoints"),
        *("tune_allocator", "prefetch", "run_ahead"),
    }
)
"""Fields that do not touch the updates; they may change without a word."""
FIXED = ("task", "model.", "data.", "seed", "batch_size", "ema")
"""Fields that the saved weights, their average or the position in the data depend on: no run changes them."""


def changes(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The fields in which two configs of one class differ, by dotted name, with the old and the new value.

    >>> from normstream.optim import OptimizerConfig
    >>> changes(OptimizerConfig(lr=1e-3), OptimizerConfig(lr=2e-3))
    {'lr': (0.001, 0.002)}
    """
    found: dict[str, tuple[Any, Any]] = {}
    for field in fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if is_dataclass(before) and type(before) is type(after):
            found |= changes(before, after, f"{prefix}{field.name}.")
        elif before != after:
            found[prefix + field.name] = (before, after)
    return found


def check_changes(old: TrainConfig, new: TrainConfig, step: int, accepted: bool) -> str | None:
    """What changed that touches the updates after ``step``, as a sentence with old and new learning rate, or None.

    Raises:
        ValueError: with that sentence, if there is a change that was not accepted or that cannot be.
    """
    found = {name: values for name, values in changes(old, new).items() if name not in HARMLESS}
    if "data.source" in found and _same_path(*found["data.source"]):
        del found["data.source"]
    if not found:
        return None
    text = ", ".join(f"{name}: {before} -> {after}" for name, (before, after) in found.items())
    rates = [learning_rate(c.schedule, c.optimizer.lr, step + 1, c.steps) for c in (old, new)]
    text += f"; learning rate at step {step + 1}: {rates[0]:.7g} -> {rates[1]:.7g}"
    fixed = [name for name in found if name.startswith(FIXED)]
    if fixed:
        raise ValueError(
            f"cannot resume with another {', '.join(fixed)} ({text}); start a new run, with init_from if wanted"
        )
    if new.steps <= step:
        raise ValueError(
            f"the run has done {step} steps, so steps must be above that to go on, got {new.steps} ({text})"
        )
    if not accepted:
        raise ValueError(f"the config differs from the run's ({text}); restore it, or accept the changes explicitly")
    return text


def _same_path(one: str, two: str) -> bool:
    return Path(one).exists() and Path(two).exists() and Path(one).resolve() == Path(two).resolve()


def newest_intact(run: RunFolder) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that can be read, and what was wrong with newer ones; None if the run has saved none.

    A damaged checkpoint is renamed to ``damaged_step_N``, never removed, and a warning says so.

    Raises:
        ValueError: if there are checkpoints but all are damaged.
    """
    remove_leftovers(run.checkpoints)
    problems: list[str] = []
    paths = list_checkpoints(run.checkpoints)
    damaged = []
    for path in reversed(paths):
        try:
            checkpoint = read_checkpoint(path)
        except ValueError as error:
            problems.append(str(error))
            damaged.append(path)
            continue
        for bad, problem in zip(damaged, problems, strict=True):
            aside = bad.with_name(f"damaged_{bad.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(bad, aside)
            warnings.warn(f"{problem}; resuming from {path.name} instead, {aside} keeps the damaged one", stacklevel=2)
        return checkpoint, problems
    if problems:
        raise ValueError(f"no intact checkpoint in {run.checkpoints}: {'; '.join(problems)}")
    return None, []
