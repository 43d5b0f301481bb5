"""Sums of losses over targets, and the precision in which they are computed.

Shape suffixes: B batch, T sequence, V vocabulary (or classes).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

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
