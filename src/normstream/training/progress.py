"""What a run knows about itself besides weights: the step, the detectors' windows, the best loss, the time used."""

import math
from dataclasses import dataclass, field
from typing import Any

from normstream.training.divergence import DivergenceDetector
from normstream.training.spikes import SpikeCounter
from normstream.training.step import Update


@dataclass
class Progress:
    """The state of a run, saved in every checkpoint.

    >>> Progress.from_state(Progress.new(uniform_loss=5.5).state()).step
    0
    """

    divergence: DivergenceDetector
    """Follows the training loss."""
    spikes: SpikeCounter = field(default_factory=SpikeCounter)
    """Counts its spikes."""
    step: int = 0
    """Updates done, skipped ones included."""
    skipped: int = 0
    """Updates skipped (fp16)."""
    skipped_in_a_row: int = 0
    """Those since the last applied one."""
    val_loss: float | None = None
    """Last validation loss."""
    best_val_loss: float | None = None
    """Lowest validation loss."""
    scores: dict[str, float] = field(default_factory=dict)
    """What else the last evaluation found."""
    update_seconds: float = 0.0
    """Time of the updates alone."""
    seconds: float = 0.0
    """Time of everything."""

    @classmethod
    def new(cls, uniform_loss: float) -> "Progress":
        """At step 0, of a task in which a guess that knows nothing has this loss."""
        return cls(divergence=DivergenceDetector(uniform=uniform_loss))

    def count(self, step: int, update: Update, seconds: float) -> bool:
        """Takes what an update reported, and says whether its loss is a spike.

        An update that is not applied leaves the detectors' windows as they are.
        """
        self.update_seconds += seconds
        if not update.applied:
            self.skipped += 1
            self.skipped_in_a_row += 1
            return False
        self.skipped_in_a_row = 0
        self.divergence.update(step, update.loss)
        return self.spikes.update(update.loss)

    def evaluated(self, loss: float) -> None:
        """Takes a validation loss."""
        self.val_loss = loss
        if math.isfinite(loss):
            self.best_val_loss = loss if self.best_val_loss is None else min(self.best_val_loss, loss)

    def state(self) -> dict[str, Any]:
        """The state as plain values."""
        plain = {name: value for name, value in vars(self).items() if name not in ("divergence", "spikes")}
        divergence = vars(self.divergence) | {"recent": list(self.divergence.recent)}
        return plain | {
            "divergence": divergence,
            "spikes": {"values": list(self.spikes.values), "count": self.spikes.count},
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Progress":
        """The inverse of ``state``."""
        detectors = {
            "divergence": DivergenceDetector(**state["divergence"]),
            "spikes": SpikeCounter(**state["spikes"]),
        }
        return cls(**(state | detectors))
