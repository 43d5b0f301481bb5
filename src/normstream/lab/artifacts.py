"""What runs left besides numbers, in the report: pictures, and the first lines of tables."""

import base64
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normstream.lab.matrix import has_many, matrix
from normstream.lab.style import FAMILIAR, label, rate
from normstream.lab.words import task_of

LINES = 8
"""Lines of a table that are shown, its head not counted."""
MANY_SHOWN = 3
"""Of many placements, how many of the best are shown besides the familiar ones."""


@dataclass(frozen=True)
class Shown:
    """A file of one run: a picture as a data URI, or the rows of a table, the first of which is its head."""

    heading: str
    picture: str = ""
    rows: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Gallery:
    """The files of one kind, one for each placement."""

    name: str
    title: str
    shown: tuple[Shown, ...]


def galleries(summary: dict[str, Any], folder: Path) -> list[Gallery]:
    """The artifacts of the comparison in ``folder``: those of each placement's first seed at its best learning rate.

    Files that are not there are left out.

    >>> galleries({"task": "lm", "lrs": [], "runs": []}, Path())
    []
    """
    found = []
    for artifact in task_of(summary).artifacts:
        files = [(run, folder / run["path"] / artifact.file) for run in best_runs(summary)]
        shown = tuple(
            Shown(f"{label(run['placement'])}, learning rate {rate(run['lr'])}", **read(file))
            for run, file in files
            if file.is_file()
        )
        if shown:
            found.append(Gallery(f"artifact-{artifact.file.partition('.')[0]}", artifact.title, shown))
    return found


def read(path: Path) -> dict[str, Any]:
    """A picture or the beginning of a table, as arguments of ``Shown``."""
    if path.suffix == ".png":
        return {"picture": f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"}
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return {"rows": tuple(tuple(row) for row, _ in zip(rows, range(LINES + 1), strict=False))}


def best_runs(summary: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The first finished seed of each placement at the rate of its lowest mean loss; of many, the best and familiar."""
    for place, row in enumerate(matrix(summary).rows):
        if has_many(summary) and place >= MANY_SHOWN and row.placement not in FAMILIAR:
            continue
        cells = [cell for cell in row.cells if cell and cell["val_loss_mean"] is not None]
        best = min(cells, key=lambda cell: cell["val_loss_mean"], default=None)
        own = [run for run in summary["runs"] if run["placement"] == row.placement and run["status"] == "finished"]
        yield from [run for run in own if best is not None and run["lr"] == best["lr"]][:1]
