"""The picture of final validation loss against learning rate: which placement forgives a wrong one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from normstream.lab.panels import Key, Limits, Panel, Picture, others
from normstream.lab.style import GREY, Look, join_words, number, rate
from normstream.lab.svg import INK, PAPER, draw
from normstream.lab.words import collapse_meaning, loss_axis
from normstream.tasks import Task

Run = dict[str, Any]


@dataclass(frozen=True)
class End:
    """Where the seeds of one placement end at one learning rate; `failure` is the worst that happened to one."""

    look: Look
    lr: float
    losses: tuple[float, ...]
    failure: str = ""

    @property
    def mean(self) -> float:
        return fmean(self.losses)


def loss_by_rate(
    runs: Sequence[Run], look_of: Mapping[str, Look], baseline_loss: float | None, limits: Limits, task: type[Task]
) -> Picture | None:
    """Draw the mean final validation loss of each placement against learning rate; many need several to be lines."""
    if any(look.quiet for look in look_of.values()) and len({run["lr"] for run in runs}) == 1:
        return None
    rows = [found for placement in look_of if (found := ends(runs, placement, look_of[placement], limits))]
    if not rows:
        return None
    loud = [row for row in rows if not row[0].look.quiet]
    said = [f"{end.look.label} {number(end.mean)} at {rate(end.lr)}" for row in loud for end in row]
    title = "Final validation loss by learning rate"
    axis = loss_axis(task)
    description = f"{title}: {join_words(said)}."
    svg = draw("loss-by-rate", description, lambda axes: paint(axes, rows, baseline_loss, limits, axis))
    keys = [Key(row[0].look.label, row[0].look.colour, row[0].look.marker) for row in loud]
    keys += [others(len(rows) - len(loud))] if len(rows) > len(loud) else []
    explanation = explain({end.failure for row in loud for end in row}, task)
    return Picture("loss-by-rate", title, explanation, tuple(keys), (Panel("", svg),))


def ends(runs: Sequence[Run], placement: str, look: Look, limits: Limits) -> list[End]:
    """Return one placement's ends by learning rate; a loss beyond the picture (or none at all) is put on its edge."""
    own = [run for run in runs if run["placement"] == placement]
    row = []
    for lr in sorted({run["lr"] for run in own}):
        here = [run for run in own if run["lr"] == lr]
        losses = [limits[1] if run["val_loss"] is None else min(run["val_loss"], limits[1]) for run in here]
        diverged = "diverged" if any(run["diverged"] for run in here) else ""
        lost = "collapsed" if any(run["collapsed"] for run in here) else ""
        row.append(End(look, lr, tuple(losses), diverged or lost))
    return row


def explain(failures: set[str], task: type[Task]) -> str:
    """Say how to read the marks that the picture really has."""
    said = (
        "Lower is better, and flatter is more forgiving. A point is the mean over seeds; its bar runs from the lowest "
        "seed to the highest."
    )
    if "collapsed" in failures:
        said += f" A hollow point collapsed in at least one seed: {collapse_meaning(task)}."
    if "diverged" in failures:
        said += " A cross diverged in at least one seed; at the upper edge it stands for any loss beyond."
    return said


def paint(axes: Axes, rows: Sequence[Sequence[End]], baseline_loss: float | None, limits: Limits, axis: str) -> None:
    """Draw points, bars and the lines between them."""
    if baseline_loss is not None:
        axes.axhline(baseline_loss, color=INK, linewidth=1, linestyle=(0, (1, 2)))
    rates = sorted({end.lr for row in rows for end in row})
    width = 1.44 * rates[-1] / rates[0]
    loud = [row for row in rows if not row[0].look.quiet]
    for row in rows:
        if row[0].look.quiet:
            axes.plot([end.lr for end in row], [end.mean for end in row], color=GREY, linewidth=0.9, alpha=0.55)
    for i, row in enumerate(loud):
        shift = min(0.025, 0.1 / len(loud))  # no point hides another, and all stay near their rate
        beside = width ** (shift * (i - (len(loud) - 1) / 2))
        axes.plot([end.lr * beside for end in row], [end.mean for end in row], color=row[0].look.colour)
        for end in row:
            bar = [min(end.losses), max(end.losses)]
            axes.plot([end.lr * beside] * 2, bar, color=end.look.colour, lw=5, alpha=0.3, solid_capstyle="butt")
            point(axes, end.lr * beside, end)
    axes.set_xscale("log")
    axes.set_xlim(rates[0] / width**0.12, rates[-1] * width**0.12)
    axes.set_ylim(limits)
    axes.xaxis.set_major_locator(FixedLocator(rates))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: rate(value)))
    axes.set_xlabel("learning rate")
    axes.set_title(axis)


def point(axes: Axes, x: float, end: End) -> None:
    """Draw the mark of one end: a cross when it diverged, hollow when it collapsed."""
    colour = end.look.colour
    if end.failure == "diverged":
        axes.plot(x, end.mean, marker="x", markersize=10, color=colour, markeredgewidth=2.4, clip_on=False)
    else:
        face = PAPER if end.failure else colour
        axes.plot(x, end.mean, marker=end.look.marker, markersize=7.5, color=colour, markerfacecolor=face)
