"""Keeping the files of a comparison up to date while it goes on."""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from normstream.lab.conclusion import conclusion
from normstream.lab.report import write_report
from normstream.lab.summary import table, write_summary

REPORT_SHARE = 0.02
"""Share of the time that rebuilding the report between runs may take."""


class Saver:
    """Writes `summary.json` and `summary.csv` at every save, and `report.html` as often as the time it takes allows.

    Drawing the report of many runs takes seconds, more than a short run does. Leaving the `with` block of a saver, in
    whatever way, writes the report of the last save.

    Args:
        summary: the summary; its table and conclusion are brought up to date at every save.
        out: the folder.
        clock: seconds, from any start.

    >>> Saver({}, Path("runs/compare")).report_seconds
    0.0
    """

    def __init__(self, summary: dict[str, Any], out: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self.summary, self.out, self.clock = summary, out, clock
        self.report_seconds = 0.0
        self.reported = clock()
        self.outdated = True

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.report()

    def save(self) -> None:
        """Write the summary, and the report if the last one took little of the time since then."""
        summary = self.summary
        finished = [run for run in summary["runs"] if run["status"] == "finished"]
        summary["data"]["baseline_loss"] = finished[0]["baseline_loss"] if finished else None
        summary["unfinished"] = len(finished) < len(summary["runs"])
        summary["table"] = table(summary)
        summary["conclusion"] = conclusion(summary)
        write_summary(summary, self.out)
        self.outdated = True
        if self.report_seconds <= REPORT_SHARE * (self.clock() - self.reported):
            self.report()

    def report(self) -> None:
        """Write the report if it is not that of the last save."""
        if not self.outdated:
            return
        began = self.clock()
        write_report(self.summary, self.out / "report.html")
        self.reported = self.clock()
        self.report_seconds = self.reported - began
        self.outdated = False
