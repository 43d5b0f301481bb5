"""The pictures of an inspection: what each one shows and, in one or two sentences, how to read it."""

from collections.abc import Callable, Iterable, Sequence
from math import exp, isfinite

from normstream.inspect.inspection import Growth, Inspection, LayerRow, LensRow, SublayerRow
from normstream.inspect.report.heat_map import Cells, heat_map
from normstream.lab.panels import Axis, Line, Picture, Points, common_limits
from normstream.lab.style import Look
from normstream.lab.svg import INK
from normstream.lab.theory.pictures import DOTTED, Sketch, line, picture

KIND_LOOKS = {
    "mixer": Look("mixer", "#0072b2", "o"),
    "ffn": Look("feed-forward", "#d96c00", "s"),
    "cross": Look("cross-attention", "#6200ff", "v"),
    "other": Look("other sublayer", "#9d0000", "P"),
}
STREAM_COLOURS = ("#008f6b", "#b0508c", "#0072b2", "#d96c00", "#6200ff", "#9d0000", "#b162ff", "#761489")
MARKERS = ("D", "^", "o", "s", "v", "P", "X", "<")
FP16_MAX = 65504.0
LAYER, BORDER = "layer", "after layers"


def pictures(inspection: Inspection) -> list[Picture]:
    """Every picture that the measurements allow, in the order of the report."""
    makers: tuple[Callable[[Inspection], Picture | None], ...] = (
        growth,
        headroom,
        direction,
        importance,
        gradients,
        massive,
        attention,
        lens,
        identity,
        ratio,
    )
    return [found for maker in makers if (found := maker(inspection))]


def stream_looks(inspection: Inspection) -> dict[tuple[str, str], Look]:
    """One look for every stream of every stack; a name says only what there are several of."""
    keys = list(dict.fromkeys((row.stack, row.stream) for row in (*inspection.sublayers, *inspection.growth)))
    several_stacks, several_streams = len({stack for stack, _ in keys}) > 1, len({stream for _, stream in keys}) > 1
    looks = {}
    for i, (stack, stream) in enumerate(keys):
        words = [f"stream {stream}"] if several_streams else []
        words += [stack] if several_stacks else []
        colour, marker = STREAM_COLOURS[i % len(STREAM_COLOURS)], MARKERS[i % len(MARKERS)]
        looks[stack, stream] = Look(", ".join(words) or "the stream", colour, marker)
    return looks


def growth(inspection: Inspection) -> Picture | None:
    """RMS of the streams with the fitted law, and of the updates."""
    looks = stream_looks(inspection)
    lines: list[Line] = []
    for law in inspection.growth:
        if look := looks.get((law.stack, law.stream)):
            lines.append(line(look, known(enumerate(law.sizes))))
    for law in inspection.growth:
        if law.sizes:
            lines.append(line(Look("fitted law", INK, ""), fitted(law), DOTTED))
    explanation = (
        "Left: the root mean square of the residual stream, from the first layer's input (0) to the last layer's "
        "output, and the law that fits it best. Right: that of what each sublayer adds. The larger the stream beside "
        "the updates, the less a layer can change it."
    )
    sketches = [
        Sketch("stream", lines, BORDER, Axis("root mean square", log=all_positive(lines))),
        by_kind("updates", inspection, lambda row: row.update_rms, Axis("root mean square", log=True)),
    ]
    return picture("growth", "Growth of the stream", explanation, sketches)


def fitted(law: Growth) -> Points:
    """The curve of a growth law.

    >>> fitted(Growth("main", "x", "linear", (1.0, 0.5), {}, sizes=(1.0, 1.4)))
    {0: 1.0, 1: 1.5}
    """
    first, *rest = law.coefficients
    curves: dict[str, Callable[[int], float]] = {
        "constant": lambda _: first,
        "linear": lambda layer: first + rest[0] * layer,
        "exponential": lambda layer: first * exp(rest[0] * layer),
    }
    return {layer: curves[law.law](layer) for layer in range(len(law.sizes))}


