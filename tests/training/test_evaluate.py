import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from normstream import DecoderConfig, DecoderLM, initialize
from normstream.data import Data, PackedTokens
from normstream.tasks.losses import z_loss_sum
from normstream.tasks.task import spread
from normstream.training import evaluate


@pytest.fixture
def model() -> DecoderLM:
    made = DecoderLM(DecoderConfig(placement="pre", dim=16, n_layers=1, n_heads=2, dropout=0.5))
    initialize(made, seed=0)
    return made


def test_every_target_counts_once(model: DecoderLM, data: Data):
    scores = evaluate(model, data.validation, batch_size=7)
    model.eval()
    total, n = 0.0, 0
    for i in range(len(data.validation)):
        row = data.validation.sample(i)
        logits = model(row.inputs_BT, documents_BT=row.documents_BT)[0]
        total += F.cross_entropy(logits.double(), row.targets_BT[0], ignore_index=-100, reduction="sum").item()
        n += int((row.targets_BT != -100).sum())
    assert scores["loss"] == pytest.approx(total / n, rel=1e-6)
    assert scores["perplexity"] == pytest.approx(math.exp(total / n), rel=1e-5)


def test_a_uniform_guess(model: DecoderLM):
    with torch.no_grad():
        model.lm_head.weight.zero_()
    # 100 tokens that stand for 250 bytes
    packed = PackedTokens(np.arange(100), seq_len=9, eot=256, n_bytes=250)
    scores = evaluate(model, packed)
    assert scores["loss"] == pytest.approx(math.log(257))
    assert scores["perplexity"] == pytest.approx(257)
    assert scores["bits_per_byte"] == pytest.approx(math.log2(257) / 2.5)


def test_mode_is_restored_and_dropout_is_off(model: DecoderLM, data: Data):
    model.train()
    assert evaluate(model, data.validation) == evaluate(model, data.validation)
    assert model.training


def test_batches_are_spread_over_the_text(data: Data):
    batches = list(spread(data.validation, batch_size=2, batches=3))
    n = len(data.validation)
    expected = torch.cat([data.validation.sample(i * n // 6).inputs_BT for i in range(6)])
    assert torch.equal(torch.cat([batch.inputs_BT for batch in batches]), expected)


def test_text_without_a_sample(model: DecoderLM):
    with pytest.raises(ValueError, match="no sample to evaluate on: the data, of size 5, holds less than one"):
        evaluate(model, PackedTokens(np.arange(5), seq_len=8, eot=256, n_bytes=5))


@pytest.mark.parametrize("across", [False, True])
def test_text_of_end_of_text_only(across: bool, model: DecoderLM):
    packed = PackedTokens(np.full(50, 256), seq_len=8, eot=256, n_bytes=0, cross_document_attention=across)
    with pytest.raises(ValueError, match="no token to predict, they are end-of-text only"):
        evaluate(model, packed)


def test_samples_without_a_target(model: DecoderLM):
    tokens = np.full(50, 256)
    tokens[-1] = 7  # the tail is in no sample
    with pytest.raises(ValueError, match="no token to predict"):
        evaluate(model, PackedTokens(tokens, seq_len=8, eot=256, n_bytes=1))


def test_batches_are_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []
    real = PackedTokens.batch
    monkeypatch.setattr(PackedTokens, "batch", lambda self, samples: made.append(len(samples)) or real(self, samples))
    batches = spread(PackedTokens(np.arange(81), seq_len=8, eot=256, n_bytes=81), batch_size=4, batches=None)
    assert made == []
    next(batches)
    assert made == [4]
    assert [len(batch.inputs_BT) for batch in batches] == [4, 2]


def test_z_loss_ignores_whatever_stands_where_nothing_is_to_be_predicted():
    logits = torch.tensor([[[0.0, 0.0], [1e30, 0.0], [0.0, 3.0]]], requires_grad=True)
    loss = z_loss_sum(logits, torch.tensor([[1, -100, -100]]))
    loss.backward()
    torch.testing.assert_close(loss.item(), math.log(2) ** 2)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[0], torch.tensor([[math.log(2)] * 2, [0.0, 0.0], [0.0, 0.0]]))
