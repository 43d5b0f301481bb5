"""What a comparison consists of: its configuration, checked before anything runs, and the list of its runs."""

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from normstream import placements
from normstream.checks import check_types
from normstream.lab.budget import parse_budget
from normstream.optim import OptimizerConfig
from normstream.tasks import get_task
from normstream.training.config import TrainConfig, default_config

LOWEST_LR, HIGHEST_LR = 1e-30, 1e30  # updates in float32 and the axes of pictures can hold these


@dataclass(frozen=True)
class CompareConfig:
    """A comparison: every placement with every learning rate and every seed, all else equal.

    Raises ValueError for an unknown placement, a value out of range, a value given twice or an empty list.

    >>> len(CompareConfig(seeds=(0, 1)).runs())
    12
    """

    placements: tuple[str, ...] = ("pre", "post", "siamese")
    """Placements to compare: names from `normstream list`, options as in siamese(depth_scale=paper), or all."""
    lrs: tuple[float, ...] = (2e-3, 1e-2)
    """Peak learning rates."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of initialization and data order; results are averaged over them."""
    base: Annotated[TrainConfig, arg(name="")] = field(default_factory=TrainConfig)
    """Everything the runs share; placement, learning rate and seed are given above."""
    out: Path = Path("runs/compare")
    """Folder for the run folders, summary.json, summary.csv and report.html."""
    budget: str | None = None
    """Time for the whole comparison, such as 90s, 5m or 1h30m; it replaces the number of steps."""
    jobs: int = 1
    """Runs at a time, each in a process of its own with its share of the threads; losses do not depend on it."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("placements", "lrs", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give at least one")
        wrong = [lr for lr in self.lrs if not LOWEST_LR <= lr <= HIGHEST_LR]
        if wrong:
            raise ValueError(f"learning rates must lie between {LOWEST_LR:g} and {HIGHEST_LR:g}, got {wrong[0]}")
        if min(self.seeds) < 0:
            raise ValueError(f"seeds must not be negative, got {min(self.seeds)}")
        canonical = self.chosen()
        for name, values in (("placement", canonical), ("learning rate", self.lrs), ("seed", self.seeds)):
            refuse_repeated(name, values)
        replaced = (
            ("seed", self.base.seed, TrainConfig.seed, "seeds"),
            ("model.placement", self.base.model.placement, type(self.base.model).placement, "placements"),
            ("optimizer.lr", self.base.optimizer.lr, OptimizerConfig.lr, "lrs"),
        )
        for name, value, default, instead in replaced:
            if value != default:
                raise ValueError(f"a comparison takes no {name} of its own, got {value}; give {instead}")
        if self.jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {self.jobs}")
        if self.budget is not None:
            parse_budget(self.budget)
            if self.jobs > 1:
                raise ValueError("a budget is measured with one run at a time; leave out jobs, or give steps")

    def chosen(self) -> list[str]:
        """The placements in full: all of them for ``all``, each as ``placements.get`` writes it.

        >>> CompareConfig(placements=("all",)).chosen() == placements.names()
        True
        """
        names = [name for given in self.placements for name in (placements.names() if given == "all" else [given])]
        return [str(placements.get(name)) for name in names]

    def runs(self) -> list["Run"]:
        """The runs, seed by seed, so that an early stop leaves whole comparisons behind."""
        return [Run(placement, lr, seed) for seed in self.seeds for lr in self.lrs for placement in self.chosen()]


def default_plan(task: str) -> CompareConfig:
    """The comparison that the command line starts from, with the task's own learning rates and defaults.

    Raises ValueError with the nearest name for an unknown task.

    >>> default_plan("lm") == CompareConfig()
    True
    """
    base = default_config(task)
    model = replace(base.model, placement=type(base.model).placement)
    optimizer = replace(base.optimizer, lr=OptimizerConfig.lr)
    return CompareConfig(lrs=get_task(task).lrs, base=replace(base, model=model, optimizer=optimizer))


@dataclass(frozen=True)
class Run:
    """One run of a comparison.

    >>> Run("siamese(depth_scale=paper)", 0.01, 0).folder
    'siamese-depth_scale-paper_lr0.01_seed0'
    """

    placement: str
    lr: float
    seed: int

    @property
    def folder(self) -> str:
        """A name that every file system accepts."""
        return f"{re.sub(r'[^A-Za-z0-9_.]+', '-', self.placement).strip('-')}_lr{self.lr!r}_seed{self.seed}"

    def config(self, base: TrainConfig) -> TrainConfig:
        """The shared configuration with this run's placement, learning rate and seed."""
        return replace(
            base,
            model=replace(base.model, placement=self.placement),
            optimizer=replace(base.optimizer, lr=self.lr),
            seed=self.seed,
        )


def refuse_repeated(name: str, values: Sequence[Hashable]) -> None:
    """Raise ValueError when a value occurs twice."""
    value, times = Counter(values).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{name} {value} is given {times} times; give it once")
