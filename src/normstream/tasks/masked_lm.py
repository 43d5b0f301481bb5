"""Masked language modelling: predict tokens that are hidden or changed from all those around them.

Shape suffixes: B batch, T sequence, D width, K chosen positions, V vocabulary.
"""

import math
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from normstream.data.masking import MaskableBatch, Masked, MaskedData, MaskedDataConfig, load_masked
from normstream.models import Encoder, EncoderConfig
from normstream.models.evaluating import evaluating
from normstream.optim import ScheduleConfig
from normstream.tasks.baseline import token_counts, unigram_loss
from normstream.tasks.language_modeling import NO_TARGET, precise
from normstream.tasks.losses import autocast, loss_sum, target_losses
from normstream.tasks.task import Losses, Metric, Task, TaskName, check_length, has_targets

EVALUATION_SEED = 0
"""Seed of the masks of all evaluations."""


class MaskedLanguageModeling(Task):
    """Mean cross-entropy of the chosen tokens, of an ``Encoder`` on packed documents that are masked anew each time."""

    name: ClassVar[TaskName] = "mlm"
    title: ClassVar[str] = "masked language modelling"
    unit: ClassVar[str] = "tokens"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("accuracy", "masked accuracy (%)", higher_is_better=True),)
    baseline: ClassVar[str] = "how frequent each token is"
    model_config: ClassVar[type[Any]] = EncoderConfig
    data_config: ClassVar[type[Any]] = MaskedDataConfig

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {
            "model": EncoderConfig(n_layers=6),
            "data": MaskedDataConfig(seq_len=64),
            "batch_size": 16,
            "steps": 600,
            "schedule": ScheduleConfig(warmup=50),
        }

    def __init__(self, config: Any, data: MaskedData) -> None:
        super().__init__(config, data)
        if not has_targets(self.eval_batches):
            raise ValueError(f"validation: {NO_TARGET}")
        self.masking = data.masking

    @classmethod
    def check(cls, config: Any) -> None:
        check_length(config)

    @classmethod
    def load(cls, config: MaskedDataConfig) -> MaskedData:
        return load_masked(config)

    @classmethod
    def resolve(cls, model: Any, data: Any) -> Any:
        return replace(model, vocab_size=data.vocab_size)

    def losses(self, model: Encoder, batch: MaskableBatch, n_targets: int, share: float) -> Losses:
        masked = self.masking(batch)
        logits_BKV, aux = chosen_logits(model, batch, masked)
        return target_losses(logits_BKV, masked.targets_BK, n_targets, self.config, aux)

    @torch.no_grad()
    def evaluate(self, model: Any) -> dict[str, float]:
        device, generator = next(model.parameters()).device, torch.Generator().manual_seed(EVALUATION_SEED)
        sums, n_targets = [], 0
        with evaluating(model), autocast(self.config.precision, device):
            for batch in self.eval_batches:
                masked = Masked(*(part.to(device) for part in self.masking(batch, generator)))
                logits_BKV, _ = chosen_logits(model, batch.to(device), masked)
                hits = (logits_BKV.argmax(-1) == masked.targets_BK).sum()
                sums.append(torch.stack([loss_sum(logits_BKV, masked.targets_BK), hits.to(logits_BKV.dtype)]))
                n_targets += batch.n_targets
        loss, hits = torch.stack(sums).cpu().double().sum(0).tolist()
        return {"loss": loss / n_targets, "accuracy": 100 * hits / n_targets}

    def uniform_loss(self) -> float:
        return math.log(self.data.vocab_size)

    def baseline_loss(self) -> float:
        generator = torch.Generator().manual_seed(EVALUATION_SEED)
        targets = np.concatenate([self.masking(b, generator).targets_BK.flatten().numpy() for b in self.eval_batches])
        counts = token_counts(self.data.corpus.train.tokens, self.data.vocab_size)
        counts[self.data.tokenizer.eot] = 0  # never a target
        return unigram_loss(counts, targets[targets >= 0])


def chosen_logits(model: Any, batch: MaskableBatch, masked: Masked) -> tuple[Tensor, tuple[Any, ...]]:
    """The logits (B, K, V) at the chosen places, in float32 or float64, and what the sublayers report."""
    hidden_BTD, aux = model.hidden_and_aux(
        masked.inputs_BT, documents_BT=batch.documents_BT, positions_BT=batch.positions_BT
    )
    places_BKD = masked.places_BK[..., None].expand(-1, -1, hidden_BTD.shape[-1])
    return precise(model.logits(hidden_BTD.gather(1, places_BKD))), aux
