"""One update: forward, backward, accumulation, scaling, norm, clipping, optimizer, what follows it."""

import hashlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normstream import placements
from normstream.data.batches import AnyBatch
from normstream.junctions import set_backend
from normstream.optim import QKClip, build_optimizer, clip_gradients, global_grad_norm, learning_rate
from normstream.placements.placement import Placement
from normstream.tasks import Losses, Task
from normstream.tasks.losses import autocast
from normstream.training.config import TrainConfig
from normstream.training.ema import Ema
from normstream.training.expert_loads import ExpertLoads
from normstream.training.probes import LayerProbe
from normstream.training.recompute import wrap_layers


@dataclass(frozen=True)
class Update:
    """What one update reports."""

    loss: float
    """Mean loss over the targets of all micro-batches, before the update."""
    grad_norm: float
    """True global norm, after accumulation and unscaling, before clipping."""
    lr: float
    """Learning rate."""
    applied: bool
    """False if the loss or the norm is not finite; parameters and optimizer state are then as before."""
    parts: dict[str, float] = field(default_factory=dict)
    """What else is added to the loss, coefficients included: a z-loss, the losses of routers."""
    max_logit: float | None = None
    """With QK-Clip, the largest attention logit of all heads, before the update."""
    clipped_heads: int | None = None
    """With QK-Clip, how many heads are above its threshold; an applied update clips them."""


