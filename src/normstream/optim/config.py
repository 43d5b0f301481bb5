"""Options of the optimizer."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and what it decays.

    >>> OptimizerConfig(lr=1e-3).betas
    (0.9, 0.95)
    """

    lr: float = 2e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the decayed groups; matrices always are one."""
    decay_norm_gains: bool = False
    """Decay the gains of norms too: plain gains towards 0, zero-centred ones towards 1."""
    decay_biases: bool = False
    """Decay biases too, those of norms included."""
    decay_embeddings: bool = False
    """Decay embedding tables too."""
    decay_vectors: bool = False
    """Decay the remaining scalars and vectors too."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"optimizer.lr must be a number above 0, got {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be in [0, 1), got {self.betas}")
        if not self.eps >= 0:
            raise ValueError(f"optimizer.eps must be at least 0, got {self.eps}")
        if not self.weight_decay >= 0:
            raise ValueError(f"optimizer.weight_decay must be at least 0, got {self.weight_decay}")
