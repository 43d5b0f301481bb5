"""How the pictures of the report are drawn: lines with bands over seeds, one SVG panel for each learning rate."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from normstream.lab.style import GREY, Look, join_words, rate, short
from normstream.lab.svg import INK, PAPER, draw

Points = dict[int | float, float]  # from a step or layer to a value
Group = tuple[float, str]  # a learning rate and a stack of the model, the latter empty where there is only one
Lines = dict[Group, list["Line"]]  # from a group to what is drawn in its panel
Limits = tuple[float, float]
DEPTH = 1e6
DASHES = ("solid", (0, (3.5, 1.6)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))


@dataclass(frozen=True)
class Key:
    """One entry of a legend."""

    label: str
    colour: str
    marker: str = ""
    dash: int = 0


@dataclass(frozen=True)
class Panel:
    """One SVG element with its heading."""

    heading: str
    svg: str


@dataclass(frozen=True)
class Picture:
    """A figure of the report: panels that share a legend, a scale and an explanation."""

    name: str
    title: str
    explanation: str
    keys: tuple[Key, ...]
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Axis:
    """A vertical axis; `mark` is a dotted line across the panel."""

    name: str
    log: bool = False
    limits: Limits | None = None
    mark: float | None = None


@dataclass(frozen=True)
class Line:
    """One placement (or one of its streams) in one panel, with the points of each seed."""

    look: Look
    seeds: tuple[Points, ...]
    dash: int = 0
    stream: str = ""

    @property
    def key(self) -> Key:
        name = f"{self.look.label}, {self.stream} stream" if self.stream else self.look.label
        return Key(name, self.look.colour, self.look.marker, self.dash)

    def over_seeds(self, function: Callable[[Sequence[float]], float]) -> Points:
        """Combine the seeds' values at every x where at least one seed has a value."""
        xs = sorted({x for points in self.seeds for x in points})
        return {x: function([points[x] for points in self.seeds if x in points]) for x in xs}


def by_rate(
    runs: Iterable[dict[str, Any]],
    look_of: Mapping[str, Look],
    points: Callable[[dict[str, Any]], Points],
    dash: int = 0,
    stream: str = "",
    stack: str = "",
) -> Lines:
    """Gather the seeds of each placement into a line, and the lines by learning rate; empty lines are left out."""
    seeds: dict[tuple[float, str], list[Points]] = {}
    for run in runs:
        if own := points(run):
            seeds.setdefault((run["lr"], run["placement"]), []).append(own)
    lines: Lines = {}
    for lr, placement in sorted(seeds, key=lambda group: (group[0], list(look_of).index(group[1]))):
        line = Line(look_of[placement], tuple(seeds[lr, placement]), dash, stream)
        lines.setdefault((lr, stack), []).append(line)
    return lines


def merge(*parts: Lines) -> Lines:
    """Put the lines of several gatherings into common panels."""
    stacks = list(dict.fromkeys(stack for part in parts for _, stack in part))
    groups = sorted({group for part in parts for group in part}, key=lambda group: (group[0], stacks.index(group[1])))
    return {group: [line for part in parts for line in part.get(group, [])] for group in groups}


def picture(
    name: str, title: str, explanation: str, lines: Lines, x: str, y: Axis, bands: bool = True
) -> Picture | None:
    """Draw one panel for each learning rate and stack, all on one scale; None when there is nothing to draw."""
    if not lines:
        return None
    limits = y.limits or common_limits(lines, y.log)
    panels = []
    for (lr, stack), own in lines.items():
        heading = f"learning rate {rate(lr)}" + (f", {stack}" if stack else "")
        description = f"{title}, {heading}: {y.name} by {x}; at the right end {join_words(right_ends(own))}."
        svg = draw(
            "-".join(filter(None, (name, rate(lr), stack))),
            description,
            lambda axes, own=own: paint(axes, own, x, y, limits, bands),
        )
        panels.append(Panel(heading, svg))
    drawn = [line for own in lines.values() for line in own]
    keys = list(dict.fromkeys(line.key for line in drawn if not line.look.quiet))
    if quiet := {line.look.label for line in drawn if line.look.quiet}:
        keys.append(others(len(quiet)))
    return Picture(name, title, explanation, tuple(keys), tuple(panels))


