"""Loss spikes, counted while a run goes on.

A value is a spike if it lies more than 7 standard deviations above the mean of the values before it, of which the
last 1000 count and at least 50 must exist. A value is not in its own window. This is the rule of OLMo 2
(arXiv 2501.00656), one-sided since a loss that falls is no trouble, and with the minimum so that short runs have one.
"""

import math
from collections import deque
from collections.abc import Iterable

import numpy as np

WINDOW = 1000
MIN_VALUES = 50
DEVIATIONS = 7.0


class SpikeCounter:
    """Counts spikes; its ``values`` and ``count`` are saved in checkpoints.

    Args:
        values: the last values before the next one.
        count: spikes so far.

    >>> counter = SpikeCounter()
    >>> [counter.update(loss) for loss in [2.0, 2.1] * 25 + [9.0]][-1], counter.count
    (True, 1)
    """

    def __init__(self, values: Iterable[float] = (), count: int = 0) -> None:
        self.values: deque[float] = deque(values, maxlen=WINDOW)
        self.count = count

    def update(self, value: float) -> bool:
        """Takes the next value and says whether it is a spike; one that is not finite is ignored."""
        if not math.isfinite(value):
            return False
        spike = False
        if len(self.values) >= MIN_VALUES:
            window = np.fromiter(self.values, dtype=np.float64)
            spike = bool(value > window.mean() + DEVIATIONS * window.std())
        self.values.append(value)
        self.count += spike
        return spike


def spike_score(values: Iterable[float]) -> float:
    """The share of values that are spikes.

    >>> spike_score([2.0, 2.1] * 49 + [9.0, 2.0])
    0.01
    """
    counter, n = SpikeCounter(), 0
    for value in values:
        counter.update(value)
        n += 1
    return counter.count / n if n else 0.0
