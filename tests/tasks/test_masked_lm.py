"""Masked language modelling as a task: losses that add up, evaluations that repeat, a run that learns."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from normstream.data.masking import MaskableBatch, MaskedData, MaskedDataConfig, load_masked
from normstream.init import initialize
from normstream.models import Encoder, EncoderConfig
from normstream.optim import OptimizerConfig
from normstream.tasks.masked_lm import MaskedLanguageModeling, chosen_logits
from normstream.training import TrainConfig, load_model, resolve, train

MODEL = EncoderConfig(placement="siamese", dim=16, n_layers=2, n_heads=2, max_seq_len=32)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> MaskedData:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 100)
    return load_masked(MaskedDataConfig(source=str(path), seq_len=32, validation_fraction=0.1))


@pytest.fixture
def config(data: MaskedData) -> TrainConfig:
    config = TrainConfig(task="mlm", model=MODEL, data=data.config, batch_size=4, eval_batches=2, device="cpu")
    return resolve(config, data)


def encoder(config: TrainConfig) -> Encoder:
    assert isinstance(config.model, EncoderConfig)
    model = Encoder(config.model)
    initialize(model, 0)
    return model


def test_the_vocabulary_has_a_mask_token(config: TrainConfig):
    assert encoder(config).lm_head.out_features == 258


def test_losses_are_the_mean_over_the_chosen_tokens(config: TrainConfig, data: MaskedData):
    """All logits, and the loss token by token in a loop."""
    task, model = MaskedLanguageModeling(config, data), encoder(config)
    batch: MaskableBatch = data.train.batch(range(4))
    torch.manual_seed(1)
    losses = task.losses(model, batch, batch.n_targets, 1.0)
    torch.manual_seed(1)
    masked = task.masking(batch)
    logits = model(masked.inputs_BT, documents_BT=batch.documents_BT)
    one_by_one = [
        F.cross_entropy(logits[row, place], target)
        for row in range(4)
        for place, target in zip(masked.places_BK[row], masked.targets_BK[row], strict=True)
        if target >= 0
    ]
    assert len(one_by_one) == batch.n_targets == 20  # 15 % of 32, four times
    torch.testing.assert_close(losses.loss, torch.stack(one_by_one).mean())
    assert torch.equal(losses.loss, losses.main)


def test_micro_batches_add_up_to_the_mean(config: TrainConfig, data: MaskedData):
    task, model = MaskedLanguageModeling(replace(config, z_loss=1e-2, label_smoothing=0.1), data), encoder(config)
    batch = data.train.batch(range(4))
    parts = []
    for number, part in enumerate(batch.split(2)):
        torch.manual_seed(number)
        parts.append(task.losses(model, part, batch.n_targets, 0.5))
    sums, plain = [], []
    for number, part in enumerate(batch.split(2)):
        torch.manual_seed(number)
        masked = task.masking(part)
        logits, _ = chosen_logits(model, part, masked)
        flat, targets = logits.flatten(0, 1), masked.targets_BK.flatten()
        plain.append(F.cross_entropy(flat, targets, reduction="sum"))
        smooth = F.cross_entropy(flat, targets, reduction="sum", label_smoothing=0.1)
        sums.append(smooth + 1e-2 * (flat[targets >= 0].logsumexp(-1) ** 2).sum())
    wanted = sum(sums) / batch.n_targets
    torch.testing.assert_close(sum(part.loss for part in parts), wanted)
    added = sum(part.parts["z_loss"] + part.parts["label_smoothing"] for part in parts)
    torch.testing.assert_close(sum(part.main for part in parts) + added, wanted)
    torch.testing.assert_close(sum(part.main for part in parts), sum(plain) / batch.n_targets)


def test_evaluations_repeat_and_leave_the_random_state(config: TrainConfig, data: MaskedData):
    task, model = MaskedLanguageModeling(config, data), encoder(config).train()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = task.evaluate(model)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert task.evaluate(model) == first
    assert model.training


def test_accuracy_and_loss_of_a_model_that_knows_one_answer(config: TrainConfig, data: MaskedData):
    """A head that always says "e" with probability 1/2 is as often right as "e" is among the targets."""
    task = MaskedLanguageModeling(config, data)
    model = Encoder(replace(MODEL, vocab_size=258, head_bias=True))
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.zero_()
        model.lm_head.bias[ord("e")] = math.log(257)
    scores = task.evaluate(model)
    generator = torch.Generator().manual_seed(0)
    targets = torch.cat([task.masking(batch, generator).targets_BK.flatten() for batch in task.eval_batches])
    share = (targets[targets >= 0] == ord("e")).float().mean().item()
    assert scores["accuracy"] == pytest.approx(100 * share, abs=1e-4)
    assert 0 < share < 1
    wanted = -share * math.log(1 / 2) - (1 - share) * math.log(1 / 514)
    assert scores["loss"] == pytest.approx(wanted, rel=1e-5)


def test_baseline_is_the_frequency_of_the_tokens_that_are_targets(config: TrainConfig, data: MaskedData):
    task = MaskedLanguageModeling(config, data)
    generator = torch.Generator().manual_seed(0)
    counts = np.zeros(258)
    for token in data.corpus.train.tokens:
        counts[token] += token != 256
    counts += 1
    logs = [
        -math.log(counts[target] / counts.sum())
        for batch in task.eval_batches
        for target in task.masking(batch, generator).targets_BK.flatten().tolist()
        if target >= 0
    ]
    assert task.baseline_loss() == pytest.approx(sum(logs) / len(logs))
    assert task.uniform_loss() == math.log(258)


def test_a_run_learns_and_its_checkpoint_loads(data: MaskedData, tmp_path: Path):
    config = TrainConfig(
        task="mlm",
        model=replace(MODEL, placement="post", dim=32, n_heads=4),
        data=data.config,
        optimizer=OptimizerConfig(lr=1e-2),
        steps=150,
        batch_size=16,
        grad_accumulation=2,
        eval_every=150,
        device="cpu",
    )
    result = train(config, tmp_path / "run", data=data)
    assert result.val_loss is not None
    assert result.val_loss < result.baseline_loss - 0.3
    assert not result.collapsed
    model = load_model(tmp_path / "run")
    assert isinstance(model, Encoder)
    scores = MaskedLanguageModeling(resolve(config, data), data).evaluate(model)
    assert scores["loss"] == pytest.approx(result.val_loss, abs=1e-6)
    assert scores["accuracy"] == pytest.approx(result.metrics["accuracy"], abs=1e-4)


def test_a_model_that_is_too_short(data: MaskedData):
    with pytest.raises(ValueError, match=r"data\.seq_len 32 is above model\.max_seq_len 16"):
        TrainConfig(task="mlm", model=replace(MODEL, max_seq_len=16), data=data.config)


def test_validation_of_end_of_text_only(config: TrainConfig, data: MaskedData):
    empty = replace(data.validation.packed, tokens=np.full(200, 256, np.uint16))
    with pytest.raises(ValueError, match="no token to predict"):
        MaskedLanguageModeling(config, replace(data, validation=replace(data.validation, packed=empty)))