def others(n: int) -> Key:
    """The legend entry of all quiet placements.

    >>> others(23).label
    '23 others'
    """
    return Key(f"{n} other" if n == 1 else f"{n} others", GREY)


def right_ends(lines: Sequence[Line]) -> list[str]:
    """Say in words where the lines end; of the quiet ones only between which values."""
    last = [list(line.over_seeds(fmean).values())[-1] for line in lines]
    said = [f"{line.key.label} {short(v)}" for line, v in zip(lines, last, strict=True) if not line.look.quiet]
    rest = [v for line, v in zip(lines, last, strict=True) if line.look.quiet]
    return said + ([f"all other lines between {short(min(rest))} and {short(max(rest))}"] if rest else [])


def common_limits(lines: Mapping[Any, list[Line]], log: bool) -> Limits:
    """Return limits with a little air that hold every value of every panel."""
    found = values(lines)
    if log:
        low, high = max(floor(lines), min((v for v in found if v > 0), default=0.0)), max(found)
        if not high > 0:
            return 0.1, 1.0
        air = max((high / low) ** 0.06, 1.15)
        return low / air, high * air
    air = 0.06 * (max(found) - min(found)) or 0.1
    return min(found) - air, max(found) + air


def values(lines: Mapping[Any, list[Line]]) -> list[float]:
    """Every value of every panel."""
    return [v for own in lines.values() for line in own for points in line.seeds for v in points.values()]


def floor(lines: Mapping[Any, list[Line]]) -> float:
    """The lowest value that a logarithmic scale shows, so that one tiny value does not flatten all others."""
    return max(values(lines), default=0.0) / DEPTH


def paint(axes: Axes, lines: Sequence[Line], x: str, y: Axis, limits: Limits, bands: bool) -> None:
    """Draw lines, bands and the mark into one panel."""
    scale(axes, y, limits)
    if y.mark is not None:
        axes.axhline(y.mark, color=INK, linewidth=1, linestyle=(0, (1, 2)))
    loud = [line for line in lines if not line.look.quiet]
    for line in lines:
        if line.look.quiet:
            middle = line.over_seeds(fmean)
            axes.plot(list(middle), list(middle.values()), color=GREY, linewidth=0.9, alpha=0.55)
    for i, line in enumerate(loud):
        middle = line.over_seeds(fmean)
        low, high = line.over_seeds(min), line.over_seeds(max)
        colour = line.look.colour
        if bands and len(line.seeds) > 1:
            axes.fill_between(list(low), list(low.values()), list(high.values()), color=colour, alpha=0.16, linewidth=0)
        every = max(1, len(middle) // 6)
        axes.plot(
            list(middle), list(middle.values()), color=colour, linestyle=DASHES[line.dash % len(DASHES)],
            marker=line.look.marker, markevery=(i * every // max(len(loud), 1) % every, every), markeredgecolor=PAPER,
            markeredgewidth=0.6,
        )  # fmt: skip
    axes.set_xlabel(x)
    axes.set_title(y.name)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def scale(axes: Axes, y: Axis, limits: Limits) -> None:
    """Set the vertical scale; labels are plain numbers on both kinds."""
    if y.log:
        axes.set_yscale("log")
        decades = math.log10(limits[1] / limits[0])
        subs = (1, 2, 5) if decades < 2 else (1, 3) if decades < 3 else (1,)
        axes.yaxis.set_major_locator(MaxNLocator(5) if decades < 0.8 else LogLocator(subs=subs))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: rate(value)))
    axes.set_ylim(limits)
