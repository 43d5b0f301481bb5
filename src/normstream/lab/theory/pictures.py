"""The pictures of the theory report: measured lines, and dotted ones for what a paper predicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.ticker import NullLocator

from normstream.lab.panels import (
    Axis,
    Line,
    Panel,
    Picture,
    Points,
    common_limits,
    others,
    paint,
    right_ends,
)  # fmt: skip
from normstream.lab.style import FAMILIAR, MANY, SPARE_COLOURS, SPARE_MARKERS, Look, join_words, looks
from normstream.lab.svg import INK, draw
from normstream.lab.theory.predictions import ffn_growth, pre_norm_growth

Found = dict[str, Any]
SUBLAYER, BLOCK, BLOCKS = "after sublayer", "block", "number of blocks"
DOTTED = 2


@dataclass(frozen=True)
class Sketch:
    """One panel before it is drawn."""

    heading: str
    lines: list[Line]
    x: str
    y: Axis


def pictures(found: Found) -> list[Picture]:
    """Every picture that the measurements allow, in the order of the report."""
    look_of = placement_looks(found)
    deepest = max(one["depth"] for one in found["measured"])
    deep = [one for one in found["measured"] if one["depth"] == deepest]
    drawn = [
        hidden(found, deep, look_of),
        gradient(found, deep, look_of),
        jacobian(deep, look_of),
        norm_jacobian(deep, look_of),
        update(found, look_of),
        siamese(found),
    ]
    return [picture for picture in drawn if picture]


def placement_looks(found: Found) -> dict[str, Look]:
    """Colours and markers; of many placements only the familiar ones stand out."""
    names = list(dict.fromkeys(row["placement"] for row in (*found["measured"], *found["updates"])))
    return looks(names, FAMILIAR if len(names) > MANY else None)


def picture(name: str, title: str, explanation: str, sketches: Sequence[Sketch]) -> Picture | None:
    """Draw panels of different quantities side by side, each on its own scale."""
    panels, lines = [], []
    for i, sketch in enumerate(sketches):
        if not sketch.lines:
            continue
        limits = sketch.y.limits or common_limits({0.0: sketch.lines}, sketch.y.log)
        description = (
            f"{title}: {sketch.y.name} by {sketch.x}; at the right end {join_words(right_ends(sketch.lines))}."
        )
        svg = draw(f"{name}-{i}", description, lambda axes, s=sketch, limits=limits: paint_sketch(axes, s, limits))
        panels.append(Panel(sketch.heading, svg))
        lines += sketch.lines
    if not panels:
        return None
    keys = [visible(line) for line in lines if not line.look.quiet]
    if quiet := {line.look.label for line in lines if line.look.quiet}:
        keys.append(others(len(quiet)))
    return Picture(name, title, explanation, tuple(dict.fromkeys(keys)), tuple(panels))


def paint_sketch(axes: Any, sketch: Sketch, limits: tuple[float, float]) -> None:
    """Draw one panel."""
    paint(axes, sketch.lines, sketch.x, sketch.y, limits, bands=False)
    if sketch.x == BLOCKS:
        axes.set_xscale("log")  # a power of the depth is a straight line
        depths = sorted({depth for line in sketch.lines for depth in line.seeds[0]})
        axes.set_xticks(depths, [str(depth) for depth in depths])
        axes.xaxis.set_minor_locator(NullLocator())


def visible(line: Line) -> Any:
    """The legend entry of a line; the colour of ink follows the page."""
    return replace(line.key, colour="currentColor") if line.look.colour == INK else line.key


def line(look: Look, values: Points, dash: int = 0, name: str = "") -> Line:
    """One line; ``name`` tells it from others of the same placement."""
    return Line(replace(look, label=f"{look.label}, {name}") if name else look, (values,), dash)


def predicted(label: str, values: Points) -> Line:
    """A dotted line in ink."""
    return Line(Look(label, INK, ""), (values,), DOTTED)


def numbered(values: Sequence[float], first: int = 0) -> Points:
    """Values by position."""
    return dict(enumerate(values, first))


def stream_lines(deep: Sequence[Found], key: str, look_of: Mapping[str, Look]) -> list[Line]:
    """A line for every stream of every placement."""
    drawn = []
    for one in deep:
        several = len(one["streams"]) > 1
        for dash, stream in enumerate(one["streams"]):
            values = numbered(one[key][stream])
            drawn.append(line(look_of[one["placement"]], values, dash, f"{stream} stream" if several else ""))
    return drawn


def hidden(found: Found, deep: Sequence[Found], look_of: Mapping[str, Look]) -> Picture | None:
    """Mean square of every stream by depth."""
    drawn = stream_lines(deep, "square", look_of)
    explanation = (
        "The mean square of an entry of each residual stream, E||x||^2 / d, before the first sublayer (0) and "
        "after each."
    )
    config, depth = found["config"], deep[0]["depth"]
    if config["model"] == "xiong":
        ratio = 1.0 if config["ffn_ratio"] is None else config["ffn_ratio"]
        growth = pre_norm_growth(depth, config["tokens"], ffn_growth(ratio))
        drawn.append(predicted("predicted for Pre-Norm", {2 * layer: square for layer, square in enumerate(growth)}))
        explanation += (
            " The dotted line is Lemma 2 as an equality for this number of tokens in the limit of a wide model. "
            "Post-Norm ends every sublayer with a norm, so it stays at 1."
        )
    sketch = Sketch(f"{depth} blocks", drawn, SUBLAYER, Axis("mean square", log=True))
    return picture("hidden", "Size of the streams", explanation, [sketch])


def gradient(found: Found, deep: Sequence[Found], look_of: Mapping[str, Look]) -> Picture | None:
    """Gradient of the feed-forward's output matrix by block, and of the last one by depth."""
    by_block = [line(look_of[one["placement"]], numbered(one["gradient"]["ffn"], 1)) for one in deep]
    by_depth = [
        line(look, {one["depth"]: one["gradient"]["ffn"][-1] for one in found["measured"] if one["placement"] == name})
        for name, look in look_of.items()
        if any(one["placement"] == name for one in found["measured"])
    ]
    if found["config"]["model"] == "xiong":
        (pre,) = (one for one in deep if one["placement"] == "pre")
        squares = pre["square"]["x"][2::2]
        constant = sum(pre["gradient"]["ffn"]) / sum(square**-0.5 for square in squares)
        values: Points = {block: constant * square**-0.5 for block, square in enumerate(squares, 1)}
        by_block.append(predicted("c / sqrt(E||x||^2 / d) of Pre-Norm", values))
    explanation = (
        "Norm of the loss's gradient for the output matrix of a block's feed-forward. Left: in every block of "
        "the deepest model; right: in the last block, against the number of blocks. Theorem 1 is the right-hand "
        "panel: under Post-Norm the last gradient does not shrink with depth, under Pre-Norm it falls as the "
        "stream grows."
    )
    y = Axis("gradient norm", log=True)
    left = Sketch(f"every block of {deep[0]['depth']}", by_block, BLOCK, y)
    depths = [Sketch("last block", by_depth, BLOCKS, y)] if len({one["depth"] for one in found["measured"]}) > 1 else []
    return picture("gradient", "Gradient of the feed-forward's output matrix", explanation, [left, *depths])