def headroom(inspection: Inspection) -> Picture | None:
    """Largest entry against fp16's limit, and what bfloat16 loses."""
    looks = stream_looks(inspection)
    lines = [
        line(look, by_layer([row for row in inspection.sublayers if (row.stack, row.stream) == key], largest))
        for key, look in looks.items()
    ]
    lines = [one for one in lines if one.seeds[0]]
    low, high = common_limits({0.0: lines}, log=True) if lines else (1.0, 1.0)
    limits = (low, max(high, 1.5 * FP16_MAX))
    explanation = (
        "Left: the largest entry of the stream; the dotted line is 65,504, where fp16 overflows. Right: the share of "
        "an update's entries that are below half a step of the stream in bfloat16, so that adding them changes "
        "nothing."
    )
    sketches = [
        Sketch("largest entry", lines, LAYER, Axis("max |h|", log=True, limits=limits, mark=FP16_MAX)),
        by_kind("lost in bfloat16", inspection, lambda row: row.lost_in_bf16, Axis("share of entries")),
    ]
    return picture("headroom", "Head-room", explanation, sketches)


def direction(inspection: Inspection) -> Picture | None:
    """Cosine of update and stream, and how far the stream turns."""
    explanation = (
        "Left: the cosine of what a sublayer adds and the stream that it reads, mean over tokens: 0 writes something "
        "new, below 0 takes away. Right: by how much the stream turns, arccos(cosine of before and after) / pi."
    )
    sketches = [
        by_kind("update and stream", inspection, lambda row: row.cosine, Axis("cosine", mark=0.0)),
        by_kind("block influence", inspection, lambda row: row.angular_distance, Axis("angular distance")),
    ]
    return picture("direction", "Direction of the updates", explanation, sketches)


def largest(rows: Sequence[SublayerRow]) -> float:
    """The largest entry of a stream in a layer."""
    return max(row.max_abs for row in rows)


def by_layer(rows: Iterable[SublayerRow], value: Callable[[Sequence[SublayerRow]], float]) -> Points:
    """One value for each layer, from all its rows."""
    groups: dict[int, list[SublayerRow]] = {}
    for row in rows:
        groups.setdefault(row.layer, []).append(row)
    return known((layer, value(own)) for layer, own in groups.items())


def by_kind(heading: str, inspection: Inspection, value: Callable[[SublayerRow], float], axis: Axis) -> Sketch:
    """A line for every kind of sublayer; stacks and streams differ by their dashes."""
    streams = list(stream_looks(inspection).items())
    lines = []
    for dash, ((stack, stream), look) in enumerate(streams):
        rows = [row for row in inspection.sublayers if (row.stack, row.stream) == (stack, stream)]
        for kind in dict.fromkeys(row.kind for row in rows):
            own = [row for row in rows if row.kind == kind]
            points = by_layer(own, lambda group: sum(map(value, group)) / len(group))
            lines.append(line(KIND_LOOKS[kind], points, dash, look.label if len(streams) > 1 else ""))
    lines = [one for one in lines if one.seeds[0]]
    return Sketch(heading, lines, LAYER, axis if not axis.log or all_positive(lines) else Axis(axis.name))


def all_positive(lines: Iterable[Line]) -> bool:
    """Whether a logarithmic axis can show them."""
    return all(value > 0 for one in lines for value in one.seeds[0].values())


def known(pairs: Iterable[tuple[int, float | None]]) -> Points:
    """The pairs whose value is a finite number."""
    return {x: value for x, value in pairs if value is not None and isfinite(value)}


def importance(inspection: Inspection) -> Picture | None:
    """The heat map: every measure of a layer's importance, each row on its own scale."""
    stacks = list(dict.fromkeys(row.stack for row in inspection.layers))
    panels = []
    for stack in stacks:
        rows = [row for row in inspection.layers if row.stack == stack]
        cells = importance_cells(inspection, rows)
        panels.append((f"{stack}" if len(stacks) > 1 else "", cells))
    explanation = (
        "Every row has its own scale, from white at 0 to its largest value. Influence is the angle by which the stream"
        " turns. A loss that falls when something is left out is orange. Layers that are pale in every row are the "
        "first to try to do without."
    )
    return heat_map("importance", "Importance of the layers", explanation, panels, LAYER)


