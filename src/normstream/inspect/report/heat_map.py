"""Heat maps of the report: rectangles in one colour, paler for less, with their numbers where there is room."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TypeGuard

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from normstream.lab.panels import Panel, Picture
from normstream.lab.style import short
from normstream.lab.svg import INK, draw

HUE, BELOW_ZERO = "#0072b2", "#d96c00"
DARKEST = 0.62
"""Opacity of a row's largest value: the page's text is legible on it in light and in dark colours."""
MANY_COLUMNS = 12
"""More columns than this have no numbers in their cells."""
CELL, ROW = 0.42, 0.3
"""Inches."""


@dataclass(frozen=True)
class Cells:
    """Values by row and column; None is an empty cell."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    one_scale: bool = False
    """Whether all rows share a scale; otherwise each has its own."""


def heat_map(name: str, title: str, explanation: str, panels: Sequence[tuple[str, Cells]], x: str) -> Picture | None:
    """One panel for each heading and its cells; None when there is nothing to draw."""
    drawn = []
    for i, (heading, cells) in enumerate(panels):
        if not cells.rows:
            continue
        words = (
            f"{title} {heading}: rows {', '.join(cells.rows)}, columns {x} {cells.columns[0]} to {cells.columns[-1]}."
        )
        width = min(6.4, max(5.0, 2.0 + CELL * len(cells.columns)))
        height = 0.7 + ROW * min(len(cells.rows), 20)
        drawn.append(Panel(heading, draw(f"{name}-{i}", words, lambda axes, c=cells: paint(axes, c, x), width, height)))
    return Picture(name, title, explanation, (), tuple(drawn)) if drawn else None


def shades(cells: Cells) -> list[list[float]]:
    """Each value over the largest magnitude of its row, or of all of them; 0 for an empty cell.

    >>> shades(Cells(("a", "b"), ("0", "1"), ((1.0, 2.0), (-3.0, None))))
    [[0.5, 1.0], [-1.0, 0.0]]
    """
    tops = [max((abs(value) for value in row if is_known(value)), default=0.0) for row in cells.values]
    tops = [max(tops)] * len(tops) if cells.one_scale else tops
    return [
        [value / top if is_known(value) and top else 0.0 for value in row]
        for row, top in zip(cells.values, tops, strict=True)
    ]


def is_known(value: float | None) -> TypeGuard[float]:
    """Whether there is a finite number."""
    return value is not None and isfinite(value)


def paint(axes: Axes, cells: Cells, x: str) -> None:
    """Draws the cells; the first row is on top."""
    numbers = len(cells.columns) <= MANY_COLUMNS and len(cells.rows) <= 16
    for i, (row, values) in enumerate(zip(shades(cells), cells.values, strict=True)):
        for j, (shade, value) in enumerate(zip(row, values, strict=True)):
            colour = HUE if shade >= 0 else BELOW_ZERO
            opacity = round(0.03 + (DARKEST - 0.03) * abs(shade), 3)
            axes.add_patch(Rectangle((j + 0.03, i + 0.04), 0.94, 0.92, facecolor=colour, alpha=opacity, linewidth=0))
            if numbers and value is not None:
                axes.text(j + 0.5, i + 0.5, compact(value), ha="center", va="center", fontsize=8, color=INK)
    axes.set_xlim(0, len(cells.columns))
    axes.set_ylim(len(cells.rows), 0)
    every = max(1, len(cells.columns) // 16)
    axes.set_xticks([j + 0.5 for j in range(0, len(cells.columns), every)], cells.columns[::every])
    few = max(1, len(cells.rows) // 20)
    axes.set_yticks([i + 0.5 for i in range(0, len(cells.rows), few)], cells.rows[::few])
    axes.set_xlabel(x)
    axes.grid(False)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def compact(value: float) -> str:
    """A number of few characters.

    >>> compact(0.1234), compact(-2.5), compact(1234.0)
    ('.12', '-2.5', '1234')
    """
    if abs(value) < 1:
        return f"{value:.2f}".replace("0.", ".", 1)
    return short(float(f"{value:.2g}")) if abs(value) < 100 else short(value)
