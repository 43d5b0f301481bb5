"""Spikes of a training loss or gradient norm: values far from those just before them.

=========== ====== ========= ==================== ============================================================
rule        window deviation side                 judged once the window has
=========== ====== ========= ==================== ============================================================
OLMO2       1000   7         both: at least 7     50 values (the paper does not say)
OLMO_CORE   128    6         above: more than 6   128 values
TRAINING    1000   7         above: more than 7   50 values; a loss that falls is no trouble
=========== ====== ========= ==================== ============================================================

A value is compared with the mean and the (population) standard deviation of the values before it and is not in its own
window. Values that are not finite are no spikes and in no window, and a window whose deviation is below 1e-10 has none.

A score is a fraction of all values: 0.0007 is 0.07 %. The OLMo 2 paper calls its score a percentage and gives numbers
like 0.40, which may be either.

Sources: OLMo 2, arXiv 2501.00656, section 3.2; allenai/OLMo-core:src/olmo_core/train/callbacks/stability_monitor.py.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

WINDOW = 1000
MIN_VALUES = 50
DEVIATIONS = 7.0
ROLLING_STEPS = 10_000
"""Steps that OLMo-core's rate is taken over."""


@dataclass(frozen=True)
class SpikeRule:
    """When a value is a spike.

    >>> OLMO_CORE
    SpikeRule(window=128, k=6.0, sided=1, min_values=128)
    """

    window: int = WINDOW
    """How many values before it a value is compared with."""
    k: float = DEVIATIONS
    """Standard deviations from their mean."""
    sided: Literal[1, 2] = 2
    """2: at least k above or below; 1: more than k above."""
    min_values: int = MIN_VALUES
    """Values that must be there before one is judged, where the window is not shorter."""

    def __post_init__(self) -> None:
        if self.window < 1 or self.min_values < 1:
            raise ValueError(f"window and min_values must be at least 1, got {self.window} and {self.min_values}")
        if not self.k > 0:
            raise ValueError(f"k must be above 0, got {self.k}")
        if self.sided not in (1, 2):
            raise ValueError(f"sided must be 1 (above) or 2 (above and below), got {self.sided}")

    def is_spike(self, value: float, before: Iterable[float]) -> bool:
        """Whether a finite value is a spike after those in its window."""
        window = np.fromiter(before, dtype=np.float64)
        if len(window) < min(self.min_values, self.window):
            return False
        deviation, limit = value - window.mean(), self.k * window.std()
        if limit < self.k * 1e-10:
            return False
        return bool(abs(deviation) >= limit if self.sided == 2 else deviation > limit)


OLMO2 = SpikeRule()
OLMO_CORE = SpikeRule(window=128, k=6.0, sided=1, min_values=128)
TRAINING = SpikeRule(sided=1)


class SpikeCounter:
    """Counts spikes while a run goes on; its ``values`` and ``count`` are saved in checkpoints.

    Args:
        values: the last values before the next one.
        count: spikes so far.
        rule: what counts as a spike.

    >>> counter = SpikeCounter()
    >>> [counter.update(loss) for loss in [2.0, 2.1] * 25 + [9.0]][-1], counter.count
    (True, 1)
    """

    def __init__(self, values: Iterable[float] = (), count: int = 0, rule: SpikeRule = TRAINING) -> None:
        self.rule = rule
        self.values: deque[float] = deque(values, maxlen=rule.window)
        self.count = count

    def update(self, value: float) -> bool:
        """Takes the next value and says whether it is a spike."""
        if not math.isfinite(value):
            return False
        spike = self.rule.is_spike(value, self.values)
        self.values.append(value)
        self.count += spike
        return spike


def spike_score(
    x: Iterable[float],
    window: int = WINDOW,
    k: float = DEVIATIONS,
    sided: Literal[1, 2] = 2,
    min_values: int = MIN_VALUES,
) -> float:
    """The fraction of values that are spikes, by default as OLMo 2 defines it; 0 if there are none.

    Args:
        x: losses or gradient norms, one a step.
        window, k, sided, min_values: of ``SpikeRule``.

    Raises:
        ValueError: for a rule that makes no sense.

    >>> spike_score([2.0, 2.1] * 49 + [9.0, 2.0])
    0.01
    """
    counter, n = SpikeCounter(rule=SpikeRule(window, k, sided, min_values)), 0
    for value in x:
        counter.update(float(value))
        n += 1
    return counter.count / n if n else 0.0


def stability_score(losses: Iterable[float], grad_norms: Iterable[float] | None = None) -> float:
    """OLMo-core's spike rate: the fraction of the last 10,000 steps (all, while there are fewer) with a spike in the
    loss or in the gradient norm, by the rule ``OLMO_CORE``.

    Raises:
        ValueError: if there are not as many gradient norms as losses.

    >>> stability_score([2.0, 2.1] * 64 + [9.0, 2.0], [1.0, 1.1] * 65)
    0.007692307692307693
    """
    series = [list(losses)] if grad_norms is None else [list(losses), list(grad_norms)]
    if len(series[0]) != len(series[-1]):
        raise ValueError(f"expected as many gradient norms as losses, got {len(series[-1])} for {len(series[0])}")
    counters = [SpikeCounter(rule=OLMO_CORE) for _ in series]
    flags = [
        any([counter.update(float(value)) for counter, value in zip(counters, step, strict=True)])
        for step in zip(*series, strict=True)
    ]
    recent = flags[-ROLLING_STEPS:]
    return sum(recent) / len(recent) if recent else 0.0
