"""The picture of how evenly a model of experts spreads its tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from normstream.lab.panels import Axis, Picture, Points, by_rate, picture
from normstream.lab.style import Look

Run = dict[str, Any]


def balance_by_layer(runs: Sequence[Run], look_of: Mapping[str, Look]) -> Picture | None:
    """The largest load of an expert in each layer with experts, in even shares; None for runs without experts."""
    lines = by_rate(runs, look_of, largest_loads)
    steps = sorted({run["layers"]["step"] for run in runs if experts_of(run)})
    explanation = (
        "The tokens of the busiest expert of a layer, divided by an even share. At 1 all experts have equal loads; "
        "the most there can be is the number of experts divided by how many a token is given to. Layers are counted "
        "among those with experts, from 0, in the batch of "
        + (f"step {steps[0]}." if len(steps) == 1 else "the last recorded step of each run.")
    )
    dropped = [share for run in runs for share in experts_of(run).get("dropped", ())]
    if any(dropped):
        explanation += f" Up to {max(dropped):.1%} of a layer's assignments were beyond capacity and dropped."
    return picture(
        "expert-balance", "Load of the busiest expert", explanation, lines, "layer with experts", Axis("even shares")
    )


def largest_loads(run: Run) -> Points:
    """The largest share of an expert times the number of experts, by layer.

    >>> largest_loads({"layers": {"experts": {"load": [[0.5, 0.5], [0.25, 0.75]], "dropped": [0.0, 0.0]}}})
    {0: 1.0, 1: 1.5}
    """
    return {layer: max(shares) * len(shares) for layer, shares in enumerate(experts_of(run).get("load", ()))}


def experts_of(run: Run) -> dict[str, Any]:
    """What the last statistics of a run say of experts; empty if it has none.

    >>> experts_of({"layers": None})
    {}
    """
    return (run["layers"] or {}).get("experts") or {}
