"""The loss of a model on its inputs, against transformers' own."""

import pytest
import torch
from tests.inspect.wired import stack, wired

from normstream.init import initialize
from normstream.inspect.measures.loss import loss_of, objective_of
from normstream.models import DecoderConfig, DecoderLM


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "mixtral", "bert"])
def test_the_loss_is_that_of_transformers(name: str) -> None:
    case = wired(name)
    expected = case.model(**case.inputs, labels=case.inputs["input_ids"]).loss.item()
    assert loss_of(case.model, case.inputs, case.anatomy) == pytest.approx(expected, rel=1e-6)


def test_an_encoder_decoder_predicts_the_next_token_of_its_decoder() -> None:
    case = wired("t5")
    labels = torch.cat([case.inputs["decoder_input_ids"][:, 1:], torch.tensor([[-100]])], dim=1)
    expected = case.model(**case.inputs, labels=labels).loss.item()
    assert loss_of(case.model, case.inputs, case.anatomy) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_whether_a_model_is_causal_is_measured(causal: bool, window: int | None) -> None:
    config = DecoderConfig(placement="siamese", causal=causal, window=window, dim=16, n_layers=1, n_heads=2)
    model = DecoderLM(config).eval()
    initialize(model, seed=0)
    objective = objective_of(model, {"tokens_BT": torch.arange(9)[None]}, None)
    assert objective is not None
    assert objective.is_causal == causal


def test_a_model_without_a_head_over_its_tokens_has_no_loss() -> None:
    case = wired("bert")
    body = case.model.bert
    parts = {"ffn": ("intermediate.dense", "output.dense", "output.dense")}
    anatomy = type(case.anatomy)((stack(body, "main", "encoder.layer", parts),), None, False, None)
    assert loss_of(body, case.inputs, anatomy) is None


def test_logits_that_overflow_are_no_loss() -> None:
    case = wired("llama")
    torch.nn.init.constant_(case.model.lm_head.weight, 1e38)
    assert loss_of(case.model, case.inputs, case.anatomy) is None


def test_scores_of_a_few_classes_are_no_loss_of_the_tokens() -> None:
    case = wired("bert")
    case.model.cls = torch.nn.Linear(32, 5)
    assert loss_of(case.model, case.inputs, case.anatomy) is None
