"""How a sublayer is drawn: from the streams down to its lane, through its norms, and back up to the circled pluses.

Lengths are in SVG's pixels; y grows downwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from normstream.inspect.report.canvas import (
    ADD_RADIUS,
    LINE_HEIGHT,
    NAME_SIZE,
    PILL_HEIGHT,
    Canvas,
    pill_width,
    text_width,
    wrap,
)
from normstream.inspect.report.sublayer_box import SublayerBox
from normstream.inspect.report.wiring import Branch, Factor, Mark, Source, Target

LANE_GAP, LEAD = 14.0, 16.0
ADD_SLOT, STACK_STEP = 24.0, 76.0
TITLES = {"mixer": "token mixer", "ffn": "feed-forward", "cross": "cross-attention", "other": "sublayer"}


@dataclass
class Pen:
    """What is drawn on, where the streams run, and how far to the right the drawing has come."""

    canvas: Canvas
    ys: dict[str, float]
    x: float = 0.0
    layer_path: str = ""
    taps: dict[str, float] = field(default_factory=dict)
    """Where each stream was last read."""

    def lead(self, length: float) -> None:
        """Lets the streams run on."""
        for rank, y in enumerate(self.ys.values()):
            self.canvas.stream(self.x, self.x + length, y, rank)
        self.x += length

    def crossed(self, stream: str) -> tuple[float, ...]:
        """The streams that a line from below crosses on its way to ``stream``."""
        return tuple(y for y in self.ys.values() if y > self.ys[stream])

    def name(self, path: str) -> str:
        """A path without the layer's."""
        return path.removeprefix(f"{self.layer_path}.")


def factor_slot(factor: Factor) -> float:
    """The length of line that a factor takes; none where nothing is multiplied."""
    return 0.0 if factor.is_one else max(44.0, text_width(f"x {factor}", 11) + 16)


def draw_branches(pen: Pen, branches: Sequence[Branch]) -> float:
    """Branches one after the other; those that are parallel to one before share its tap and hang below it."""
    boxes = [SublayerBox(branch, TITLES[branch.kind], pen.name(branch.path)) for branch in branches]
    rooms = [_room(branch, box, pen.layer_path) for branch, box in zip(branches, boxes, strict=True)]
    lowest = max(pen.ys.values())
    lane = first_lane = lowest + 26 + max(above for above, _ in rooms)
    tap = fork = pen.x
    for i, (branch, box) in enumerate(zip(branches, boxes, strict=True)):
        if branch.is_parallel:
            lane += rooms[i - 1][1] + LANE_GAP + rooms[i][0]
        else:
            lane, tap = first_lane, pen.x
        begin = fork if branch.shares_input else tap
        entry = _enter(pen, branch, begin, lane, first_lane if branch.shares_input else None)
        fork = fork if branch.shares_input else entry[0]
        _body(pen, branch, box, entry[1], lane)
    return first_lane


def _room(branch: Branch, box: SublayerBox, path: str) -> tuple[float, float]:
    """How far a branch reaches above and below its lane."""
    several = len(branch.sources) > 1
    above = max(box.above, PILL_HEIGHT / 2 + (STACK_STEP / 2) * max(0, len(branch.input_norms) - 1))
    names = [mark.path.removeprefix(f"{path}.") for mark in (*branch.input_norms, *branch.outputs)]
    names += [source.norm.path.removeprefix(f"{path}.") for source in branch.sources if source.norm]
    lines = max([len(wrap(name)) for name in names], default=0)
    below = max(box.below, PILL_HEIGHT / 2 + 3 + LINE_HEIGHT * lines)
    return above + (44 if several else 0), below


def _enter(pen: Pen, branch: Branch, x: float, lane: float, fork_lane: float | None) -> tuple[float, float]:
    """From the streams to the sublayer. Returns where a second branch may fork off, and where the box begins."""
    if fork_lane is not None:
        pen.canvas.dot(x, fork_lane)
        pen.canvas.wire((x, fork_lane), (x, lane), (x + LEAD, lane))
        return x, x + LEAD
    x = draw_sources(pen, branch.sources, x, lane)
    x = _input_norms(pen, branch.input_norms, x, lane)
    fork = x
    return fork, factor_on_lane(pen, branch.input_factor, x, lane)


def factor_on_lane(pen: Pen, factor: Factor, x: float, lane: float) -> float:
    """A factor on a branch, if it is not 1; returns where the line goes on."""
    slot = factor_slot(factor)
    if slot:
        pen.canvas.wire((x, lane), (x + slot, lane))
        pen.canvas.factor(x + slot / 2, lane, factor)
    return x + slot


