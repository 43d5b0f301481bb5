"""The wiring diagram: streams run to the right, branches hang below them, and every norm sits where it acts.

What is drawn is a ``Wiring`` (``report.wiring``). Layers that are wired alike are drawn once, in a frame that says
which ones they are. Lengths are in SVG's pixels; y grows downwards.
"""

from collections.abc import Sequence

from normstream.inspect.report.canvas import LINE_HEIGHT, NAME_SIZE, PILL_HEIGHT, Canvas, pill_width, text_width, wrap
from normstream.inspect.report.lanes import (
    TITLES,
    Pen,
    draw_branches,
    draw_sources,
    factor_on_lane,
    factor_slot,
    name_width,
    norm_on_stream,
    pill_on_lane,
)
from normstream.inspect.report.wiring import Branch, Mark, Section, Target, Wiring, ranges

STREAM_GAP = 40.0


def draw_wiring(wiring: Wiring) -> str:
    """One stack as an ``<svg>`` element."""
    rows = []
    last_layer = wiring.n_layers - 1
    for i, section in enumerate(wiring.sections):
        row = Canvas()
        pen = Pen(row, {stream: k * STREAM_GAP for k, stream in enumerate(wiring.streams)})
        if i == 0:
            _start(pen, wiring)
        else:
            pen.lead(30)
        lane = _section(pen, section)
        if last_layer in section.layers:
            _end(pen, wiring, lane)
        else:
            pen.lead(30)
            row.put("wire", "", (pen.x, 0.0))
        rows.append(row)
    picture = rows[0]
    for row in rows[1:]:
        picture.stacked(row, gap=26)
    if wiring.elsewhere:
        picture.stacked(_elsewhere(wiring.elsewhere, ""), gap=14)
    return picture.svg(describe(wiring))


def _start(pen: Pen, wiring: Wiring) -> None:
    """The embeddings, and how the streams start from them."""
    canvas, ys = pen.canvas, list(pen.ys.values())
    middle = sum(ys) / len(ys)
    names = [next(part for part in reversed(path.split(".")) if not part.isdecimal()) for path in wiring.embeddings]
    width = max([88.0, *(text_width(name, NAME_SIZE) + 16 for name in names)])
    height = 24 + LINE_HEIGHT * len(names)
    canvas.box(0, middle - height / 2, width, height)
    canvas.text(width / 2, middle - height / 2 + 16, "embedding", "title", 12.5)
    for i, name in enumerate(names):
        canvas.text(width / 2, middle - height / 2 + 29 + i * LINE_HEIGHT, name, "name", NAME_SIZE)
    pen.x = width
    if not wiring.embedding_factor.is_one:
        slot = factor_slot(wiring.embedding_factor)
        canvas.stream(pen.x, pen.x + slot, middle, 0)
        canvas.factor(pen.x + slot / 2, middle, wiring.embedding_factor)
        pen.x += slot
    fork = pen.x + 12
    if len(ys) > 1:
        canvas.stream(pen.x, fork, middle, 0)
        for y in ys:
            canvas.wire((fork, middle), (fork, y))
        pen.x = fork
    widths = [_target_on_stream(pen, target, pen.x) for target in wiring.start]
    begin = pen.x
    pen.x = max([begin + 16, *widths])
    for rank, y in enumerate(ys):
        canvas.stream(begin, pen.x, y, rank)


def _target_on_stream(pen: Pen, target: Target, x: float) -> float:
    """The factor and the norm with which a stream takes what comes, drawn on the stream; returns where they end."""
    y = pen.ys[target.stream]
    if not target.factor.is_one:
        slot = factor_slot(target.factor)
        pen.canvas.factor(x + slot / 2, y, target.factor)
        x += slot
    return norm_on_stream(pen, target.trunk, y, x) if target.trunk else x


def _section(pen: Pen, section: Section) -> float:
    """A frame with the branches of layers that are wired alike; returns the height of the first lane."""
    canvas = pen.canvas
    pen.layer_path = section.path
    frame_left = pen.x + 4
    for stream, y in pen.ys.items() if len(pen.ys) > 1 else ():
        canvas.text(frame_left + 12, y - 6, stream, "quiet")
    pen.lead(26)
    if not section.skip.is_one:
        slot = factor_slot(section.skip)
        for y in pen.ys.values():
            canvas.factor(pen.x + slot / 2, y, section.skip)
        pen.lead(slot)
    lane = draw_branches(pen, section.branches)
    pen.lead(26)
    top = -_room_above(section, pen)
    bottom = canvas.bottom + 14
    if section.elsewhere:
        own = _elsewhere(section.elsewhere, section.path)
        canvas.stacked(_moved(own, frame_left + 16), gap=10)
        bottom = canvas.bottom + 10
    canvas.box(frame_left, top, pen.x - 4 - frame_left, bottom - top, "frame")
    n = len(section.layers)
    title = f"{n} layers" if n > 1 else "1 layer"
    canvas.text(frame_left + 14, top - 8, title, "title left", 12.5)
    said = ranges(section.layers) + (", all the same modules" if section.is_shared else "")
    canvas.text(frame_left + 22 + text_width(title, 12.5), top - 8, said, "quiet left")
    return lane


def _room_above(section: Section, pen: Pen) -> float:
    """For the names of norms on the uppermost stream, or for factors."""
    first = next(iter(pen.ys))
    trunks = [target.trunk for branch in section.branches for target in branch.targets if target.stream == first]
    lines = max([len(wrap(pen.name(mark.path))) for mark in trunks if mark], default=0)
    return PILL_HEIGHT / 2 + 20 + LINE_HEIGHT * lines


