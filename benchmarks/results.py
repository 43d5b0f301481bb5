"""Result files: what was measured, on what, and which figures were reached."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Quartiles, quartiles
from benchmarks.machine import commit, machine, machine_class, versions

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Target:
    """A figure to reach and what was measured; nothing is rounded before the comparison.

    >>> target = Target("a ratio", 0.6, at_least=False, values=(0.5, 0.55, 0.7))
    >>> target.line()
    'reached    a ratio: at most 0.6, measured 0.550 [0.525, 0.625]'
    >>> Target("another", 0.45, at_least=True, reason="no compiler").verdict
    'not measured'
    """

    label: str
    limit: float
    at_least: bool
    values: Sequence[float] = ()
    """One a round; empty if it was not measured."""
    reason: str = ""
    """Why it was not measured."""

    @property
    def quartiles(self) -> Quartiles | None:
        return quartiles(self.values) if self.values else None

    @property
    def verdict(self) -> str:
        """Whether the median reaches the limit."""
        if self.quartiles is None:
            return "not measured"
        median = self.quartiles.median
        return "reached" if (median >= self.limit if self.at_least else median <= self.limit) else "missed"

    def line(self) -> str:
        """For people."""
        bound = f"at {'least' if self.at_least else 'most'} {self.limit:g}"
        measured = f"measured {self.quartiles}" if self.quartiles else self.reason
        return f"{self.verdict:<10} {self.label}: {bound}, {measured}"

    def record(self) -> dict[str, Any]:
        """For the result file."""
        found = None if self.quartiles is None else self.quartiles._asdict()
        bound = "at least" if self.at_least else "at most"
        record = {"label": self.label, "bound": bound, "limit": self.limit, "measured": found, "verdict": self.verdict}
        return record | ({"reason": self.reason} if self.reason else {})


@dataclass
class Result:
    """One run of one benchmark."""

    name: str
    device: torch.device
    settings: Mapping[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """What did not run, and why."""

    def skip(self, what: str, why: str) -> None:
        """Says so at once, once."""
        if what not in self.skipped:
            print(f"skipped {what}: {why}")
        self.skipped[what] = why

    def write(self, folder: Path = RESULTS) -> Path:
        """Prints the targets and writes ``<name>-<machine class>.json``."""
        for target in self.targets:
            print(target.line())
        record = {
            "benchmark": self.name,
            "machine_class": machine_class(self.device),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "commit": commit(),
            "machine": machine(self.device),
            "versions": versions(),
            "settings": dict(self.settings),
            "skipped": self.skipped,
            "targets": [target.record() for target in self.targets],
            "rows": self.rows,
        }
        path = folder / f"{self.name}-{machine_class(self.device)}.json"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path.name}")
        return path


def compact(values: Sequence[float]) -> list[float]:
    """Six significant digits, enough to take every ratio again.

    >>> compact([0.12345678])
    [0.123457]
    """
    return [float(f"{value:.6g}") for value in values]
