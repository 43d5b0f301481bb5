"""Sums of losses over targets, and the precision in which they are computed.

Shape suffixes: B batch, T sequence, V vocabulary (or classes).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from normstream.tasks.task import Losses

Precision = Literal["fp32", "bf16", "fp16"]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a forward pass has this precision.

    >>> autocast("fp32", torch.device("cpu")).__class__.__name__
    'nullcontext'
    """
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, _AUTOCAST[precision])


def loss_sum(logits_BTV: Tensor, targets_BT: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The sum of the cross-entropies of all targets that count (those that are not -100).

    With label smoothing s the target is ``1 - s`` on its class plus ``s / V`` on every class.

    >>> loss_sum(torch.zeros(1, 2, 2), torch.tensor([[0, -100]]))
    tensor(0.6931)
    """
    return F.cross_entropy(
        logits_BTV.flatten(0, -2), targets_BT.flatten(), reduction="sum", label_smoothing=label_smoothing
    )


def z_loss_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The sum of ``log^2 Z`` with ``Z = sum_v exp(logit_v)`` over all targets that count; it keeps logits near 0.

    Its gradient is ``2 log Z softmax(logits)``. Source: PaLM, arXiv 2204.02311, section 5; OLMo 2, arXiv 2501.00656.

    >>> z_loss_sum(torch.zeros(1, 2, 2), torch.tensor([[0, -100]]))
    tensor(0.4805)
    """
    log_z_BT = logits_BTV.logsumexp(-1).masked_fill(targets_BT < 0, 0.0)
    return log_z_BT.square().sum()


def target_losses(logits: Tensor, targets: Tensor, n_targets: int, config: Any, aux: tuple[Any, ...] = ()) -> Losses:
    """A micro-batch's part of the mean cross-entropy over ``n_targets``; what is reported is the plain one.

    What label smoothing adds to it is the part ``label_smoothing``, what the z-loss adds the part ``z_loss``.

    Args:
        logits: (..., V).
        targets: (...), -100 where none counts.
        n_targets: targets of the whole batch.
        config: the run, with ``label_smoothing`` and ``z_loss``.
        aux: what the sublayers reported.
    """
    main = loss = loss_sum(logits, targets) / n_targets
    parts: dict[str, Tensor] = {}
    if config.label_smoothing > 0:
        loss = loss_sum(logits, targets, config.label_smoothing) / n_targets
        parts["label_smoothing"] = loss - main
    if config.z_loss > 0:
        parts["z_loss"] = config.z_loss * z_loss_sum(logits, targets) / n_targets
        loss = loss + parts["z_loss"]
    return Losses(loss, main, parts, aux)
