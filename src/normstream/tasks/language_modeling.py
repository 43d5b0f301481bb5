"""Language modelling: predict each token from those before it.

Shape suffixes: B batch, T sequence, V vocabulary.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from normstream.data import Batch, Data, DataConfig, load_data
from normstream.models import DecoderConfig, DecoderLM
from normstream.norms import precise_dtype
from normstream.tasks.baseline import token_counts, unigram_loss
from normstream.tasks.chunked_loss import head_loss
from normstream.tasks.losses import Precision, autocast, loss_sum, z_loss_sum
from normstream.tasks.router_losses import router_losses
from normstream.tasks.task import Losses, Task, TaskName, check_length, has_targets

NO_TARGET = (
    "the samples to evaluate on have no token to predict, they are end-of-text only; "
    "give other text, or more of it (eval_batches, validation_fraction)"
)


class LanguageModeling(Task):
    """Mean cross-entropy of the next token, of a ``DecoderLM`` on packed documents."""

    name: ClassVar[TaskName] = "lm"
    title: ClassVar[str] = "language modelling"
    unit: ClassVar[str] = "tokens"
    loss_unit: ClassVar[str] = "nats per token"
    baseline: ClassVar[str] = "how frequent each token is"
    model_config: ClassVar[type[Any]] = DecoderConfig
    data_config: ClassVar[type[Any]] = DataConfig

    def __init__(self, config: Any, data: Data) -> None:
        super().__init__(config, data)
        if not has_targets(self.eval_batches):
            raise ValueError(f"validation: {NO_TARGET}")

    @classmethod
    def check(cls, config: Any) -> None:
        check_length(config)
        if not config.model.causal:
            raise ValueError(
                "a language model must be causal, but model.causal is false: each position would see the token that it "
                "is to predict; set model.causal to true"
            )

    @classmethod
    def load(cls, config: DataConfig) -> Data:
        return load_data(config)

    @classmethod
    def resolve(cls, model: Any, data: Any) -> Any:
        return replace(model, vocab_size=data.vocab_size)

    def losses(self, model: DecoderLM, batch: Batch, n_targets: int, share: float) -> Losses:
        hidden_BTD, aux = hidden_and_aux(model, batch)
        loss, main, parts = self._head_losses(model, hidden_BTD, batch, n_targets)
        of_routers = router_losses(model.config.moe, aux, share)
        return Losses(sum(of_routers.values(), loss), main, parts | of_routers, aux)

    def _head_losses(
        self, model: DecoderLM, hidden_BTD: Tensor, batch: Batch, n_targets: int
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """What the logits add to the loss: all of it, the cross-entropy, and what else there is by name."""
        factor = self.config.z_loss
        if self.config.is_chunked(hidden_BTD.device):
            loss, main, z_loss = head_loss(model, hidden_BTD, batch.targets_BT, factor)
            loss, main = loss / n_targets, main / n_targets
            return loss, main, {"z_loss": factor * z_loss / n_targets} if factor > 0 else {}
        logits_BTV = precise(model.logits(hidden_BTD))
        main = loss_sum(logits_BTV, batch.targets_BT, self.config.label_smoothing) / n_targets
        if factor == 0:
            return main, main, {}
        z_loss = factor * z_loss_sum(logits_BTV, batch.targets_BT) / n_targets
        return main + z_loss, main, {"z_loss": z_loss}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": mean_loss(model, self.eval_batches, self.config.precision)}

    def uniform_loss(self) -> float:
        return math.log(self.data.vocab_size)

    def baseline_loss(self) -> float:
        targets = np.concatenate([batch.targets_BT.flatten().numpy() for batch in self.eval_batches])
        return unigram_loss(token_counts(self.data.train.tokens, self.data.vocab_size), targets[targets >= 0])


def precise(logits: Tensor) -> Tensor:
    """Logits in float32, or float64 of a float64 model."""
    return logits.to(precise_dtype(logits))


def hidden_and_aux(model: DecoderLM, batch: Batch) -> tuple[Tensor, tuple[Any, ...]]:
    """The final hidden vectors (B, T, D) of a batch, which the output head reads, and what the sublayers report."""
    return model.hidden_and_aux(batch.inputs_BT, documents_BT=batch.documents_BT, positions_BT=batch.positions_BT)


def logits_of(model: Any, batch: Batch) -> Tensor:
    """The logits (B, T, V) of a batch, in float32 or float64."""
    return precise(model(batch.inputs_BT, documents_BT=batch.documents_BT, positions_BT=batch.positions_BT))


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Iterable[Batch], precision: Precision = "fp32") -> float:
    """The loss per target over batches, in evaluation mode; the mode of the model is restored.

    Raises:
        ValueError: if no batch has a target.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    sums, targets = [], 0
    try:
        with autocast(precision, device):
            for batch in batches:
                batch = batch.to(device)
                sums.append(loss_sum(logits_of(model, batch), batch.targets_BT))
                targets += batch.n_targets
    finally:
        model.train(was_training)
    if targets == 0:
        raise ValueError(NO_TARGET)
    return torch.stack(sums).cpu().double().sum().item() / targets
