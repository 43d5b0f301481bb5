"""One update: forward, backward, accumulation, scaling, norm, clipping, optimizer, what follows it."""

import hashlib
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from normstream.data import Batch
from normstream.models import DecoderLM
from normstream.optim import QKClip, build_optimizer, clip_gradients, global_grad_norm, learning_rate
from normstream.training.config import TrainConfig
from normstream.training.evaluate import autocast, count_targets, logits_of, loss_sum, z_loss_sum
from normstream.training.probes import LayerProbe


@dataclass(frozen=True)
class Update:
    """What one update reports."""

    loss: float
    """Mean cross-entropy over the targets of all micro-batches, before the update."""
    grad_norm: float
    """True global norm, after accumulation and unscaling, before clipping."""
    lr: float
    """Learning rate."""
    applied: bool
    """False if the loss or the norm is not finite; parameters and optimizer state are then as before."""
    z_loss: float | None = None
    """What the z-loss adds to the loss, coefficient included; None if there is none."""
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

    Args:
        model: float32 parameters; its layers are wrapped for compilation and activation checkpointing if the config
            says so.
        config: the run.
    """

    def __init__(self, model: DecoderLM, config: TrainConfig) -> None:
        self.model, self.config = model, config
        self.device = next(model.parameters()).device
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(model, config.optimizer)
        threshold = config.optimizer.clip_threshold
        self.qk_clip = None if threshold is None else QKClip(model, threshold, config.optimizer.qk_clip)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        wrap_layers(model, compiled=config.compile, checkpointed=config.activation_checkpointing)

    def __call__(self, step: int, batch: Batch, probe: LayerProbe | None = None) -> Update:
        """Does update number ``step`` (from 1) with all sequences of one batch."""
        lr = learning_rate(self.config.schedule, self.config.optimizer.lr, step, self.config.steps)
        with nullcontext() if self.qk_clip is None else self.qk_clip.watching():
            losses = self._accumulate(step, batch)
        self.scaler.unscale_(self.optimizer)
        norm = global_grad_norm(self.parameters)
        if probe is not None:
            probe.record_gradients()

        # The one place where the host waits for the device.
        logits = [] if self.qk_clip is None else [self.qk_clip.largest(), self.qk_clip.n_over()]
        loss, z_loss, grad_norm, *watched = torch.stack([*losses, norm, *logits]).tolist()
        applied = math.isfinite(loss) and math.isfinite(grad_norm)
        if applied:
            self._apply(lr, norm)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        max_logit, n_clipped = watched or (None, None)
        return Update(
            loss,
            grad_norm,
            lr,
            applied,
            z_loss=z_loss if self.config.z_loss > 0 else None,
            max_logit=max_logit,
            clipped_heads=None if n_clipped is None else int(n_clipped),
        )

    def _accumulate(self, step: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """Adds up the gradients of all micro-batches; returns the cross-entropy and the z-loss."""
        n_targets = max(1, count_targets(batch))
        total = torch.zeros((), device=self.device)
        z_total = torch.zeros((), device=self.device)
        for number, micro in enumerate(split(batch, self.config.grad_accumulation)):
            torch.manual_seed(dropout_seed(self.config.seed, step, number))
            micro = micro.to(self.device)
            with autocast(self.config.precision, self.device):
                logits_BTV = logits_of(self.model, micro)
                loss = loss_sum(logits_BTV, micro.targets_BT) / n_targets
                total += loss.detach()
                if self.config.z_loss > 0:
                    z_loss = self.config.z_loss * z_loss_sum(logits_BTV, micro.targets_BT) / n_targets
                    z_total += z_loss.detach()
                    loss = loss + z_loss
            self.scaler.scale(loss).backward()
        return total, z_total

    def _apply(self, lr: float, norm: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.config.clip is not None:
            clip_gradients(self.parameters, norm, self.config.clip)
        self.scaler.step(self.optimizer)
        if self.qk_clip is not None:
            self.qk_clip.clip()
        self.model.placement.after_step(self.model)


def split(batch: Batch, parts: int) -> Iterator[Batch]:
    """The batch cut into equal micro-batches along its first axis.

    >>> tokens = torch.arange(8).view(4, 2)
    >>> [micro.inputs_BT.tolist() for micro in split(Batch(tokens, tokens), 2)]
    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    """
    rows = len(batch.inputs_BT) // parts
    for start in range(0, len(batch.inputs_BT), rows):
        part = slice(start, start + rows)
        documents = None if batch.documents_BT is None else batch.documents_BT[part]
        positions = None if batch.positions_BT is None else batch.positions_BT[part]
        yield Batch(batch.inputs_BT[part], batch.targets_BT[part], documents, positions)


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """The seed of everything random in one forward pass.

    >>> dropout_seed(0, 1, 0) == dropout_seed(0, 1, 0) != dropout_seed(0, 1, 1)
    True
    """
    digest = hashlib.sha256(f"dropout {seed} {step} {micro_batch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def wrap_layers(model: DecoderLM, *, compiled: bool, checkpointed: bool) -> None:
    """Compiles each layer's forward, and makes it recompute its activations in the backward pass, if asked for.

    The layer's own ``__call__`` stays outside, and with it all hooks, which then see each layer once per forward pass.

    >>> from normstream.models import DecoderConfig
    >>> wrap_layers(DecoderLM(DecoderConfig(dim=8, n_layers=1, n_heads=2)), compiled=False, checkpointed=True)
    """
    for layer in model.layers:
        if compiled:
            layer.forward = torch.compile(layer.forward)
        if checkpointed:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
