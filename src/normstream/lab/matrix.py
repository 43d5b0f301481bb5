"""Final validation losses as a matrix: a row for each placement, the best first, a column for each learning rate."""

import math
from dataclasses import dataclass
from typing import Any

from normstream.lab.style import FAMILIAR, MANY, Look, looks
from normstream.lab.summary import largest_stable_rate, table

Cell = dict[str, Any]  # a row of `table`


@dataclass(frozen=True)
class Row:
    """One placement: its cell at each learning rate, None where no run has finished."""

    placement: str
    cells: tuple[Cell | None, ...]
    stable_rate: float | None

    @property
    def best(self) -> tuple[bool, float]:
        """What rows are sorted by: the lowest loss at a rate without a failure, then the lowest at any rate."""
        known = [cell for cell in self.cells if cell]
        kept = [cell for cell in known if sound(cell)]
        return not kept, min((loss(cell) for cell in kept or known), default=math.inf)

    @property
    def parameters(self) -> int | None:
        return next((cell["parameters"] for cell in self.cells if cell), None)


@dataclass(frozen=True)
class Matrix:
    """The rows, sorted, and what the colours of their cells stand for; a cell with a failure has no such colour."""

    lrs: tuple[float, ...]
    rows: tuple[Row, ...]

    @property
    def sound_losses(self) -> list[float]:
        return [loss(cell) for row in self.rows for cell in row.cells if cell and sound(cell)]

    def is_lowest(self, cell: Cell | None) -> bool:
        """Whether no other placement is lower at this learning rate; a cell with a failure never is the lowest."""
        if not cell or not sound(cell):
            return False
        column = [row.cells[self.lrs.index(cell["lr"])] for row in self.rows]
        return loss(cell) == min(loss(other) for other in column if other and sound(other))

    def shade(self, value: float) -> float:
        """From 1 for the lowest loss to 0 for the highest, by rank, so that one bad loss does not hide the others."""
        lower = sum(loss < value for loss in self.sound_losses)
        return 1 - lower / max(len(self.sound_losses) - 1, 1)

    def scale(self) -> list[tuple[float, float]]:
        """Five losses from the lowest to the highest, with their shades, for a legend."""
        ordered = sorted(self.sound_losses)
        picked = dict.fromkeys(ordered[round(i / 4 * (len(ordered) - 1))] for i in range(5)) if ordered else {}
        return [(value, self.shade(value)) for value in picked]


def matrix(summary: dict[str, Any]) -> Matrix:
    """Arrange the finished runs of a summary, means over seeds; placements without one come last, in their order.

    >>> matrix({"lrs": [0.01], "runs": []}).rows
    ()
    """
    lrs = tuple(sorted(summary["lrs"]))
    cells = {(cell["placement"], cell["lr"]): cell for cell in table(summary)}
    rows = []
    for placement in all_placements(summary):
        own = tuple(cells.get((placement, lr)) for lr in lrs)
        rows.append(Row(placement, own, largest_stable_rate([cell for cell in own if cell])))
    return Matrix(lrs, tuple(sorted(rows, key=lambda row: row.best)))


def sound(cell: Cell) -> bool:
    """Whether no seed failed: each has a finite loss, and none diverged or collapsed."""
    return cell["n_losses"] == cell["n_seeds"] and not cell["n_diverged"] and not cell["n_collapsed"]


def loss(cell: Cell) -> float:
    """The mean over seeds, infinite if a seed has no loss."""
    return cell["val_loss_mean"] if cell["n_losses"] == cell["n_seeds"] else math.inf


def all_placements(summary: dict[str, Any]) -> list[str]:
    """The placements of a summary, each once, in the order of its runs."""
    return list(dict.fromkeys(run["placement"] for run in summary["runs"]))


def has_many(summary: dict[str, Any]) -> bool:
    """Whether a summary has too many placements to name and colour them all."""
    return len(all_placements(summary)) > MANY


def chosen_looks(summary: dict[str, Any]) -> dict[str, Look]:
    """The look of every placement; of many, the familiar and then the best ones get a colour and the rest are quiet."""
    names = all_placements(summary)
    if len(names) <= MANY:
        return looks(names)
    familiar = [name for name in FAMILIAR if name in names]
    ordered = familiar + [row.placement for row in matrix(summary).rows if row.placement not in familiar]
    return looks(ordered, loud=ordered[:MANY])
