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
from normstream.models.evaluating import evaluating
from normstream.norms import precise_dtype
from normstream.tasks.baseline import token_counts, unigram_loss
from normstream.tasks.chunked_loss import head_loss
from normstream.tasks.losses import Precision, autocast, loss_sum, target_losses
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
        losses = self._head_losses(model, hidden_BTD, batch.targets_BT, n_targets)
        of_routers = router_losses(model.config.moe, aux, share)
        return Losses(sum(of_routers.values(), losses.loss), losses.main, losses.parts | of_routers, aux)

    def _head_losses(self, model: DecoderLM, hidden_BTD: Tensor, targets_BT: Tensor, n_targets: int) -> Losses:
        """What the logits add to the loss."""
        if not self.config.is_chunked(hidden_BTD.device):
            return target_losses(precise(model.logits(hidden_BTD)), targets_BT, n_targets, self.config)
        factor = self.config.z_loss
        loss, main, z_loss = (part / n_targets for part in head_loss(model, hidden_BTD, targets_BT, factor))
        return Losses(loss, main, {"z_loss": factor * z_loss} if factor > 0 else {})

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
    sums, targets = [], 0
    with evaluating(model), autocast(precision, device):
        for batch in batches:
            batch = batch.to(device)
            sums.append(loss_sum(logits_of(model, batch), batch.targets_BT))
            targets += batch.n_targets
    if targets == 0:
        raise ValueError(NO_TARGET)
    return torch.stack(sums).cpu().double().sum().item() / targets