class Updater:
    """Applies updates to a model. The n-th update is a pure function of the state, its batch and n.

    The loss is divided by the number of targets in the whole batch before the backward pass of each micro-batch, so
    that accumulation gives the gradient of the whole batch. A batch without a single target has loss and gradient 0;
    only momentum and weight decay then move the parameters. Dropout draws from a seed made of the run's seed, the step
    and the micro-batch. The learning rate depends on the step alone: a skipped update (fp16) counts as a step.

    Whether loss and gradient norm are finite, and the update is to be applied, is as a rule decided here, which waits
    for the device. With ``runs_ahead`` the device decides: the next update can be started before the numbers of this
    one have been read. After one that is not finite it then applies no other.

    Args:
        model: float32 parameters; its layers are wrapped for compilation and activation checkpointing if the config
            says so.
        config: the run.
        task: says what the loss is.
        runs_ahead: whether the device decides; None means on CUDA, if the config says so and ``why_not_ahead`` is None.

    Raises:
        ValueError: if the device is to decide but cannot.
    """

    def __init__(self, model: Any, config: TrainConfig, task: Task, *, runs_ahead: bool | None = None) -> None:
        self.model, self.config, self.task = model, config, task
        self.placement = placements.get(config.model.placement)
        self.device = next(model.parameters()).device
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(model, config.optimizer)
        threshold = config.optimizer.clip_threshold
        self.qk_clip = None if threshold is None else QKClip(model, threshold, config.optimizer.qk_clip)
        self.ema = Ema(model, config.ema) if config.ema > 0 else None
        self.experts = ExpertLoads(model)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        obstacle = self.why_not_ahead()
        if runs_ahead and obstacle is not None:
            raise ValueError(f"the device cannot decide whether an update is applied: {obstacle}")
        wanted = config.run_ahead and self.device.type == "cuda" and obstacle is None
        self.runs_ahead = wanted if runs_ahead is None else runs_ahead
        self._failed = torch.zeros((), device=self.device)
        set_backend(model, config.junctions)
        wrap_layers(
            model, compiled=config.compile, recomputed=config.activation_checkpointing, every=config.recompute_every
        )

    def averaged(self) -> AbstractContextManager[None]:
        """While entered, the model has the weights that evaluations use: the averaged ones, if there is an average."""
        return nullcontext() if self.ema is None else self.ema.swapped()

    def why_not_ahead(self) -> str | None:
        """What needs the numbers of an update before the next one can start, None if nothing does."""
        if not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            return f"the optimizer {self.config.optimizer.kind} cannot leave out a step by itself"
        if self.scaler.is_enabled():
            return "the loss scale of fp16 depends on every update"
        if self.qk_clip is not None:
            return "QK-Clip changes the weights after each update that is applied"
        if self.experts.moves_biases:
            return "the routers' biases change after each update that is applied"
        if type(self.placement).after_step is not Placement.after_step:
            return f"the placement {self.placement} changes the weights after each update that is applied"
        return None

    def __call__(self, step: int, batch: AnyBatch, probe: LayerProbe | None = None) -> Update:
        """Does update number ``step`` (from 1) with all sequences of one batch."""
        return self.start(step, batch, probe)()

    def start(self, step: int, batch: AnyBatch, probe: LayerProbe | None = None) -> Callable[[], Update]:
        """Starts update number ``step``; returns what waits until it is done and says what it reports.

        Only with ``runs_ahead`` there is something to wait for.
        """
        lr = learning_rate(self.config.schedule, self.config.optimizer.lr, step, self.config.steps)
        with nullcontext() if self.qk_clip is None else self.qk_clip.watching():
            losses = self._accumulate(step, batch)
        self.scaler.unscale_(self.optimizer)
        norm = global_grad_norm(self.parameters)
        if probe is not None:
            probe.record_gradients()
            probe.record_experts(self.experts.loads)
        named = losses if self.qk_clip is None else losses | self._logits(self.qk_clip)
        numbers = torch.stack([losses["loss"], norm, *(value for name, value in named.items() if name != "loss")])
        read = self._device_decides(lr, norm, numbers) if self.runs_ahead else self._decide(lr, norm, numbers)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return lambda: _report(lr, named, read())

    def _logits(self, qk_clip: QKClip) -> dict[str, Tensor]:
        return {"max_logit": qk_clip.largest(), "clipped_heads": qk_clip.n_over()}

    def _decide(self, lr: float, norm: Tensor, numbers: Tensor) -> Callable[[], list[float]]:
        """Waits for the numbers and applies the update if they are finite; returns that and them."""
        loss, grad_norm, *_ = values = numbers.tolist()
        applied = math.isfinite(loss) and math.isfinite(grad_norm)
        if applied:
            self._apply(lr, norm)
        return [float(applied), *values].copy

    def _device_decides(self, lr: float, norm: Tensor, numbers: Tensor) -> Callable[[], list[float]]:
        """The same without waiting: the optimizer leaves out its step if this update or one before it failed."""
        finite = numbers[:2].isfinite().all()  # loss and norm
        self._failed = torch.maximum(self._failed, (~finite).to(self._failed))
        self.optimizer.found_inf = self._failed  # pyright: ignore[reportAttributeAccessIssue]
        self._apply(lr, norm)
        return to_host(torch.cat([1 - self._failed[None], numbers]))

    def _accumulate(self, step: int, batch: AnyBatch) -> dict[str, Tensor]:
        """Adds up the gradients of all micro-batches; returns the loss and what else was added to it."""
        n_targets, n_parts = max(1, batch.n_targets), self.config.grad_accumulation
        totals = {"loss": torch.zeros((), device=self.device)}
        self.experts.start()
        for number, micro in enumerate(batch.split(n_parts)):
            torch.manual_seed(dropout_seed(self.config.seed, step, number))
            micro = micro.to(self.device)
            with autocast(self.config.precision, self.device):
                losses: Losses = self.task.losses(self.model, micro, n_targets, 1 / n_parts)
            for name, value in {"loss": losses.main, **losses.parts}.items():
                totals[name] = totals.get(name, torch.zeros((), device=self.device)) + value.detach()
            self.experts.add(losses.aux)
            self.scaler.scale(losses.loss).backward()
        return totals

    def _apply(self, lr: float, norm: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.config.clip is not None:
            clip_gradients(self.parameters, norm, self.config.clip)
        self.scaler.step(self.optimizer)
        if self.qk_clip is not None:
            self.qk_clip.clip()
        self.experts.balance()
        self.placement.after_step(self.model)
        if self.ema is not None:
            self.ema.update()


def _report(lr: float, named: dict[str, Tensor], values: list[float]) -> Update:
    """What an update reports; the values are whether it was applied, loss, norm, and the rest of ``named`` in order."""
    applied, loss, grad_norm, *others = values
    parts = dict(zip((name for name in named if name != "loss"), others, strict=True))
    max_logit, n_clipped = parts.pop("max_logit", None), parts.pop("clipped_heads", None)
    return Update(
        loss,
        grad_norm,
        lr,
        applied=bool(applied),
        parts=parts,
        max_logit=max_logit,
        clipped_heads=None if n_clipped is None else int(n_clipped),
    )


def to_host(numbers: Tensor) -> Callable[[], list[float]]:
    """Starts to copy numbers to the host, and returns what waits for them; later work of the device is not waited for.

    >>> to_host(torch.ones(2))()
    [1.0, 1.0]
    """
    if numbers.device.type != "cuda":
        return numbers.tolist
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)
    copied.record(torch.cuda.current_stream(numbers.device))

    def wait() -> list[float]:
        copied.synchronize()
        return copy.tolist()

    return wait


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """The seed of everything random in one forward pass.

    >>> dropout_seed(0, 1, 0) == dropout_seed(0, 1, 0) != dropout_seed(0, 1, 1)
    True
    """
    digest = hashlib.sha256(f"dropout {seed} {step} {micro_batch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