def importance_cells(inspection: Inspection, rows: Sequence[LayerRow]) -> Cells:
    """Names and values of the rows of one stack."""
    columns = [row.layer for row in rows]
    found: dict[str, list[float | None]] = {
        **_influences(rows),
        "loss without the layer": [row.loss_increase for row in rows],
    }
    for kind, look in KIND_LOOKS.items():
        drops = {
            row.layer: row.loss_increase for row in inspection.drops if row.stack == rows[0].stack and row.kind == kind
        }
        if drops:
            found[f"loss without its {look.label}"] = [drops.get(layer) for layer in columns]
    found["gradient of its parameters"] = [row.gradient_norm for row in rows]
    found["Jacobian to identity"] = [row.jacobian_distance for row in rows]
    values = {name: row for name, row in found.items() if any(value is not None for value in row)}
    return Cells(tuple(values), tuple(map(str, columns)), tuple(map(tuple, values.values())))


def _influences(rows: Sequence[LayerRow]) -> dict[str, list[float | None]]:
    """The influence, one row for each stream."""
    streams = list(rows[0].influence_by_stream)
    if len(streams) < 2:
        return {"influence": [row.influence for row in rows]}
    return {f"influence on stream {name}": [row.influence_by_stream[name] for row in rows] for name in streams}


def _stream_gradients(inspection: Inspection) -> Sketch:
    """The gradient for what enters a layer, a line for each stream."""
    looks, lines = stream_looks(inspection), []
    for (stack, stream), look in looks.items():
        rows = [row for row in inspection.layers if row.stack == stack]
        points = known((row.layer, row.stream_gradient_norms.get(stream)) for row in rows)
        lines += [line(look, points)] if points else []
    return Sketch("stream", lines, LAYER, Axis("gradient norm", log=all_positive(lines)))


def gradients(inspection: Inspection) -> Picture | None:
    """Gradients and Jacobians by layer."""
    stacks = list(dict.fromkeys(row.stack for row in inspection.layers))

    def sketch(heading: str, value: Callable[[LayerRow], float | None], name: str) -> Sketch:
        lines = []
        for i, stack in enumerate(stacks):
            points = known((row.layer, value(row)) for row in inspection.layers if row.stack == stack)
            look = Look(stack if len(stacks) > 1 else "the stream", STREAM_COLOURS[i], MARKERS[i])
            lines += [line(look, points)] if points else []
        return Sketch(heading, lines, LAYER, Axis(name, log=all_positive(lines)))

    explanation = (
        "The norm of the loss's gradient for the parameters of each layer and for its input, and how far a layer is "
        "from passing its input on: the Frobenius norm of its Jacobian minus the skip connection, over the square root"
        " of the number of entries. On a flat line all layers learn alike."
    )
    sketches = [
        sketch("parameters", lambda row: row.gradient_norm, "gradient norm"),
        _stream_gradients(inspection),
        sketch("Jacobian", lambda row: row.jacobian_distance, "distance to the skip"),
    ]
    return picture("gradients", "Gradients and Jacobians", explanation, sketches)


def massive(inspection: Inspection) -> Picture | None:
    """Massive activations by layer; entries at one token and channel are one line."""
    places: dict[tuple[str, str, int, int], Points] = {}
    texts = {}
    for row in inspection.massive:
        places.setdefault((row.stream, row.stack, row.token, row.channel), {})[row.layer] = abs(row.value)
        texts[row.token] = f"token {row.token}" + (f" {row.text!r}" if row.text else "")
    top = sorted(places, key=lambda place: -max(places[place].values()))[: len(STREAM_COLOURS)]
    lines = [
        line(Look(f"{texts[place[2]]}, channel {place[3]}", colour, marker), places[place])
        for place, colour, marker in zip(top, STREAM_COLOURS, MARKERS, strict=False)
    ]
    explanation = (
        "Entries of the stream above 100 and above 1,000 times the median of their layer (Sun et al. 2024), the "
        "largest ones first. They sit in few channels and tokens, and attention uses them as a constant bias."
    )
    return picture("massive", "Massive activations", explanation, [Sketch("", lines, LAYER, Axis("|h|", log=True))])


