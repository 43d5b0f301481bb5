"""AdamW over groups by role."""

import warnings
from typing import Any

import torch
from torch import nn

from normstream.optim.config import OptimizerConfig
from normstream.optim.roles import parameter_groups


def adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """torch's fused AdamW for the trainable parameters of a model, one group a role.

    Warns where a gain is in bfloat16 (see ``warn_low_precision_gains``).

    Source: Loshchilov and Hutter 2019, arXiv 1711.05101.

    >>> [group["role"] for group in adamw(nn.Linear(2, 2), OptimizerConfig()).param_groups]
    ['matrix', 'bias']
    """
    groups = parameter_groups(model, config)
    warn_low_precision_gains(groups)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def warn_low_precision_gains(groups: list[dict[str, Any]]) -> None:
    """Warns if an optimizer would hold norm gains in bfloat16, where they cannot move away from 1.

    Just below 1 the spacing of bfloat16 is 2^-8, so that an update of 1e-3 rounds away every time, while matrices
    with their small entries do move.

    >>> warn_low_precision_gains(parameter_groups(nn.LayerNorm(2), OptimizerConfig()))
    """
    gains = [
        name
        for group in groups
        if group["role"] == "norm_gain"
        for name, parameter in group["params"]
        if parameter.dtype == torch.bfloat16
    ]
    if gains:
        warnings.warn(
            f"the optimizer holds {len(gains)} norm gains in bfloat16 ({gains[0]}, ...): at 1.0, updates below 2^-9 "
            "round away and the gains never move; keep parameters in float32 and compute in bfloat16 (autocast)",
            stacklevel=3,
        )
