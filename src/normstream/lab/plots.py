"""The pictures of the report: what each one shows and, in one or two sentences, how to read it."""

from collections.abc import Mapping, Sequence
from typing import Any

from normstream.lab.matrix import chosen_looks
from normstream.lab.panels import DEPTH, Axis, Limits, Picture, Points, by_rate, floor, merge, picture, values
from normstream.lab.rate_plot import loss_by_rate
from normstream.lab.style import Look, number, rate
from normstream.lab.summary import SPIKE_MEANING

Run = dict[str, Any]
LOSS = "validation loss (nats per token)"


def pictures(summary: dict[str, Any]) -> list[Picture]:
    """Return every picture that the finished runs of a summary allow, in the order of the report.

    >>> pictures({"data": {"unigram_loss": None}, "runs": []})
    []
    """
    runs = [run for run in summary["runs"] if run["status"] == "finished"]
    look_of = chosen_looks(summary)
    unigram_loss = summary["data"]["unigram_loss"]
    drawn = [
        validation_loss(runs, look_of, unigram_loss),
        loss_by_rate(runs, look_of, unigram_loss, loss_limits(runs, unigram_loss)),
        gradient_over_time(runs, look_of),
        gradient_by_layer(runs, look_of),
        rms_by_layer(runs, look_of),
        stream_ratio(runs, look_of),
    ]
    return [picture for picture in drawn if picture]


def validation_loss(runs: list[Run], look_of: Mapping[str, Look], unigram_loss: float | None) -> Picture | None:
    """Validation loss against step."""
    lines = by_rate(runs, look_of, lambda run: known(run["curve"]["val_step"], run["curve"]["val_loss"]))
    bands = not any(look.quiet for look in look_of.values())  # those of many lines would hide the lines
    explanation = "Lower is better. A line is the mean over seeds" + (
        "; its band runs from the lowest seed to the highest." if bands else "."
    )
    if unigram_loss is not None:
        explanation += (
            f" The dotted line, {number(unigram_loss, 2)}, is reached by knowing only how frequent each token is: "
            "a run that stays there has learned nothing about the text."
        )
    y = Axis(LOSS, limits=loss_limits(runs, unigram_loss), mark=unigram_loss)
    return picture("validation-loss", "Validation loss while training", explanation, lines, "step", y, bands)


def gradient_over_time(runs: list[Run], look_of: Mapping[str, Look]) -> Picture | None:
    """Global gradient norm against step."""
    lines = by_rate(runs, look_of, lambda run: known(run["curve"]["step"], run["curve"]["grad_norm"]))
    explanation = (
        "The norm of the whole gradient before clipping, its mean over seeds on a logarithmic scale. A calm line is "
        f"healthy; peaks show where training came close to breaking. The table counts as a spike {SPIKE_MEANING}."
    )
    y = Axis("gradient norm", log=True)
    return picture("gradient-norm", "Gradient norm while training", explanation, lines, "step", y, bands=False)


def gradient_by_layer(runs: list[Run], look_of: Mapping[str, Look]) -> Picture | None:
    """Gradient norm of each layer's parameters."""
    lines = by_rate(runs, look_of, lambda run: by_depth(run["layers"]["grad_norm"]) if run["layers"] else {})
    explanation = (
        f"How much gradient reaches the parameters of each layer, {when(runs)}. On a flat line all layers learn alike; "
        "a slope says that the first or the last layers get less."
    )
    if any(value < floor(lines) for value in values(lines)):
        explanation += (
            f" The picture ends at {rate(1 / DEPTH)} times its largest value; a line that leaves it goes on below."
        )
    y = Axis("gradient norm", log=True)
    return picture("gradient-by-layer", "Gradient norm by layer", explanation, lines, "layer", y)


def rms_by_layer(runs: list[Run], look_of: Mapping[str, Look]) -> Picture | None:
    """Root mean square of every residual stream before the first layer and after each layer."""
    single = [run for run in runs if len(streams(run)) == 1]
    several = [run for run in runs if len(streams(run)) > 1]
    names = dict.fromkeys(name for run in several for name in streams(run))
    lines = merge(
        by_rate(single, look_of, lambda run: by_depth(next(iter(streams(run).values())))),
        *(
            by_rate(several, look_of, lambda run, name=name: by_depth(streams(run).get(name, [])), dash, name)
            for dash, name in enumerate(names)
        ),
    )
    explanation = (
        f"The typical size of an entry of the residual stream, {when(runs)}; layer 0 is the input of the first layer. "
        "The larger a stream has grown, the less a later layer of the same strength changes it."
    )
    y = Axis("root mean square", log=True)
    return picture("rms-by-layer", "Size of the residual streams by layer", explanation, lines, "after layer", y)


def stream_ratio(runs: list[Run], look_of: Mapping[str, Look]) -> Picture | None:
    """Ratio of the normalized to the un-normalized stream, for placements with both."""
    coupled = [run for run in runs if {"x", "y"} <= set(streams(run))]
    lines = by_rate(coupled, look_of, lambda run: ratios(streams(run)["x"], streams(run)["y"]))
    explanation = (
        "The size of the normalized stream x divided by the size of the un-normalized stream y, for placements that "
        "carry both. At 1 they are equally large; below 1 the un-normalized stream is the larger one."
    )
    y = Axis("rms of x / rms of y", log=True)
    return picture("stream-ratio", "Ratio of the two streams by depth", explanation, lines, "after layer", y)


def loss_limits(runs: Sequence[Run], unigram_loss: float | None) -> Limits:
    """Return limits that show where runs end, not how high they start."""
    finals = [run["val_loss"] for run in runs if run["val_loss"] is not None]
    healthy = [run["val_loss"] for run in runs if run["val_loss"] is not None and not run["diverged"]]
    if not finals:
        return (0.0, unigram_loss * 1.05) if unigram_loss else (0.0, 1.0)
    low, high = min(finals), max(healthy or finals)
    high = max(high, unigram_loss or high) if healthy else high
    air = 0.1 * (high - low) or 0.1
    return low - 0.7 * air, high + (air if unigram_loss else 5 * air)


def known(xs: Sequence[float], values: Sequence[float | None]) -> Points:
    """Pair up, leaving out what does not exist."""
    return {x: value for x, value in zip(xs, values, strict=True) if value is not None}


def by_depth(values: Sequence[float | None]) -> Points:
    """Number values from 0 on, by layer."""
    return known(range(len(values)), values)


def streams(run: Run) -> dict[str, list[float | None]]:
    """The root mean square of each stream of a run, by layer; empty if it was not measured."""
    return run["layers"]["rms"] if run["layers"] else {}


def ratios(xs: Sequence[float | None], ys: Sequence[float | None]) -> Points:
    """The ratio of two streams by layer, where both are known."""
    return {i: x / y for i, (x, y) in enumerate(zip(xs, ys, strict=True)) if x is not None and y}


def when(runs: Sequence[Run]) -> str:
    """Name the steps at which the layers were last measured."""
    steps = sorted({run["layers"]["step"] for run in runs if run["layers"]})
    return f"measured at step {steps[0]}" if len(steps) == 1 else "measured at the last recorded step of each run"