def draw_sources(pen: Pen, sources: Sequence[Source], x: float, lane: float) -> float:
    """Taps of the streams: the lowest comes along the lane, the others come down onto circled pluses."""
    canvas = pen.canvas
    *others, main = sorted(sources, key=lambda source: pen.ys[source.stream])
    y = pen.ys[main.stream]
    begin = x + LEAD
    pen.taps[main.stream] = x
    canvas.dot(x, y)
    canvas.wire((x, y), (x, lane), (begin, lane), crosses=_between(pen, y, lane))
    x = factor_on_lane(pen, main.factor, begin, lane)
    if main.norm:
        x = pill_on_lane(pen, main.norm, x, lane)
    for source in others:
        x += ADD_RADIUS + 6
        y = pen.ys[source.stream]
        pen.taps[source.stream] = x
        canvas.dot(x, y)
        canvas.wire((x - ADD_RADIUS - 6, lane), (x, lane))
        canvas.wire((x, y), (x, lane - ADD_RADIUS), arrow=True, crosses=_between(pen, y, lane))
        middle = (max(pen.ys.values()) + lane - ADD_RADIUS) / 2 - 2
        if source.norm:
            canvas.pill(x, middle, source.norm)
        elif not source.factor.is_one:
            canvas.factor(x, middle, source.factor, rises=True)
        canvas.add(x, lane)
        x += ADD_RADIUS
    return x


def _between(pen: Pen, y: float, lane: float) -> tuple[float, ...]:
    return tuple(other for other in pen.ys.values() if y < other < lane)


def pill_on_lane(pen: Pen, mark: Mark, x: float, lane: float) -> float:
    """A norm on a branch with its name below; returns where the line goes on."""
    name = pen.name(mark.path)
    slot = max(pill_width(mark) + 10, name_width(name) + 4)
    pen.canvas.wire((x, lane), (x + slot, lane))
    pen.canvas.pill(x + slot / 2, lane, mark)
    pen.canvas.name(x + slot / 2, lane + PILL_HEIGHT / 2 + 3, name)
    return x + slot


def _input_norms(pen: Pen, marks: Sequence[Mark], x: float, lane: float) -> float:
    """The norms before a sublayer: one on the lane, several beside each other."""
    if len(marks) < 2:
        return pill_on_lane(pen, marks[0], x, lane) if marks else x
    slot = max(max(pill_width(mark), name_width(pen.name(mark.path))) for mark in marks) + 24
    pen.canvas.dot(x, lane)
    for i, mark in enumerate(marks):
        y = lane + (i - (len(marks) - 1) / 2) * STACK_STEP
        pen.canvas.wire((x, lane), (x, y), (x + slot, y), (x + slot, lane))
        pen.canvas.pill(x + slot / 2, y, mark)
        pen.canvas.name(x + slot / 2, y + PILL_HEIGHT / 2 + 1, pen.name(mark.path))
    return x + slot


def _body(pen: Pen, branch: Branch, box: SublayerBox, x: float, lane: float) -> None:
    """The sublayer, the norms on its output, and the ways up to the streams."""
    canvas = pen.canvas
    canvas.wire((x, lane), (x + 12, lane), arrow=True)
    x = box.draw(canvas, x + 12, lane)
    for mark in branch.outputs:
        canvas.wire((x, lane), (x + 6, lane))
        x = pill_on_lane(pen, mark, x + 6, lane)
    alone = len(branch.targets) == 1
    if alone:
        x = factor_on_lane(pen, branch.targets[0].factor, x, lane)
    begin = pen.x
    x = _rises(pen, branch.targets, x, lane, with_factors=not alone)
    pen.x = begin
    pen.lead(max(x + 22, begin) - begin)


def _rises(pen: Pen, targets: Sequence[Target], x: float, lane: float, with_factors: bool) -> float:
    """From the lane up to the circled pluses, the lowest stream first; returns how far the drawing has come."""
    canvas, end = pen.canvas, pen.x
    for target in sorted(targets, key=lambda target: -pen.ys[target.stream]):
        y = pen.ys[target.stream]
        at = max(x + 12, end) + (30 if not target.skip.is_one else 0)
        canvas.wire((x, lane), (at, lane), (at, y + ADD_RADIUS), arrow=True, crosses=pen.crossed(target.stream))
        if len(targets) > 1 and target.stream != min(targets, key=lambda target: pen.ys[target.stream]).stream:
            canvas.dot(at, lane)
        if with_factors and not target.factor.is_one:
            canvas.factor(at, (max(pen.ys.values()) + lane) / 2, target.factor, rises=True)
        if not target.skip.is_one:
            canvas.factor(at - 26, y, target.skip)
        canvas.add(at, y)
        x, end = at, at + ADD_SLOT
        if with_factors:
            end += max(0.0, factor_slot(target.factor) - 22)
        if target.trunk:
            end = max(end, norm_on_stream(pen, target.trunk, y, at + ADD_RADIUS + 6))
    return end


def norm_on_stream(pen: Pen, mark: Mark, y: float, x: float) -> float:
    """A norm on a stream, its name above the uppermost stream and below the others."""
    name = pen.name(mark.path)
    slot = max(pill_width(mark), name_width(name)) + 14
    middle = x + slot / 2
    pen.canvas.pill(middle, y, mark)
    if y == min(pen.ys.values()):
        pen.canvas.name(middle, y - PILL_HEIGHT / 2 - 5, name, above=True)
    else:
        pen.canvas.name(middle, y + PILL_HEIGHT / 2 + 3, name)
    return x + slot


def name_width(name: str) -> float:
    """Width of a module's name in its lines."""
    return max(text_width(line, NAME_SIZE) for line in wrap(name))
