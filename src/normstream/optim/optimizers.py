"""The optimizers, each over groups by role."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from normstream.optim.config import OptimizerConfig
from normstream.optim.roles import parameter_groups

Groups = list[dict[str, Any]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that the config names, for the trainable parameters of a model.

    QK-Clip, which muonclip adds, is no part of the optimizer: see ``normstream.optim.qk_clip``.

    Warns where a gain is in bfloat16 (see ``warn_low_precision_gains``).

    >>> [group["role"] for group in build_optimizer(nn.Linear(2, 2), OptimizerConfig()).param_groups]
    ['matrix', 'bias']
    """
    groups = parameter_groups(model, config)
    warn_low_precision_gains(groups)
    if config.uses_muon:
        return MuonWithAdamW(groups, config)
    return {"adamw": adamw, "radam": radam, "sgd": sgd}[config.kind](groups, config)


def adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """torch's fused AdamW. Source: Loshchilov and Hutter 2019, arXiv 1711.05101.

    >>> adamw([{"params": [nn.Parameter(torch.ones(1))]}], OptimizerConfig(eps=1e-6)).defaults["eps"]
    1e-06
    """
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def radam(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """torch's RAdam with decoupled weight decay. Source: Liu et al. 2020, arXiv 1908.03265.

    The update is that of Adam times a rectification ``r`` that grows from 0 to 1, a warm-up that lasts about
    ``2 / (1 - beta2)`` steps:

        rho_inf = 2 / (1 - beta2) - 1        rho = rho_inf - 2 t beta2^t / (1 - beta2^t)
        r = sqrt((rho - 4) (rho - 2) rho_inf / ((rho_inf - 4) (rho_inf - 2) rho))

    While rho <= 5 (up to t = 5) the step is momentum alone, not adaptive; the paper says 4, the authors' code and
    torch 5.

    >>> radam([{"params": [nn.Parameter(torch.ones(1))]}], OptimizerConfig()).defaults["decoupled_weight_decay"]
    True
    """
    return torch.optim.RAdam(groups, lr=config.lr, betas=config.betas, eps=config.eps, decoupled_weight_decay=True)


def sgd(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    """torch's SGD: ``m <- momentum m + g + decay w``, ``w <- w - lr m``; without momentum there is no state.

    >>> sgd([{"params": [nn.Parameter(torch.ones(1))]}], OptimizerConfig(kind="sgd", momentum=0.9)).defaults["momentum"]
    0.9
    """
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.resolved_momentum)


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon for the groups that say so, its AdamW for the others, as one optimizer with one state.

        M <- momentum M + (1 - momentum) g                              W of shape (n, m)
        O = NewtonSchulz(momentum M + (1 - momentum) g)                 five steps in bfloat16
        W <- (1 - lr decay) W - lr 0.2 sqrt(max(n, m)) O

    The factor 0.2 sqrt(max(n, m)) gives Muon's updates the root mean square of AdamW's, so that one learning rate and
    one weight decay serve both.

    Args:
        groups: those of ``parameter_groups``.
        config: learning rate, Muon's momentum, AdamW's betas and eps.

    Source: Jordan et al. 2024, KellerJordan/Muon:muon.py; factor and decay from Liu et al. 2025, arXiv 2502.16982.

    >>> config = OptimizerConfig(kind="muon")
    >>> optimizer = MuonWithAdamW(parameter_groups(nn.Linear(2, 2), config), config)
    >>> [(group["role"], group["optimizer"]) for group in optimizer.param_groups]
    [('matrix', 'muon'), ('bias', 'adamw')]
    """

    def __init__(self, groups: Groups, config: OptimizerConfig) -> None:
        super().__init__(groups, {})
        make: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
            "muon": lambda part: torch.optim.Muon(
                part, lr=config.lr, momentum=config.resolved_momentum, adjust_lr_fn="match_rms_adamw"
            ),
            "adamw": lambda part: adamw(part, config),
        }
        parts = {name: [group for group in self.param_groups if group["optimizer"] == name] for name in make}
        self._parts = {name: make[name](part) for name, part in parts.items() if part}
        self._share()

    def _share(self) -> None:
        """Lets both optimizers work on the groups and the state of this one."""
        for name, part in self._parts.items():
            part.param_groups = [group for group in self.param_groups if group["optimizer"] == name]
            part.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Moves every parameter once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts.values():
            part.step()
        return loss


def warn_low_precision_gains(groups: Groups) -> None:
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
