"""The shapes that a wiring diagram is made of, as SVG that follows the page's light and dark colours."""

import itertools
import re
from dataclasses import dataclass, field

from markupsafe import escape

from normstream.inspect.report.wiring import Factor, Mark

PILL_HEIGHT, PILL_WIDTH = 30.0, 58.0
ADD_RADIUS, BEND = 9.0, 9.0
NAME_SIZE, LINE_HEIGHT = 9.5, 11.0
NAME_CHARACTERS = 15

LAYERS = ("frame", "line", "box", "wire", "top")
"""From the bottom to the top."""
COLOURS = {
    "pre": "#0072b2",
    "output": "#b0508c",
    "trunk": "#d96c00",
    "embedding": "#008f6b",
    "final": "#008f6b",
    "head": "#008f6b",
    "unknown": "#c02626",
}
INNER_COLOUR = "#7a8794"
KINDS = {"rms": "RMS", "layer": "LN"}
REMARKS = {"one_plus_w": "1 + w", "none": "no gain", "plain": ""}
SCOPES = {"per_head": "per head", "flattened": "all heads", "stream": "", "latent": ""}

STYLE = """
svg.wiring:root { font-family: system-ui, "Segoe UI", Roboto, Arial, sans-serif; }
@media (prefers-color-scheme: dark) {
  svg.wiring:root { --ink: #e6eaee; --muted: #a3afba; --grid: #333c45; }
  svg.wiring:root { --paper: #14191e; --box: #1c232a; --accent: #7cc4ee; }
}
.wiring text { font-family: inherit; fill: var(--ink, #1b242d); text-anchor: middle; }
.wiring .name { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 9.5px; }
.wiring .name, .wiring .quiet { fill: var(--muted, #5a6672); }
.wiring .quiet { font-size: 11px; }
.wiring .title { font-size: 12.5px; font-weight: 600; }
.wiring .kind { font-size: 12px; font-weight: 650; }
.wiring .remark { font-size: 8.5px; }
.wiring .left { text-anchor: start; }
.wiring .stream { fill: none; stroke: var(--ink, #1b242d); stroke-width: 3.5; stroke-linecap: round; }
.wiring .second { stroke: var(--accent, #0b5c8c); }
.wiring .wire { fill: none; stroke: var(--muted, #5a6672); stroke-width: 1.5; }
.wiring .gap { fill: none; stroke: var(--paper, #fff); stroke-width: 9; }
.wiring .head { fill: var(--muted, #5a6672); }
.wiring .dot { fill: var(--ink, #1b242d); }
.wiring .box { fill: var(--box, #f6f8f9); stroke: var(--muted, #5a6672); stroke-width: 1.2; }
.wiring .frame { fill: none; stroke: var(--grid, #e1e6ea); stroke-width: 2; }
.wiring .add { fill: var(--paper, #fff); stroke: var(--ink, #1b242d); stroke-width: 1.6; }
.wiring .under { fill: var(--paper, #fff); }
"""


def colour(place: str) -> str:
    """The colour of norms in a place; those inside a sublayer share a grey."""
    return COLOURS.get(place, INNER_COLOUR)


