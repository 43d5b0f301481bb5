"""The pictures of the report: what each one shows and, in one or two sentences, how to read it."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from normstream.lab.expert_plot import balance_by_layer
from normstream.lab.matrix import chosen_looks
from normstream.lab.panels import DEPTH, Axis, Limits, Picture, Points, by_rate, floor, merge, picture, values
from normstream.lab.rate_plot import loss_by_rate
from normstream.lab.style import Look, number, rate
from normstream.lab.summary import SPIKE_MEANING
from normstream.lab.words import loss_axis, task_of
from normstream.tasks import Metric, Task

Run = dict[str, Any]


def pictures(summary: dict[str, Any]) -> list[Picture]:
    """Return every picture that the finished runs of a summary allow, in the order of the report.

    >>> pictures({"task": "lm", "data": {"baseline_loss": None}, "runs": []})
    []
    """
    runs = [run for run in summary["runs"] if run["status"] == "finished"]
    look_of, task = chosen_looks(summary), task_of(summary)
    baseline_loss = summary["data"]["baseline_loss"]
    drawn = [
        validation_loss(runs, look_of, baseline_loss, task),
        loss_by_rate(runs, look_of, baseline_loss, loss_limits(runs, baseline_loss), task),
        *(metric_over_time(runs, look_of, metric) for metric in task.metrics),
        gradient_over_time(runs, look_of),
        gradient_by_layer(runs, look_of),
        rms_by_layer(runs, look_of),
        stream_ratio(runs, look_of),
        balance_by_layer(runs, look_of),
    ]
    return [picture for picture in drawn if picture]


def validation_loss(
    runs: list[Run], look_of: Mapping[str, Look], baseline_loss: float | None, task: type[Task]
) -> Picture | None:
    """Validation loss against step."""
    lines = by_rate(runs, look_of, lambda run: known(run["curve"]["val_step"], run["curve"]["val_loss"]))
    bands = has_bands(look_of)
    explanation = f"Lower is better. {seeds_shown(bands)}"
    if baseline_loss is not None:
        explanation += (
            f" The dotted line, {number(baseline_loss, 2)}, is reached by knowing only {task.baseline}: "
            "a run that stays there has learned nothing else."
        )
    y = Axis(loss_axis(task), limits=loss_limits(runs, baseline_loss), mark=baseline_loss)
    return picture("validation-loss", "Validation loss while training", explanation, lines, "step", y, bands)


def metric_over_time(runs: list[Run], look_of: Mapping[str, Look], metric: Metric) -> Picture | None:
    """A metric of the evaluations against step; None if it is measured only at the end."""

    def points(run: Run) -> Points:
        values = run["curve"]["val_metrics"].get(metric.name)
        return known(run["curve"]["val_step"], values) if values else {}

    bands = has_bands(look_of)
    better = "Higher" if metric.higher_is_better else "Lower"
    title = f"{metric.title[0].upper()}{metric.title[1:]} while training"
    explanation = f"{better} is better. {seeds_shown(bands)}"
    lines = by_rate(runs, look_of, points)
    return picture(f"metric-{metric.name}", title, explanation, lines, "step", Axis(metric.title), bands)


def has_bands(look_of: Mapping[str, Look]) -> bool:
    """Whether lines have bands over seeds; those of many lines would hide the lines."""
    return not any(look.quiet for look in look_of.values())


def seeds_shown(bands: bool) -> str:
    """Say what a line and its band are."""
    return "A line is the mean over seeds" + ("; its band runs from the lowest seed to the highest." if bands else ".")


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
    lines = merge(
        *(
            by_rate(runs, look_of, lambda run, stack=stack: by_depth(gradients(run).get(stack, [])), stack=stack)
            for stack in stacks(runs)
        )
    )
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
    parts = []
    for stack in stacks(runs):
        found = [(run, streams(run, stack)) for run in runs]
        single = [run for run, own in found if len(own) == 1]
        several = [run for run, own in found if len(own) > 1]
        parts.append(by_rate(single, look_of, partial(by_border, stack=stack), stack=stack))
        for dash, name in enumerate(dict.fromkeys(name for _, own in found if len(own) > 1 for name in own)):
            points = partial(by_border, stack=stack, stream=name)
            parts.append(by_rate(several, look_of, points, dash, name, stack))
    lines = merge(*parts)
    explanation = (
        f"The typical size of an entry of the residual stream, {when(runs)}; layer 0 is the input of the first layer. "
        "The larger a stream has grown, the less a later layer of the same strength changes it."
    )
    y = Axis("root mean square", log=True)
    return picture("rms-by-layer", "Size of the residual streams by layer", explanation, lines, "after layer", y)


def by_border(run: Run, stack: str, stream: str | None = None) -> Points:
    """The size of one stream of a run at every border of a stack; without a name, of its only one."""
    own = streams(run, stack)
    return by_depth(next(iter(own.values())) if stream is None else own.get(stream, []))


def stream_ratio(runs: list[Run], look_of: Mapping[str, Look]) -> Picture | None:
    """Ratio of the normalized to the un-normalized stream, for placements with both."""

    def points(run: Run, stack: str) -> Points:
        own = streams(run, stack)
        return ratios(own["x"], own["y"]) if {"x", "y"} <= own.keys() else {}

    lines = merge(
        *(by_rate(runs, look_of, lambda run, stack=stack: points(run, stack), stack=stack) for stack in stacks(runs))
    )
    explanation = (
        "The size of the normalized stream x divided by the size of the un-normalized stream y, for placements that "
        "carry both. At 1 they are equally large; below 1 the un-normalized stream is the larger one."
    )
    y = Axis("rms of x / rms of y", log=True)
    return picture("stream-ratio", "Ratio of the two streams by depth", explanation, lines, "after layer", y)


def loss_limits(runs: Sequence[Run], baseline_loss: float | None) -> Limits:
    """Return limits that show where runs end, not how high they start."""
    finals = [run["val_loss"] for run in runs if run["val_loss"] is not None]
    healthy = [run["val_loss"] for run in runs if run["val_loss"] is not None and not run["diverged"]]
    if not finals:
        return (0.0, baseline_loss * 1.05) if baseline_loss else (0.0, 1.0)
    low, high = min(finals), max(healthy or finals)
    high = max(high, baseline_loss or high) if healthy else high
    air = 0.1 * (high - low) or 0.1
    return low - 0.7 * air, high + (air if baseline_loss else 5 * air)


def known(xs: Sequence[float], values: Sequence[float | None]) -> Points:
    """Pair up, leaving out what does not exist."""
    return {x: value for x, value in zip(xs, values, strict=True) if value is not None}


def by_depth(values: Sequence[float | None]) -> Points:
    """Number values from 0 on, by layer."""
    return known(range(len(values)), values)


def stacks(runs: Sequence[Run]) -> list[str]:
    """The stacks of the runs' models in order, such as encoder and decoder; one without a name where there is one.

    >>> stacks([{"layers": {"rms": {"encoder.x": [1.0], "decoder.x": [1.0]}}}])
    ['encoder', 'decoder']
    """
    keys = [key for run in runs if run["layers"] for key in run["layers"]["rms"]]
    return list(dict.fromkeys(key.rpartition(".")[0] for key in keys))


def streams(run: Run, stack: str = "") -> dict[str, list[float | None]]:
    """The root mean square of each stream of one stack of a run, by layer; empty if it was not measured.

    >>> streams({"layers": {"rms": {"encoder.x": [1.0], "decoder.x": [2.0]}}}, "decoder")
    {'x': [2.0]}
    """
    measured = run["layers"]["rms"] if run["layers"] else {}
    parts = {tuple(key.rpartition(".")[::2]): values for key, values in measured.items()}
    return {name: values for (own, name), values in parts.items() if own == stack}


def gradients(run: Run) -> dict[str, list[float | None]]:
    """The gradient norms of the layers of each stack; a run numbers them through all of its stacks.

    >>> rms = {"encoder.x": [1.0, 1.0], "decoder.x": [1.0, 1.0, 1.0]}  # before layer 0 and after each layer
    >>> gradients({"layers": {"rms": rms, "grad_norm": [1.0, 2.0, 3.0]}})
    {'encoder': [1.0], 'decoder': [2.0, 3.0]}
    """
    found, first = {}, 0
    for stack in stacks([run]):
        n_layers = len(next(iter(streams(run, stack).values()))) - 1
        found[stack] = run["layers"]["grad_norm"][first : first + n_layers]
        first += n_layers
    return found


def ratios(xs: Sequence[float | None], ys: Sequence[float | None]) -> Points:
    """The ratio of two streams by layer, where both are known."""
    return {i: x / y for i, (x, y) in enumerate(zip(xs, ys, strict=True)) if x is not None and y}


def when(runs: Sequence[Run]) -> str:
    """Name the steps at which the layers were last measured."""
    steps = sorted({run["layers"]["step"] for run in runs if run["layers"]})
    return f"measured at step {steps[0]}" if len(steps) == 1 else "measured at the last recorded step of each run"