def jacobian(deep: Sequence[Found], look_of: Mapping[str, Look]) -> Picture | None:
    """Effective Jacobians from the embedding to every border, and from every border to the output."""
    explanation = (
        "Frobenius norm of the Jacobian over all positions at once, divided by sqrt(n d): 1 for the identity. Left: "
        "how much the streams after a sublayer move when the embedding does. Right: how much the final hidden "
        "vectors move when one stream at that depth does. The table has the two combined, output to embedding."
    )
    y = Axis("||J||_F / sqrt(n d)", log=True)
    left = Sketch("embedding to streams", stream_lines(deep, "from_embedding", look_of), SUBLAYER, y)
    right = Sketch("streams to output", stream_lines(deep, "to_output", look_of), SUBLAYER, y)
    return picture("jacobian", "Effective Jacobians", explanation, [left, right])


def norm_jacobian(deep: Sequence[Found], look_of: Mapping[str, Look]) -> Picture | None:
    """Spectral norm of the Jacobian of the norms of the junctions."""
    drawn = []
    for one in deep:
        look = look_of[one["placement"]]
        roles: dict[str, Points] = {}
        for norm in one["norms"]:
            if (role := junction_role(norm["name"])) and norm["norm"] > 0:
                roles.setdefault(role, {})[norm["border"]] = norm["norm"]
        drawn += [line(look, values, dash, role) for dash, (role, values) in enumerate(roles.items())]
    explanation = (
        "Largest factor by which a norm stretches a change of its input: sqrt(d) / ||x - mean(x)|| for a "
        "LayerNorm with gain 1, so it is 1 for an input of unit mean square and falls as the input grows. By "
        "the norm's name in the junction; sublayer 0 stands for the embedding."
    )
    y = Axis("spectral norm", log=True)
    return picture("norm-jacobian", "Jacobian of each norm", explanation, [Sketch("", drawn, SUBLAYER, y)])