def attention(inspection: Inspection) -> Picture | None:
    """The largest attention logit of every head."""
    panels = []
    groups = dict.fromkeys((row.stack, "cross" if ".cross" in row.name else "mixer") for row in inspection.heads)
    for stack, kind in groups:
        rows = [row for row in inspection.heads if row.stack == stack and (".cross" in row.name) == (kind == "cross")]
        heads = max(len(row.maxima) for row in rows)
        values = tuple(
            tuple(row.maxima[head] if head < len(row.maxima) else None for row in rows) for head in range(heads)
        )
        names = tuple(f"head {head}" for head in range(heads))
        heading = ", ".join(filter(None, (stack if stack != "main" else "", "cross-attention" * (kind == "cross"))))
        panels.append((heading, Cells(names, tuple(str(row.layer) for row in rows), values, one_scale=True)))
    explanation = (
        "The largest attention logit of each head, after scaling, cap and mask. Values beyond about 50 make the "
        "softmax all but hard, and are where training in low precision breaks first."
    )
    return heat_map("attention", "Largest attention logits", explanation, panels, LAYER)


def lens(inspection: Inspection) -> Picture | None:
    """The logit lens by layer."""
    keys = list(dict.fromkeys((row.stack, row.stream) for row in inspection.lens))

    def sketch(heading: str, value: Callable[[LensRow], float], name: str, mark: float | None = None) -> Sketch:
        lines = []
        for i, (stack, stream) in enumerate(keys):
            own = [row for row in inspection.lens if (row.stack, row.stream) == (stack, stream)]
            label = f"stream {stream}" if len(keys) > 1 else "the stream"
            look = Look(label, STREAM_COLOURS[i % 8], MARKERS[i % 8])
            points = known((row.layer, value(row)) for row in own)
            lines += [line(look, points)] if points else []
        return Sketch(heading, lines, LAYER, Axis(name, mark=mark))

    explanation = (
        "The final norm and the head on the stream as it leaves each layer: its loss (the dotted line is the model's),"
        " the KL divergence from the model's own prediction, and how often both rank the same token first."
    )
    sketches = [
        sketch("loss", lambda row: row.loss, "nats per token", inspection.loss),
        sketch("distance to the output", lambda row: row.kl_to_final, "KL (nats)"),
        sketch("same first token", lambda row: row.top1_agreement, "share of tokens"),
    ]
    return picture("lens", "Logit lens", explanation, sketches)


def identity(inspection: Inspection) -> Picture | None:
    """The residual identity with module outputs and with true updates."""
    keys = list(dict.fromkeys((row.stack, row.stream) for row in inspection.identity))
    lines = []
    for dash, (stack, stream) in enumerate(keys):
        own = [row for row in inspection.identity if (row.stack, row.stream) == (stack, stream)]
        name = stream_looks(inspection).get((stack, stream), Look("", "", "")).label if len(keys) > 1 else ""
        naive, true = Look("module outputs", "#d96c00", "s"), Look("what is added", "#0072b2", "o")
        for look, points in (
            (naive, known((row.layer, row.naive or None) for row in own)),
            (true, known((row.layer, row.true or None) for row in own)),
        ):
            lines += [line(look, points, dash, name)] if points else []
    explanation = (
        "How far layer output minus layer input is from the sum of the updates, relative to that sum: with what "
        "attention and feed-forward modules return, which most tools take, and with what is really added. Below 1e-5 "
        "is rounding."
    )
    y = Axis("relative error", log=True, limits=wide(lines))
    return picture("identity", "Residual identity", explanation, [Sketch("", lines, LAYER, y)])


def wide(lines: Sequence[Line]) -> tuple[float, float] | None:
    """Limits that show values many powers of ten apart."""
    values = [value for one in lines for value in one.seeds[0].values()]
    return (min(values) / 3, max(max(values) * 3, 1e-4)) if values else None


def ratio(inspection: Inspection) -> Picture | None:
    """Two-stream models: one stream's RMS over the other's."""
    points = known((row.layer, row.ratio) for row in inspection.ratios)
    lines = [line(Look("first stream / second stream", STREAM_COLOURS[0], "o"), points)] if points else []
    explanation = "RMS of the first stream over that of the second, leaving each layer; at 1 they are equally large."
    y = Axis("ratio", log=all_positive(lines))
    return picture("ratio", "Ratio of the two streams", explanation, [Sketch("", lines, LAYER, y)])
