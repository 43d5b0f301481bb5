"""Options of the optimizer."""

import math
from dataclasses import dataclass, field
from typing import Literal

from normstream.checks import check_types
from normstream.names import check_choice

Kind = Literal["adamw", "radam", "sgd", "muon", "muonclip"]
SharedKeys = Literal["group", "query"]


@dataclass(frozen=True)
class QKClipConfig:
    """QK-Clip: keeps the attention logits of every head at or below a threshold; see ``normstream.optim.qk_clip``.

    >>> QKClipConfig(threshold=30).alpha
    0.5
    """

    threshold: float | None = None
    """Largest attention logit of a head; None means 100 with muonclip and no clipping with the others."""
    alpha: float = 0.5
    """Part of the factor gamma that the queries take: gamma^alpha, the keys gamma^(1 - alpha)."""
    shared_keys: SharedKeys = "group"
    """Where query heads share a key head: clip the group by its largest logit, or only the query head over it."""

    def __post_init__(self) -> None:
        check_types(self, "qk_clip.")
        if self.threshold is not None and not 0 < self.threshold < math.inf:
            raise ValueError(f"qk_clip.threshold must be a number above 0, or None, got {self.threshold}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"qk_clip.alpha must be in [0, 1], got {self.alpha}")
        check_choice("qk_clip.shared_keys", self.shared_keys, SharedKeys)


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, its rates, and what it decays.

    >>> OptimizerConfig(lr=1e-3).betas
    (0.9, 0.95)
    """

    kind: Kind = "adamw"
    """adamw, radam, sgd; muon for hidden matrices with adamw for the rest; muonclip, which is muon with QK-Clip."""
    lr: float = 2e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment (adamw, radam)."""
    eps: float = 1e-8
    """Added to the root of the second moment (adamw, radam)."""
    momentum: float | None = None
    """Momentum of sgd and muon; None means 0 for sgd and 0.95 for muon."""
    weight_decay: float = 0.1
    """Weight decay of the decayed groups, which matrices always are; decoupled, but for sgd part of the gradient."""
    decay_norm_gains: bool = False
    """Decay the gains of norms too: plain gains towards 0, zero-centred ones towards 1."""
    decay_biases: bool = False
    """Decay biases too, those of norms included."""
    decay_embeddings: bool = False
    """Decay embedding tables too."""
    decay_vectors: bool = False
    """Decay the remaining scalars and vectors too, and what junctions own."""
    qk_clip: QKClipConfig = field(default_factory=QKClipConfig)
    """Clipping of attention logits by the weights of queries and keys."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer.")
        check_choice("optimizer.kind", self.kind, Kind)
        if not 0 < self.lr < math.inf:
            raise ValueError(f"optimizer.lr must be a number above 0, got {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be in [0, 1), got {self.betas}")
        if not self.eps >= 0:
            raise ValueError(f"optimizer.eps must be at least 0, got {self.eps}")
        if not 0 <= self.resolved_momentum < 1:
            raise ValueError(f"optimizer.momentum must be in [0, 1), got {self.momentum}")
        if not self.weight_decay >= 0:
            raise ValueError(f"optimizer.weight_decay must be at least 0, got {self.weight_decay}")

    @property
    def uses_muon(self) -> bool:
        """Whether hidden matrices are Muon's."""
        return self.kind in ("muon", "muonclip")

    @property
    def resolved_momentum(self) -> float:
        """``momentum``, or its default."""
        return (0.95 if self.uses_muon else 0.0) if self.momentum is None else self.momentum

    @property
    def clip_threshold(self) -> float | None:
        """The threshold of QK-Clip, None if there is no clipping.

        >>> OptimizerConfig(kind="muonclip").clip_threshold, OptimizerConfig().clip_threshold
        (100.0, None)
        """
        if self.qk_clip.threshold is None and self.kind == "muonclip":
            return 100.0
        return self.qk_clip.threshold
