"""Translation: predict each token of the target from the source and the tokens before it.

Shape suffixes: B pairs, T target positions, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from normstream.beam_search import beam_search
from normstream.data.extras import import_extra
from normstream.data.tokenizer import Tokenizer
from normstream.data.translation import TranslationBatch, TranslationConfig, TranslationData, load_translation, pad_rows
from normstream.models import EncoderDecoder, EncoderDecoderConfig
from normstream.models.evaluating import evaluating
from normstream.optim import ScheduleConfig
from normstream.tasks.baseline import token_counts, unigram_loss
from normstream.tasks.language_modeling import precise
from normstream.tasks.losses import autocast, loss_sum, target_losses
from normstream.tasks.task import Artifact, Losses, Metric, Task, TaskName, check_length

TRANSLATIONS = "translations.tsv"
"""File in the run folder with source, reference and hypothesis of every pair that was translated."""


class Translation(Task):
    """Mean cross-entropy of target tokens, of an ``EncoderDecoder``; then exact match and BLEU of a beam search.

    The loss that is reported is the plain cross-entropy; what label smoothing adds to it is the part
    ``label_smoothing``. BLEU is sacrebleu's with its defaults: of the whole set, tokenizer 13a, exponential smoothing,
    case kept (extra [translation]).
    """

    name: ClassVar[TaskName] = "translation"
    title: ClassVar[str] = "translation"
    unit: ClassVar[str] = "pairs"
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("exact_match", "exact match (%)", higher_is_better=True),
        Metric("bleu", "BLEU", higher_is_better=True),
        Metric("accuracy", "token accuracy (%)", higher_is_better=True),
    )
    artifacts: ClassVar[tuple[Artifact, ...]] = (Artifact(TRANSLATIONS, "Translations of the validation split"),)
    baseline: ClassVar[str] = "how frequent each target token is"
    model_config: ClassVar[type[Any]] = EncoderDecoderConfig
    data_config: ClassVar[type[Any]] = TranslationConfig

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {
            "model": EncoderDecoderConfig(dim=64, n_layers=2, n_heads=4),
            "schedule": ScheduleConfig("cosine", warmup=50),
            "steps": 600,
            "batch_size": 64,
            "eval_every": 100,
            "checkpoint_every": 300,
        }

    def __init__(self, config: Any, data: TranslationData) -> None:
        super().__init__(config, data)
        self._sacrebleu = import_extra("sacrebleu", "translation")  # missing, it is missed before the training

    @classmethod
    def check(cls, config: Any) -> None:
        check_length(config, "max_len")

    @classmethod
    def load(cls, config: TranslationConfig) -> TranslationData:
        return load_translation(config)

    @classmethod
    def resolve(cls, model: Any, data: Any) -> Any:
        return replace(model, vocab_size=data.vocab_size, source_vocab_size=None)

    def losses(self, model: EncoderDecoder, batch: TranslationBatch, n_targets: int, share: float) -> Losses:
        hidden_BTD, aux = model.hidden_and_aux(batch.source_BS, batch.inputs_BT, batch.padding_BS)
        return target_losses(precise(model.logits(hidden_BTD)), batch.targets_BT, n_targets, self.config, aux)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        loss, correct, targets = [], [], 0
        with evaluating(model), autocast(self.config.precision, device):
            for batch in (batch.to(device) for batch in self.eval_batches):
                logits_BTV = precise(model(batch.source_BS, batch.inputs_BT, batch.padding_BS))
                loss.append(loss_sum(logits_BTV, batch.targets_BT))
                correct.append((logits_BTV.argmax(-1) == batch.targets_BT).sum())
                targets += batch.n_targets
        return {
            "loss": torch.stack(loss).cpu().double().sum().item() / targets,
            "accuracy": 100 * torch.stack(correct).sum().item() / targets,
        }

    def judge(self, model: nn.Module, folder: Path) -> dict[str, float]:
        """Exact match (%) and BLEU of a beam search; writes ``translations.tsv``."""
        assert isinstance(model, EncoderDecoder)
        config, pairs = self.data.config, self.data.validation.pairs
        n_pairs = min(len(pairs), config.decoding.n_pairs)
        chosen = [pairs[number * len(pairs) // n_pairs] for number in range(n_pairs)]
        sources, references = [pair.source for pair in chosen], [pair.target for pair in chosen]
        with autocast(self.config.precision, next(model.parameters()).device):
            hypotheses = translate(model, sources, config, self.data.tokenizer, self.config.batch_size)
        lines = map("\t".join, zip(sources, references, hypotheses, strict=True))
        (folder / TRANSLATIONS).write_text(
            "\n".join(("source\treference\thypothesis", *lines, "")), encoding="utf-8", newline="\n"
        )
        matches = sum(map(str.__eq__, hypotheses, references))
        bleu = self._sacrebleu.corpus_bleu(hypotheses, [references], force=True).score
        return {"exact_match": 100 * matches / n_pairs, "bleu": bleu}

    def uniform_loss(self) -> float:
        return math.log(self.data.vocab_size)

    def baseline_loss(self) -> float:
        targets = torch.cat([batch.targets_BT.flatten() for batch in self.eval_batches]).numpy()
        counts = token_counts(self.data.train.target_tokens(), self.data.vocab_size)
        return unigram_loss(counts, targets[targets >= 0])


def translate(
    model: EncoderDecoder, texts: Sequence[str], config: TranslationConfig, tokenizer: Tokenizer, batch_size: int = 64
) -> list[str]:
    """The best translation of each text that a beam search finds, white space collapsed.

    Args:
        model: on any device.
        texts: the sources.
        config: what is searched for and how: ``decoding``, and ``max_len``, the most tokens of a translation.
        tokenizer: of both languages.
        batch_size: texts at a time.

    Raises ValueError for a text of more tokens than the model reads.

    >>> from normstream.data import ByteTokenizer
    >>> model = EncoderDecoder(EncoderDecoderConfig(placement="pre", dim=8, n_layers=1, n_heads=2))
    >>> len(translate(model, ["one", "two"], TranslationConfig(max_len=4), ByteTokenizer()))
    2
    """
    device, decoding, eot = next(model.parameters()).device, config.decoding, tokenizer.eot
    found: list[str] = []
    for start in range(0, len(texts), batch_size):
        rows = [np.array(tokenizer.encode(" ".join(text.split()))) for text in texts[start : start + batch_size]]
        source_BS, padding_BS = (tensor.to(device) for tensor in pad_rows(rows, eot))
        tokens_BT = beam_search(
            model,
            source_BS,
            padding_BS,
            bos=eot,
            eos=eot,
            max_new_tokens=config.max_len,
            beam_size=decoding.beam_size,
            length_penalty=decoding.length_penalty,
        )
        found += [" ".join(tokenizer.decode(tokens).split()) for tokens in tokens_BT.tolist()]
    return found
