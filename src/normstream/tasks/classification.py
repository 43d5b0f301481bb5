"""Classification of texts and of pairs of texts: fine-tuning an encoder, or training one from scratch.

Shape suffixes: B batch, C classes.
"""

import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from normstream.data.text_pairs import PairBatch, PairData, TextPairConfig, load_pairs
from normstream.models import Classifier, ClassifierConfig
from normstream.models.evaluating import evaluating
from normstream.optim import ScheduleConfig
from normstream.tasks.baseline import unigram_loss
from normstream.tasks.language_modeling import precise
from normstream.tasks.losses import autocast, loss_sum, target_losses
from normstream.tasks.task import Losses, Metric, Task, TaskName, check_length

FLUCTUATION = 0.1
"""How far above ln C the loss may stay before a run has diverged: one that knows no more than the frequencies of C
classes is at ln C, give or take some from batch to batch, and has collapsed."""


class TextClassification(Task):
    """Mean cross-entropy of the classes of texts or pairs of texts, of a ``Classifier``."""

    name: ClassVar[TaskName] = "classification"
    title: ClassVar[str] = "classification of texts"
    unit: ClassVar[str] = "samples"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy", "accuracy (%)", higher_is_better=True),
        Metric("f1", "F1 (%)", higher_is_better=True),
    )
    baseline: ClassVar[str] = "how frequent each class is"
    model_config: ClassVar[type[Any]] = ClassifierConfig
    data_config: ClassVar[type[Any]] = TextPairConfig

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {
            "model": ClassifierConfig(n_layers=4),
            "batch_size": 32,
            "steps": 600,
            "schedule": ScheduleConfig(warmup=50),
        }

    @classmethod
    def check(cls, config: Any) -> None:
        check_length(config)

    @classmethod
    def load(cls, config: TextPairConfig) -> PairData:
        return load_pairs(config)

    @classmethod
    def resolve(cls, model: Any, data: Any) -> Any:
        return replace(model, vocab_size=data.vocab_size, n_classes=len(data.classes))

    def losses(self, model: Classifier, batch: PairBatch, n_targets: int, share: float) -> Losses:
        logits_BC, aux = class_logits(model, batch)
        return target_losses(logits_BC, batch.labels_B, n_targets, self.config, aux)

    @torch.no_grad()
    def evaluate(self, model: Any) -> dict[str, float]:
        """``loss``, ``accuracy`` in percent, and with two classes ``f1`` of the second one in percent."""
        device = next(model.parameters()).device
        sums, guesses = [], []
        with evaluating(model), autocast(self.config.precision, device):
            for batch in self.eval_batches:
                batch = batch.to(device)
                logits_BC, _ = class_logits(model, batch)
                sums.append(loss_sum(logits_BC, batch.labels_B))
                guesses.append(logits_BC.argmax(-1))
        labels = torch.cat([batch.labels_B for batch in self.eval_batches])
        guessed = torch.cat(guesses).cpu()
        scores = {
            "loss": torch.stack(sums).cpu().double().sum().item() / len(labels),
            "accuracy": 100 * (guessed == labels).double().mean().item(),
        }
        return scores | {"f1": f1_score(guessed, labels)} if len(self.data.classes) == 2 else scores

    def uniform_loss(self) -> float:
        return math.log(len(self.data.classes)) + FLUCTUATION

    def baseline_loss(self) -> float:
        counts = np.bincount(self.data.train.labels, minlength=len(self.data.classes))
        return unigram_loss(counts, np.concatenate([batch.labels_B.numpy() for batch in self.eval_batches]))


def class_logits(model: Any, batch: PairBatch) -> tuple[Tensor, tuple[Any, ...]]:
    """The logits (B, C) of a batch, in float32 or float64, and what the sublayers report."""
    types_BT = batch.types_BT if model.config.n_types > 1 else None
    logits_BC, aux = model.logits_and_aux(batch.tokens_BT, batch.padding_BT, types_BT)
    return precise(logits_BC), aux


def f1_score(guessed: Tensor, labels: Tensor) -> float:
    """``2 TP / (2 TP + FP + FN)`` of class 1 in percent; 0 where it neither occurs nor is guessed.

    >>> f1_score(torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 1, 0]))
    50.0
    """
    true = int(((guessed == 1) & (labels == 1)).sum())
    wrong = int((guessed != labels).sum())
    return 100 * 2 * true / max(1, 2 * true + wrong)
