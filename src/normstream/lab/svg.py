"""Matplotlib pictures as small SVG fragments to be placed inside a page: real text, no ids to clash, no dates."""

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Stand-ins that the page's style sheet takes over, so that pictures follow its light and dark colours.
INK, MUTED, GRID, PAPER = "#102030", "#607080", "#d0d8e0", "#fefefe"
VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", PAPER: "var(--paper)"}

STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.labelsize": 11,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "text.color": INK,
}


def draw(name: str, description: str, paint: Callable[[Axes], None], width: float = 5.0, height: float = 3.3) -> str:
    """Paint on fresh axes (size in inches) and return an `<svg>` element; the same input gives the same text.

    >>> svg = draw("example", "A line that rises.", lambda axes: axes.plot([0, 1], [0, 1]))
    >>> svg[:4], 'aria-label="A line that rises."' in svg
    ('<svg', True)
    """
    with mpl.rc_context():
        mpl.rcdefaults()  # a reader's own matplotlibrc must not change the report
        mpl.rcParams.update(STYLE | {"svg.hashsalt": name})
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure.subplots())
        text = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=metadata)
    return fragment(text.getvalue(), description)


def fragment(document: str, description: str) -> str:
    """Turn a whole SVG document into an element for an HTML page."""
    svg = document[document.index("<svg") :].strip()
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = svg.replace("xlink:href", "href")
    used = set(re.findall(r"#([^\")]+)[\")]", svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", svg)
    # text keeps its size and takes the page's font; how the two are written depends on matplotlib's version
    svg = re.sub(r"font: [^;\"]*?(\d[\d.]*px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, variable)
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box, "matplotlib always writes a viewBox"
    label = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    svg = re.sub(r"<svg[^>]*>", lambda _: f'<svg role="img" aria-label="{label}" {view_box[0]}>', svg, count=1)
    return re.sub(r"\n\s*", "\n", svg)
