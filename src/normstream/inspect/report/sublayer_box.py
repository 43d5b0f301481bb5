"""A sublayer as a box: its kind, its module, and the norms inside it on the strands that they act on."""

from collections.abc import Iterable, Sequence

from normstream.inspect.report.canvas import Canvas, pill_width, text_width
from normstream.inspect.report.wiring import Branch, Mark

HEADING, STRAND_STEP, FORK, LETTER = 36.0, 36.0, 18.0, 24.0
STRANDS = ("q", "k", "v")


class SublayerBox:
    """Measures and draws one sublayer.

    A mixer with norms on queries, keys, values or their latent vectors shows the three strands; a norm before the
    output matrix sits behind them.
    """

    def __init__(self, branch: Branch, title: str, name: str) -> None:
        self.title, self.name, self.kind = title, name, branch.kind
        by_place: dict[str, list[Mark]] = {}
        for mark in branch.inner:
            by_place.setdefault(mark.place, []).append(mark)
        self.strands = {place: by_place.get(place, []) for place in STRANDS}
        self.latents = {place: by_place.get(place, []) for place in ("latent_q", "latent_kv")}
        self.behind = by_place.get("sub", [])
        self.aside = by_place.get("no_effect", [])
        self.context = by_place.get("context", [])
        self.has_strands = any(self.strands.values()) or any(self.latents.values())
        rows = 3 if self.has_strands else 1
        strand_room = rows * STRAND_STEP if self.has_strands or self.behind else 0.0
        self.above = HEADING + strand_room / 2 if strand_room else 26.0
        self.below = (strand_room / 2 if strand_room else 26.0) + (STRAND_STEP if self.aside else 0.0)
        if self.kind == "cross":
            self.below += 48.0

    @property
    def width(self) -> float:
        """From the left to the right edge."""
        inside = self._inner_width() + 24
        words = (text_width(self.title, 12.5), text_width(self.name, 9.5), _row(self.aside))
        return max(96.0, inside, *(width + 20 for width in words))

    def draw(self, canvas: Canvas, x: float, lane: float) -> float:
        """Draws the box with its left edge at x and its strands around the lane; returns its right edge."""
        width = self.width
        floor = self.below - (48.0 if self.kind == "cross" else 0.0)
        canvas.box(x, lane - self.above, width, self.above + floor)
        baseline = lane - self.above + 17 if self.has_strands or self.behind else lane - 3
        canvas.text(x + width / 2, baseline, self.title, "title", 12.5)
        canvas.text(x + width / 2, baseline + 13, self.name, "name", 9.5)
        if self.has_strands or self.behind:
            self._inside(canvas, x, lane, width)
        if self.aside:
            _line_of_pills(canvas, self.aside, x + 10, lane + floor - STRAND_STEP / 2 - 2)
        if self.kind == "cross":
            self._context(canvas, x + width / 2, lane + floor)
        return x + width

    def _inside(self, canvas: Canvas, x: float, lane: float, width: float) -> None:
        end = x + width
        left = x + (width - self._inner_width()) / 2
        canvas.wire((x, lane), (left, lane))
        right = self._strands(canvas, left, lane) if self.has_strands else left
        right = _line_of_pills(canvas, self.behind, right, lane)
        canvas.wire((right, lane), (end, lane))

    def _inner_width(self) -> float:
        strands = 2 * FORK + LETTER + _widest(self.latents.values()) + _widest(self.strands.values())
        return (strands if self.has_strands else 0.0) + _row(self.behind)

    def _strands(self, canvas: Canvas, x: float, lane: float) -> float:
        """Queries, keys and values from a fork to where they meet."""
        latent, normed = _widest(self.latents.values()), _widest(self.strands.values())
        ys = dict(zip(STRANDS, (lane - STRAND_STEP, lane, lane + STRAND_STEP), strict=True))
        shared = (ys["k"] + ys["v"]) / 2
        split = x + FORK + latent
        if self.latents["latent_kv"]:
            canvas.wire((x, lane), (x + 6, lane), (x + 6, shared), (split, shared))
            _line_of_pills(canvas, self.latents["latent_kv"], x + FORK, shared)
            starts = {"q": (x, lane), "k": (split, shared), "v": (split, shared)}
        else:
            starts = dict.fromkeys(STRANDS, (x, lane))
        meet = split + LETTER + normed + FORK
        for strand, y in ys.items():
            begin, height = starts[strand]
            canvas.wire((begin, height), (begin + 6, height), (begin + 6, y), (meet - 6, y), (meet - 6, lane))
            canvas.text(split + 15, y - 4, strand, "quiet", 11)
            _line_of_pills(canvas, self.strands[strand], split + LETTER, y)
        if self.latents["latent_q"]:
            _line_of_pills(canvas, self.latents["latent_q"], x + FORK, ys["q"])
        canvas.wire((meet - 6, lane), (meet, lane))
        return meet

    def _context(self, canvas: Canvas, x: float, y: float) -> None:
        """What comes from the other stack, from below."""
        canvas.wire((x, y + 34), (x, y), arrow=True)
        if self.context:
            canvas.pill(x, y + 20, self.context[0])
        canvas.text(x, y + 45, "from the other stack", "quiet")


def _row(marks: Sequence[Mark]) -> float:
    """The length of norms one behind the other."""
    return sum(pill_width(mark) + 10 for mark in marks)


def _widest(rows: Iterable[Sequence[Mark]]) -> float:
    return max(map(_row, rows), default=0.0)


def _line_of_pills(canvas: Canvas, marks: Sequence[Mark], x: float, y: float) -> float:
    """Norms one behind the other on a line; returns where it ends."""
    for mark in marks:
        slot = pill_width(mark) + 10
        canvas.wire((x, y), (x + slot, y))
        canvas.pill(x + slot / 2, y, mark)
        x += slot
    return x
