"""Learning-rate schedules: pure functions of the optimizer step, so that a resumed run cannot warm up twice.

Step n is the n-th update, counted from 1; micro-batches and processes do not count. With peak p, warm-up w, length N,
final fraction f, and r = (n - w) / (N - w) the fraction done after the warm-up:

    warm-up (n < w)  p n / w
    constant         p
    linear           p (1 - (1 - f) r)
    cosine           p (f + (1 - f) (1 + cos(pi r)) / 2)
    wsd              p, then linear to p f over the last ``decay_fraction`` of N
    noam             p sqrt(w / n)                                  (w taken as 1 if there is no warm-up)
"""

import math
from dataclasses import dataclass
from typing import Literal

from normstream.checks import check_types
from normstream.names import check_choice

Shape = Literal["constant", "linear", "cosine", "wsd", "noam"]


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate changes over a run.

    >>> ScheduleConfig(kind="cosine", warmup=10).final_fraction
    0.1
    """

    kind: Shape = "cosine"
    """Shape after the warm-up; noam is the inverse square root in the form of Xiong et al. 2020."""
    warmup: int = 0
    """Steps of linear warm-up; 0 starts at the peak."""
    final_fraction: float = 0.1
    """Learning rate of the last step as a fraction of the peak (linear, cosine, wsd)."""
    decay_fraction: float = 0.2
    """Share of all steps that wsd decays over, at the end."""

    def __post_init__(self) -> None:
        check_types(self, "schedule.")
        check_choice("schedule.kind", self.kind, Shape)
        if self.warmup < 0:
            raise ValueError(f"schedule.warmup must be at least 0, got {self.warmup}")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"schedule.final_fraction must be in [0, 1], got {self.final_fraction}")
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(f"schedule.decay_fraction must be in (0, 1], got {self.decay_fraction}")


def learning_rate(config: ScheduleConfig, peak: float, step: int, steps: int) -> float:
    """The learning rate of update number ``step`` (from 1) in a run of ``steps`` updates.

    Raises:
        ValueError: for a step below 1.

    Source of ``noam``: Xiong et al. 2020, arXiv 2002.04745; it equals Vaswani et al. 2017 for peak = (d w)^-1/2.

    >>> f"{learning_rate(ScheduleConfig('cosine', warmup=10, final_fraction=0.0), 1e-3, step=50, steps=100):.7g}"
    '0.0005868241'
    """
    if step < 1:
        raise ValueError(f"steps are counted from 1, got {step}")
    if step < config.warmup:
        return peak * step / config.warmup
    if config.kind == "constant":
        return peak
    if config.kind == "noam":
        return peak * math.sqrt(max(1, config.warmup) / step)

    start = config.warmup
    if config.kind == "wsd":
        start = max(start, steps - round(steps * config.decay_fraction))
    done = min(1.0, max(0, step - start) / max(1, steps - start))
    if config.kind == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return peak * (1 - (1 - config.final_fraction) * done)
