"""The folder of a run.

    config.yaml     the resolved config; `normstream train --config` starts the same run from it
    run.json        versions, machine, corpus hash, parameter counts, where the weights came from
    metrics.jsonl   see normstream.training.metrics
    checkpoints/    see normstream.training.checkpoint
    result.json     once the run has ended
    .lock           see normstream.training.lock

A folder that exists is never written to, unless to resume the run in it or because nothing has begun there.
"""

import os
import platform
import re
import sys
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from normstream.__about__ import __version__
from normstream.training.config import TrainConfig
from normstream.training.config_file import config_from_yaml, config_to_yaml
from normstream.training.files import read_json, write_json, write_text
from normstream.training.metrics import finite


def begun(folder: Path) -> set[str]:
    """The names in a folder, without what a process leaves that is killed as it starts: its lock, half-written files.

    >>> begun(Path("no/such/folder"))
    set()
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return {name for name in names if not re.fullmatch(r"\.lock|\..+\.tmp", name)}


@dataclass(frozen=True)
class RunResult:
    """How a run ended; result.json has the same keys."""

    steps: int
    """Updates done."""
    train_loss: float | None
    """Mean training loss of the last 20 updates; None if there was no finite one."""
    val_loss: float | None
    """Validation loss after the last step; None if the run stopped before."""
    best_val_loss: float | None
    """Lowest validation loss seen."""
    diverged: bool
    """As defined in normstream.training.divergence."""
    diverged_step: int | None
    """When."""
    cause: str | None
    """Why."""
    collapsed: bool
    """Whether the model learnt no more than the baseline knows, as defined there."""
    baseline_loss: float
    """Validation loss of a model that ignores its input (of text: that knows only token frequencies)."""
    metrics: dict[str, float]
    """The task's measures of success besides the loss (accuracy, BLEU ...), after the last step."""
    spikes: int
    """Training losses that count as spikes by normstream.training.spikes."""
    skipped: int
    """Updates skipped for a gradient that was not finite (fp16)."""
    tokens_per_second: float
    """Tokens a second over all updates, without evaluations and checkpoints."""
    seconds: float
    """Time of all that, evaluations and checkpoints included, summed over interruptions."""
    parameters: int
    """Number of parameters, a tied matrix once."""
    non_embedding_parameters: int
    """The same without the embedding matrix."""


class RunFolder:
    """Paths inside a run folder, and its files that are written once.

    >>> RunFolder(Path("runs/a")).metrics.as_posix()
    'runs/a/metrics.jsonl'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.info, self.metrics = path / "config.yaml", path / "run.json", path / "metrics.jsonl"
        self.checkpoints, self.result = path / "checkpoints", path / "result.json"

    def check(self, resume: bool) -> bool:
        """Whether there is a run to resume here.

        A folder with nothing but what a process leaves that is killed as it starts is as good as none.

        Raises:
            ValueError: if the folder exists and ``resume`` is false, or if it is no run's folder.
        """
        if not self.path.exists() or (self.path.is_dir() and not begun(self.path)):
            return False
        if not resume:
            raise ValueError(
                f"run folder {self.path} exists already; choose another one (--out), or go on in it (--resume)"
            )
        if not self.config.is_file():
            raise ValueError(f"cannot resume: {self.path} has no config.yaml, so it is no run folder")
        return True

    def create(self, config: TrainConfig, info: dict[str, Any]) -> None:
        """Writes the config and run.json into the folder, which the lock has made."""
        write_text(self.config, config_to_yaml(config))
        write_json(self.info, info)

    def read_config(self) -> TrainConfig:
        """The config that the run was started with; raises ValueError that names the file."""
        try:
            return config_from_yaml(self.config.read_text(encoding="utf-8"), TrainConfig)
        except ValueError as error:
            raise ValueError(f"{self.config}: {error}") from error

    def read_result(self) -> RunResult | None:
        """How the run ended, None if it has not; raises ValueError that names the file if a key is missing.

        Keys that a later version may have added are ignored.
        """
        if not self.result.is_file():
            return None
        values, names = read_json(self.result), [field.name for field in fields(RunResult)]
        if missing := [name for name in names if name not in values]:
            raise ValueError(f"{self.result} is incomplete: {', '.join(missing)} missing; remove it and resume the run")
        return RunResult(**{name: values[name] for name in names})

    def write_result(self, result: RunResult) -> None:
        """Writes result.json, with null for a number that is not finite."""
        write_json(self.result, finite(asdict(result)))


def environment() -> dict[str, Any]:
    """Versions and machine, as run.json records them.

    >>> environment()["normstream"] == __version__
    True
    """
    return {
        "normstream": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "command": sys.argv,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