def _moved(canvas: Canvas, right: float) -> Canvas:
    moved = Canvas()
    for layer, shapes in canvas.shapes.items():
        moved.shapes[layer].append(f'<g transform="translate({right:.1f} 0)">{"".join(shapes)}</g>')
    moved.cover(canvas.right + right, canvas.top)
    moved.cover(right, canvas.bottom)
    return moved


def _elsewhere(marks: Sequence[Mark], layer_path: str) -> Canvas:
    """Norms without a place, side by side."""
    canvas, x = Canvas(), 0.0
    words = "norms without a place in this drawing:"
    canvas.text(0, 4, words, "quiet left")
    x += text_width(words, 11) + 40
    for mark in marks:
        canvas.pill(x, 0, mark)
        name = mark.path.removeprefix(f"{layer_path}.")
        canvas.name(x, PILL_HEIGHT / 2 + 3, name)
        x += max(pill_width(mark), name_width(name)) + 20
    return canvas


def _end(pen: Pen, wiring: Wiring, lane: float) -> None:
    """The final norms and the head, or an arrow to whoever reads the result."""
    pen.layer_path = ""
    canvas = pen.canvas
    y = next(iter(pen.ys.values()))
    if len(pen.ys) > 1:
        pen.lead(20)
        begin = pen.x
        x = draw_sources(pen, wiring.sources, begin, lane)
        for rank, (stream, height) in enumerate(pen.ys.items()):
            canvas.stream(begin, max(begin, pen.taps[stream]), height, rank)
        for mark in wiring.final_norms:
            x = pill_on_lane(pen, mark, x, lane)
        y = lane
        canvas.wire((x, y), (x + 14, y), arrow=True)
        pen.x = x + 14
    else:
        pen.lead(12)
        for mark in wiring.final_norms:
            begin = pen.x
            pen.x = norm_on_stream(pen, mark, y, begin)
            canvas.stream(begin, pen.x, y, 0)
        canvas.stream(pen.x, pen.x + 12, y, 0)
        pen.x += 14
    if wiring.head is None:
        words = "to the cross-attention" if wiring.feeds_cross else "hidden"
        canvas.text(pen.x + 4, y + 4, words, "quiet left")
        return
    if wiring.head_norms:
        _before_head(pen, wiring, y)
    _head(pen, wiring, y)


def _before_head(pen: Pen, wiring: Wiring, y: float) -> None:
    """Matrices between the stream and the head, and the norms behind them."""
    names = [path.rsplit(".", 1)[-1] for path in wiring.before_head]
    width = max([56.0, *(text_width(name, NAME_SIZE) + 16 for name in names)])
    height = 24 + LINE_HEIGHT * len(names)
    pen.canvas.box(pen.x, y - height / 2, width, height)
    pen.canvas.text(pen.x + width / 2, y - height / 2 + 16, "matrix", "title", 12.5)
    for i, name in enumerate(names):
        pen.canvas.text(pen.x + width / 2, y - height / 2 + 29 + i * LINE_HEIGHT, name, "name", NAME_SIZE)
    pen.x += width
    for mark in wiring.head_norms:
        pen.x = pill_on_lane(pen, mark, pen.x, y)
    pen.canvas.wire((pen.x, y), (pen.x + 12, y), arrow=True)
    pen.x += 12


def _head(pen: Pen, wiring: Wiring, y: float) -> None:
    assert wiring.head is not None
    canvas, name = pen.canvas, wiring.head.rsplit(".", 1)[-1]
    width = max(66.0, text_width(name, NAME_SIZE) + 16, 92.0 if wiring.is_tied else 0.0)
    height = 48.0 if wiring.is_tied else 36.0
    canvas.box(pen.x, y - height / 2, width, height)
    canvas.text(pen.x + width / 2, y - height / 2 + 15, "head", "title", 12.5)
    canvas.text(pen.x + width / 2, y - height / 2 + 28, name, "name", NAME_SIZE)
    if wiring.is_tied:
        canvas.text(pen.x + width / 2, y - height / 2 + 41, "= embedding", "quiet", 10)
    pen.x += width
    pen.x = factor_on_lane(pen, wiring.logit_factor, pen.x, y)
    canvas.wire((pen.x, y), (pen.x + 16, y), arrow=True)
    canvas.text(pen.x + 20, y + 4, "logits", "quiet left")


def describe(wiring: Wiring) -> str:
    """The drawing in words, for whoever cannot see it."""
    parts = []
    for section in wiring.sections:
        steps = [_branch_words(branch) for branch in section.branches]
        parts.append(f"Layers {ranges(section.layers)}: {'; '.join(steps)}.")
    return f"Wiring of {wiring.stack}. {' '.join(parts)}"


def _branch_words(branch: Branch) -> str:
    inner = "".join(f", {mark.place} norm inside" for mark in branch.inner)
    before = "normed, " if branch.input_norms or any(source.norm for source in branch.sources) else ""
    after = ", normed" if branch.outputs else ""
    trunk = ", and the stream is normed after it" if any(target.trunk for target in branch.targets) else ""
    beside = "beside it, " if branch.is_parallel else ""
    streams = " and ".join(source.stream for source in branch.sources)
    targets = " and ".join(target.stream for target in branch.targets)
    return f"{beside}stream {streams}, {before}to the {TITLES[branch.kind]}{inner}{after}, added to {targets}{trunk}"
