"""What counts as a failed run, defined here and nowhere else.

*Diverged*: the loss or the gradient norm of an update is not finite (the run stops there, before that update is
applied; in fp16 a gradient that is not finite only skips the update, unless 25 updates in a row are skipped), or, when
the run ends, its validation loss is not finite, or the mean of its last 20 training losses lies above the larger of its
first loss and that of a guess that knows nothing, ln(vocabulary) for a language model. The divergence step of that mean
is where it went above for the last time.

*Collapsed*: a run of at least 100 steps ends with a validation loss that is not at least 0.05 below the baseline loss,
that of a model which ignores its input: of a language model that knows only how often each token occurs in the training
text. Such a run is finite and quiet, but has learnt nothing of its task: Post-Norm at too high a rate ends so.
"""

import math
from collections import deque
from collections.abc import Iterable

WINDOW = 20
MAX_SKIPS_IN_A_ROW = 25
COLLAPSE_MARGIN = 0.05
COLLAPSE_MIN_STEPS = 100


class DivergenceDetector:
    """Follows the training losses; its attributes are saved in checkpoints.

    Args:
        uniform: the loss of a guess that knows nothing.
        limit: the larger of ``uniform`` and the first loss, None before there is one.
        recent: the last 20 losses.
        above_since: step at which their mean went above the limit, None if it is not above.

    >>> detector = DivergenceDetector(uniform=5.5)
    >>> for step in range(1, 41):
    ...     detector.update(step, loss=5.5 if step <= 20 else 9.0)
    >>> detector.above_since
    21
    """

    def __init__(
        self,
        uniform: float,
        limit: float | None = None,
        recent: Iterable[float] = (),
        above_since: int | None = None,
    ) -> None:
        self.uniform, self.limit, self.above_since = uniform, limit, above_since
        self.recent: deque[float] = deque(recent, maxlen=WINDOW)

    def update(self, step: int, loss: float) -> None:
        """Takes the loss of one update."""
        if self.limit is None:
            self.limit = max(self.uniform, loss)
        self.recent.append(loss)
        if len(self.recent) < WINDOW or self.mean() <= self.limit:
            self.above_since = None
        elif self.above_since is None:
            self.above_since = step

    def mean(self) -> float:
        """Mean of the last 20 losses, or of fewer where there are not yet 20."""
        return sum(self.recent) / len(self.recent)

    def cause(self) -> str | None:
        """Why a run that ends here has diverged, or None if it has not."""
        if self.above_since is None:
            return None
        return (
            f"mean training loss of the last {WINDOW} steps is {self.mean():.4g}, above {self.limit:.4g}, "
            f"since step {self.above_since}"
        )


def nonfinite_cause(loss: float, grad_norm: float) -> str | None:
    """What is not finite, or None.

    >>> nonfinite_cause(float("nan"), 1.0)
    'training loss is nan'
    """
    if not math.isfinite(loss):
        return f"training loss is {loss}"
    return None if math.isfinite(grad_norm) else f"gradient norm is {grad_norm}"


def collapsed(val_loss: float | None, baseline_loss: float, steps: int) -> bool:
    """Whether the model has learnt no more than the baseline knows, by the definition above.

    >>> collapsed(3.22, baseline_loss=3.2, steps=300), collapsed(2.1, baseline_loss=3.2, steps=300)
    (True, False)
    """
    return val_loss is not None and steps >= COLLAPSE_MIN_STEPS and val_loss > baseline_loss - COLLAPSE_MARGIN