@dataclass
class Canvas:
    """Shapes in layers (the later ones on top) and the rectangle that they fill.

    >>> canvas = Canvas()
    >>> canvas.text(0, 0, "x", "quiet")
    >>> canvas.svg("A letter.")[:4]
    '<svg'
    """

    shapes: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in LAYERS})
    left: float = 0.0
    right: float = 0.0
    top: float = 0.0
    bottom: float = 0.0

    def cover(self, x: float, y: float) -> None:
        """Makes the picture hold a point."""
        self.left, self.right = min(self.left, x), max(self.right, x)
        self.top, self.bottom = min(self.top, y), max(self.bottom, y)

    def put(self, layer: str, shape: str, *corners: tuple[float, float]) -> None:
        """Adds a shape that reaches to the corners."""
        self.shapes[layer].append(shape)
        for x, y in corners:
            self.cover(x, y)

    def text(self, x: float, y: float, words: str, kind: str, size: float = 11.0) -> None:
        """One line of text around x (from x on for kinds with "left"), its baseline at y."""
        half = text_width(words, size) / 2
        ends = (x, x + 2 * half) if "left" in kind else (x - half, x + half)
        shape = f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'
        self.put("top", shape, (ends[0], y - size), (ends[1], y + 3))

    def stream(self, x0: float, x1: float, y: float, rank: int) -> None:
        """A piece of the stream number ``rank`` from the top."""
        second = " second" if rank else ""
        self.put("line", f'<path class="stream{second}" d="M{x0:.1f} {y:.1f}H{x1:.1f}"/>', (x0, y), (x1, y))

    def wire(self, *points: tuple[float, float], arrow: bool = False, crosses: tuple[float, ...] = ()) -> None:
        """A thin line with round corners, with an arrowhead at its end; it leaves a gap in lines that it crosses."""
        for y in crosses:
            x = next(a for (a, b), (_, d) in itertools.pairwise(points) if min(b, d) < y < max(b, d))
            self.put("wire", f'<path class="gap" d="M{x:.1f} {y - 5:.1f}V{y + 5:.1f}"/>')
        self.put("wire", f'<path class="wire" d="{round_path(points)}"/>', *points)
        if arrow:
            self.put("wire", f'<path class="head" d="{arrow_head(points[-2], points[-1])}"/>')

    def dot(self, x: float, y: float) -> None:
        """Where something is read."""
        self.put("top", f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>')

    def add(self, x: float, y: float) -> None:
        """A circled plus."""
        reach = ADD_RADIUS - 4
        circle = f'<circle class="add" cx="{x:.1f}" cy="{y:.1f}" r="{ADD_RADIUS:g}"/>'
        cross = f'<path class="add" d="M{x - reach:.1f} {y:.1f}h{2 * reach:g}M{x:.1f} {y - reach:.1f}v{2 * reach:g}"/>'
        self.put("top", circle + cross, (x - ADD_RADIUS, y - ADD_RADIUS), (x + ADD_RADIUS, y + ADD_RADIUS))

    def factor(self, x: float, y: float, factor: Factor, rises: bool = False) -> None:
        """An amplifier on a line that goes to the right, or up."""
        path = f"M{x - 6:.1f} {y - 7:.1f}L{x + 7:.1f} {y:.1f}L{x - 6:.1f} {y + 7:.1f}z"
        if rises:
            path = f"M{x - 7:.1f} {y + 6:.1f}L{x:.1f} {y - 7:.1f}L{x + 7:.1f} {y + 6:.1f}z"
        self.put("top", f'<path class="add" d="{path}"/>', (x - 7, y - 7), (x + 7, y + 7))
        if rises:
            self.text(x + 10, y + 4, f"\u00d7 {factor}", "quiet left")
        else:
            self.text(x, y - 11, f"\u00d7 {factor}", "quiet")

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box") -> None:
        """A rectangle with round corners from its upper left corner."""
        radius = 14 if kind == "frame" else 7
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.put(kind, f'<rect class="{kind}" {place} rx="{radius}"/>', (x, y), (x + width, y + height))

    def pill(self, x: float, y: float, mark: Mark) -> None:
        """A norm around a point: its kind, and below it what is special about it."""
        width, height, hue = pill_width(mark), PILL_HEIGHT, colour(mark.place)
        place = f'x="{x - width / 2:.1f}" y="{y - height / 2:.1f}" width="{width:.1f}" height="{height:g}" rx="12"'
        dashes = ' stroke-dasharray="4 3"' if mark.place in ("unknown", "no_effect") else ""
        shape = (
            f'<rect class="under" {place}/><rect {place} fill="{hue}" fill-opacity="0.16" stroke="{hue}" '
            f'stroke-width="1.6"{dashes}><title>{escape(tooltip(mark))}</title></rect>'
        )
        self.put("top", shape, (x - width / 2, y - height / 2), (x + width / 2, y + height / 2))
        below = remark(mark)
        self.text(x, y - 1 if below else y + 4, KINDS[mark.facts.kind], "kind")
        if below:
            self.text(x, y + 9.5, below, "remark", 8.5)

    def name(self, x: float, y: float, path: str, above: bool = False) -> None:
        """A module's path in small type below a point, or above it."""
        lines = wrap(path)
        first = y - LINE_HEIGHT * (len(lines) - 1) if above else y + NAME_SIZE
        for i, line in enumerate(lines):
            self.text(x, first + i * LINE_HEIGHT, line, "name", NAME_SIZE)

    def stacked(self, other: "Canvas", gap: float) -> None:
        """Puts another picture below this one."""
        down = self.bottom + gap - other.top
        for layer, shapes in other.shapes.items():
            self.shapes[layer].append(f'<g transform="translate(0 {down:.1f})">{"".join(shapes)}</g>')
        self.cover(other.left, other.top + down)
        self.cover(other.right, other.bottom + down)

    def svg(self, description: str, margin: float = 8.0) -> str:
        """The whole picture as an element of an HTML page; it also stands alone as a file."""
        width, height = self.right - self.left + 2 * margin, self.bottom - self.top + 2 * margin
        view = f"{self.left - margin:.1f} {self.top - margin:.1f} {width:.1f} {height:.1f}"
        label = escape(description)
        body = "\n".join(shape for shapes in self.shapes.values() for shape in shapes)
        return (
            f'<svg class="wiring" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" '
            f'viewBox="{view}" width="{width:.0f}" height="{height:.0f}" '
            f'style="max-width: 100%; min-width: {0.62 * width:.0f}px; height: auto">'
            f"<style>{STYLE}</style>\n{body}\n</svg>"
        )


def remark(mark: Mark) -> str:
    """What the small type in a norm says.

    >>> from normstream.inspect.anatomy import NormFacts
    >>> facts = NormFacts("n", "rms", "one_plus_w", False, 1e-6, "after_gain", 8, 32)
    >>> remark(Mark("q", "n", "per_head", facts))
    '1 + w, per head'
    """
    return ", ".join(filter(None, (REMARKS[mark.facts.gain], SCOPES[mark.scope])))


def tooltip(mark: Mark) -> str:
    """Everything about a norm in one line, shown when the mouse is on it."""
    facts = mark.facts
    eps = "eps unknown" if facts.eps is None else f"eps {facts.eps:.3g}"
    parts = (mark.path, KINDS[facts.kind], remark(mark), "bias" if facts.has_bias else "", eps, f"width {facts.width}")
    return ", ".join(filter(None, parts))


def pill_width(mark: Mark) -> float:
    """Wide enough for what is written in it."""
    return max(PILL_WIDTH, text_width(remark(mark), 8.5) + 16)


def text_width(words: str, size: float) -> float:
    """About as wide as text is in a typeface on the wide side."""
    return 0.61 * size * len(words)


def wrap(path: str, most: int = NAME_CHARACTERS) -> list[str]:
    """A path in lines, broken behind dots and underscores.

    >>> wrap("post_attention_layernorm"), wrap("attention.output.LayerNorm")
    (['post_attention_', 'layernorm'], ['attention.', 'output.', 'LayerNorm'])
    """
    lines = [""]
    for part in re.findall(r"[^._]+[._]*|[._]+", path):
        if lines[-1] and len(lines[-1] + part) > most:
            lines.append("")
        lines[-1] += part
    return lines


def round_path(points: tuple[tuple[float, float], ...]) -> str:
    """Straight pieces along the axes, joined by quarter circles."""
    d = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (xa, ya), (xb, yb), (xc, yc) in zip(points, points[1:], points[2:], strict=False):
        before, after = _toward((xb, yb), (xa, ya)), _toward((xb, yb), (xc, yc))
        d += f"L{before[0]:.1f} {before[1]:.1f}Q{xb:.1f} {yb:.1f} {after[0]:.1f} {after[1]:.1f}"
    return d + f"L{points[-1][0]:.1f} {points[-1][1]:.1f}"


def _toward(corner: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    """The point that lies a bend's radius from a corner on the way to an end, or half of the way."""
    dx, dy = end[0] - corner[0], end[1] - corner[1]
    length = abs(dx) + abs(dy)
    share = min(BEND, length / 2) / length if length else 0.0
    return corner[0] + share * dx, corner[1] + share * dy


def arrow_head(start: tuple[float, float], end: tuple[float, float]) -> str:
    """A small triangle with its tip at the end of a piece."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = abs(dx) + abs(dy)
    ux, uy = dx / length, dy / length
    x, y = end
    back = x - 7 * ux, y - 7 * uy
    return (
        f"M{x:.1f} {y:.1f}L{back[0] - 3.5 * uy:.1f} {back[1] + 3.5 * ux:.1f}"
        f"L{back[0] + 3.5 * uy:.1f} {back[1] - 3.5 * ux:.1f}z"
    )
