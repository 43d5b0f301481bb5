"""Pictures of result files, in the style of the lab's reports, as SVG files that stand alone."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, LogLocator, NullLocator

from benchmarks.tables import AXES, VARIANTS
from normstream.lab.style import COLOURS, GREY, MARKERS, label
from normstream.lab.svg import INK, STYLE

Record = Mapping[str, Any]
Paint = Callable[[Axes], None]
LOOKS = {
    "ours": ("#008f6b", "D"),
    "inductor": ("#0072b2", "o"),
    "liger": ("#b0508c", "^"),
    "quack": ("#d96c00", "s"),
    "eager": (GREY, "v"),
}


def picture(name: str, paints: Sequence[Paint], width: float, height: float) -> str:
    """One row of axes as an SVG document; the same input gives the same text.

    >>> picture("example", [lambda axes: None], 2.0, 1.0)[:5]
    '<?xml'
    """
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE | {"svg.hashsalt": name, "figure.facecolor": "#ffffff"})
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        for axes, paint in zip(figure.subplots(1, len(paints), squeeze=False)[0], paints, strict=True):
            paint(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def junctions(record: Record) -> str:
    """Share of the copy rate by placement, for the first size and each of its precisions."""
    size = record["rows"][0]["size"]
    here = [row for row in record["rows"] if row["size"] == size and "placement" in row]
    precisions = list(dict.fromkeys(row["precision"] for row in here))
    placements = list(dict.fromkeys(row["placement"] for row in here))[::-1]

    def paint(axes: Axes, precision: str) -> None:
        for name, (colour, marker) in LOOKS.items():
            rows = [row for row in here if row["precision"] == precision and row["variant"] == name]
            dots(
                axes,
                [placements.index(row["placement"]) for row in rows],
                [row["of_copy_rate"]["both"] for row in rows],
                colour,
                marker,
                VARIANTS[name],
            )
        axes.set_yticks(range(len(placements)), placements if precision == precisions[0] else [""] * len(placements))
        axes.set_xlim(0, 1)
        axes.set_title(f"{size.replace('x', ' x ')}, {precision}")
        axes.set_xlabel("of the copy rate")
        axes.grid(True, axis="x")

    paints: list[Paint] = [lambda axes, precision=precision: paint(axes, precision) for precision in precisions]
    paints[-1] = with_legend(paints[-1])
    return picture("junctions", paints, 2.2 + 2.6 * len(precisions), 0.9 + 0.33 * len(placements))


def step(record: Record) -> str | None:
    """The step of each variant over that of the reference, precision by precision; None if that was not measured."""
    rows = [row for row in record["rows"] if "to_reference" in row]
    if not rows:
        return None
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    names = list(dict.fromkeys(row["variant"] for row in rows))[::-1]

    def paint(axes: Axes, precision: str) -> None:
        own = [row for row in rows if row["precision"] == precision]
        axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (1, 2)))
        for row in own:
            placement = row["variant"].split("/")[0]
            look = (COLOURS.get(placement, GREY), MARKERS.get(placement, "o"))
            dots(axes, [names.index(row["variant"])], [row["to_reference"]], *look, "")
        axes.set_yticks(range(len(names)), names if precision == precisions[0] else [""] * len(names))
        axes.set_title(precision)
        axes.set_xlabel("step / step of pre/ops/compiled")
        axes.grid(True, axis="x")

    paints: list[Paint] = [lambda axes, precision=precision: paint(axes, precision) for precision in precisions]
    return picture("step", paints, 2.6 + 2.8 * len(precisions), 0.9 + 0.28 * len(names))


def scaling(record: Record) -> str:
    """Time of a step against each size, both axes logarithmic."""
    rows = record["rows"]
    axes_there = list(dict.fromkeys(row["axis"] for row in rows))

    def paint(axes: Axes, axis: str) -> None:
        for row in (row for row in rows if row["axis"] == axis):
            placement, points = row["placement"], row["points"]
            axes.plot(
                [point["point"] for point in points],
                [point["ms"][1] for point in points],
                label=label(placement),
                color=COLOURS.get(placement, GREY),
                marker=MARKERS.get(placement, "o"),
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator(places := points_of(rows, axis)))
        axes.xaxis.set_major_formatter(FixedFormatter([short(place) for place in places]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(AXES[axis])
        axes.grid(True)
        if axis == axes_there[0]:
            axes.set_ylabel("ms a step")

    paints: list[Paint] = [lambda axes, axis=axis: paint(axes, axis) for axis in axes_there]
    paints[0] = with_legend(paints[0])
    return picture("scaling", paints, 1.0 + 2.4 * len(axes_there), 2.8)


def points_of(rows: Sequence[Record], axis: str) -> list[int]:
    """The points of one axis, in order."""
    return sorted({point["point"] for row in rows if row["axis"] == axis for point in row["points"]})


def short(number: int) -> str:
    """A size as people write it.

    >>> short(512), short(32_768)
    ('512', '32k')
    """
    return f"{number // 1024}k" if number >= 1024 else str(number)


def dots(
    axes: Axes, places: Sequence[int], values: Sequence[Sequence[float]], colour: str, marker: str, name: str
) -> None:
    """Medians as markers, quartiles as a line through them, one row a place."""
    if not places:
        return
    axes.hlines(places, [q[0] for q in values], [q[2] for q in values], color=colour, linewidth=2.2)
    axes.plot([q[1] for q in values], places, marker, color=colour, label=name, markeredgecolor="#ffffff")


def with_legend(paint: Paint) -> Paint:
    """The same, and a legend beside it."""

    def painted(axes: Axes) -> None:
        paint(axes)
        axes.legend(frameon=False, fontsize=9)

    return painted