def junction_role(name: str) -> str:
    """A norm's place in its junction; empty for one inside a sublayer.

    >>> junction_role("layers.3.after_attention.read.norm_y"), junction_role("layers.0.attention.q_norm")
    ('read.norm_y', '')
    """
    for part in ("join.", "read."):
        if part in name:
            return name[name.index(part) :]
    return ""


def update(found: Found, look_of: Mapping[str, Look]) -> Picture | None:
    """How far one step moves the output, by depth."""
    rows = found["updates"]
    if len({row["depth"] for row in rows}) < 2:
        return None

    def lines(kind: str) -> list[Line]:
        return [
            line(look, {row["depth"]: row[kind] for row in rows if row["placement"] == name})
            for name, look in look_of.items()
        ]

    explanation = (
        "RMS change of the final hidden vectors in one first step, divided by its learning rate, which is tiny. "
        "DeepNorm's constants keep the step that SGD makes with the matrices independent of depth, as DeepNet's "
        "theorem says. The theorem is not about Adam, nor about the gains and biases of the norms."
    )
    y = Axis("update / learning rate", log=True)
    sketches = [
        Sketch("SGD, matrices", lines("sgd"), BLOCKS, y),
        Sketch("Adam, matrices", lines("adam"), BLOCKS, y),
        Sketch("SGD, gains and biases of norms", lines("sgd_norms"), BLOCKS, y),
    ]
    return picture("update", "How far the first step moves the model", explanation, sketches)


def siamese(found: Found) -> Picture | None:
    """cos(X, N(Y)) by sublayer."""
    rows = found["siamese"]
    drawn = [
        line(Look(f"1/c = {row['formula']}", colour, marker), numbered(row["cosine"]))
        for row, colour, marker in zip(rows, SPARE_COLOURS, SPARE_MARKERS, strict=False)
    ]
    drawn += [predicted("orthogonal updates, closed form", numbered(row["predicted"])) for row in rows]
    explanation = (
        "Cosine between SiameseNorm's two streams, X and the normed Y, for random updates of RMS 1 that ignore "
        "the streams. With 1/sqrt(s+1) the two are the same vector: the constant is the dilution that an "
        "added-up stream has anyway."
    )
    y = Axis("cos(X, N(Y))", limits=(0.0, 1.04))
    return picture(
        "siamese", "SiameseNorm: are X and N(Y) the same vector?", explanation, [Sketch("", drawn, SUBLAYER, y)]
    )
