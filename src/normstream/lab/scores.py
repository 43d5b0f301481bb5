"""The measures of success besides the loss (accuracy, BLEU ...) in tables and sentences."""

from typing import Any

from normstream.lab.style import number

Cell = dict[str, Any]  # a row of `normstream.lab.summary.table`


def score(value: float | None, like: float | None = None) -> str:
    """Write a measure: one decimal from 10 on, else three; with ``like`` as many as that one has.

    >>> score(97.125), score(0.8531), score(0.25, like=97.125), score(None)
    ('97.1', '0.853', '0.2', '-')
    """
    known = value if like is None else like
    return number(value, 3 if known is None or abs(known) < 10 else 1)


def with_spread(cell: Cell, name: str) -> str:
    """The mean of a measure over seeds and, where it is known, its standard deviation.

    >>> with_spread({"metrics": {"accuracy": {"mean": 97.125, "std": 0.5}}}, "accuracy")
    '97.1 ± 0.5'
    """
    found = cell["metrics"].get(name, {"mean": None, "std": None})
    spread = "" if found["std"] is None else f" \u00b1 {score(found['std'], like=found['mean'])}"
    return score(found["mean"]) + spread
