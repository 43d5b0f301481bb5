"""With BERT's conventions an encoder is the same function as transformers' BERT and RoBERTa, on random weights."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream.models import Classifier, ClassifierConfig, Encoder, EncoderConfig, bert_config
from normstream.norms import NormConfig

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"dim": 32, "n_layers": 3, "n_heads": 4, "ffn_dim": 48, "vocab_size": 50, "max_seq_len": 16}
THEIR_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 50,
    "max_position_embeddings": 16,
}
PADDING = torch.arange(9) >= torch.tensor([9, 4, 6])[:, None]
WATCHED = (
    "tok_embeddings.weight",
    "pos_embeddings.weight",
    "type_embeddings.weight",
    "before_layers.join.norm.weight",
    "layers.0.attention.wq.weight",
    "layers.1.feed_forward.w_up.bias",
    "layers.2.after_feed_forward.join.norm.bias",
)


def trunk_map(prefix: str) -> dict[str, str]:
    """Our parameters, without weight and bias, to theirs."""
    names = {
        "tok_embeddings": f"{prefix}.embeddings.word_embeddings",
        "pos_embeddings": f"{prefix}.embeddings.position_embeddings",
        "type_embeddings": f"{prefix}.embeddings.token_type_embeddings",
        "before_layers.join.norm": f"{prefix}.embeddings.LayerNorm",
    }
    parts = {
        "attention.wq": "attention.self.query",
        "attention.wk": "attention.self.key",
        "attention.wv": "attention.self.value",
        "attention.wo": "attention.output.dense",
        "after_attention.join.norm": "attention.output.LayerNorm",
        "feed_forward.w_up": "intermediate.dense",
        "feed_forward.w_down": "output.dense",
        "after_feed_forward.join.norm": "output.LayerNorm",
    }
    for layer in range(3):
        names |= {f"layers.{layer}.{ours}": f"{prefix}.encoder.layer.{layer}.{their}" for ours, their in parts.items()}
    return names


BERT_HEAD = {
    "head_transform.dense": "cls.predictions.transform.dense",
    "head_transform.norm": "cls.predictions.transform.LayerNorm",
    "lm_head": "cls.predictions.decoder",
}
ROBERTA_HEAD = {
    "head_transform.dense": "lm_head.dense",
    "head_transform.norm": "lm_head.layer_norm",
    "lm_head": "lm_head.decoder",
}


def copy_weights(ours: nn.Module, theirs: nn.Module, names: Mapping[str, str], n_reserved: int = 0) -> dict[str, str]:
    """Random values in every parameter of theirs, copied to ours; returns our full names to theirs."""
    generator = torch.Generator().manual_seed(0)
    official = dict(theirs.named_parameters(remove_duplicate=False))
    full: dict[str, str] = {}
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for name, parameter in ours.named_parameters():
            module, _, part = name.rpartition(".")
            full[name] = f"{names[module]}.{part}"
            value = official[full[name]]
            parameter.copy_(value[n_reserved:] if module == "pos_embeddings" else value)
    assert {id(official[name]) for name in full.values()} == {id(p) for p in theirs.parameters()}, "some are not read"
    return full


def tokens() -> Tensor:
    return torch.randint(3, 50, (3, 9), generator=torch.Generator().manual_seed(1))


def types() -> Tensor:
    return (torch.arange(9) > 3).to(torch.int64).expand(3, 9)


def check_gradients(ours: nn.Module, theirs: nn.Module, full: Mapping[str, str], n_reserved: int = 0) -> None:
    mine, official = dict(ours.named_parameters()), dict(theirs.named_parameters(remove_duplicate=False))
    for name in WATCHED:
        wanted = official[full[name]].grad
        assert wanted is not None
        wanted = wanted[n_reserved:] if name.startswith("pos_embeddings") else wanted
        torch.testing.assert_close(mine[name].grad, wanted, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture
def eager() -> dict[str, Any]:
    return {"attn_implementation": "eager"}


def test_bert_for_masked_lm(eager: dict[str, Any]):
    ours = Encoder(bert_config(**SIZES)).double().eval()
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**THEIR_SIZES, **eager)).double().eval()
    full = copy_weights(ours, theirs, trunk_map("bert") | BERT_HEAD)
    logits = ours(tokens(), PADDING, types())
    wanted = theirs(tokens(), attention_mask=(~PADDING).long(), token_type_ids=types()).logits
    torch.testing.assert_close(logits[~PADDING], wanted[~PADDING], rtol=0, atol=1e-10)
    for made in (logits, wanted):
        made[~PADDING].log_softmax(-1)[:, 7].sum().backward()
    check_gradients(ours, theirs, full)


def test_roberta_for_masked_lm(eager: dict[str, Any]):
    """Its positions start at 2, since the first two rows of its table are for padding and nothing; ours lacks these.

    It counts the tokens before a position that are not padding, ours counts all: the same with padding at the end.
    """
    config = transformers.RobertaConfig(**(THEIR_SIZES | {"max_position_embeddings": 18}), pad_token_id=1, **eager)
    theirs = transformers.RobertaForMaskedLM(config).double().eval()
    norm = NormConfig(kind="layer", eps=config.layer_norm_eps, bias=True)
    ours = Encoder(bert_config(**SIZES, n_types=config.type_vocab_size, norm=norm)).double().eval()
    full = copy_weights(ours, theirs, trunk_map("roberta") | ROBERTA_HEAD, n_reserved=2)
    padded = tokens().masked_fill(PADDING, config.pad_token_id)
    logits = ours(padded, PADDING)
    wanted = theirs(padded, attention_mask=(~PADDING).long()).logits
    torch.testing.assert_close(logits[~PADDING], wanted[~PADDING], rtol=0, atol=1e-10)
    for made in (logits, wanted):
        made[~PADDING].log_softmax(-1)[:, 7].sum().backward()
    check_gradients(ours, theirs, full, n_reserved=2)


def test_bert_for_sequence_classification(eager: dict[str, Any]):
    base = bert_config(**SIZES)
    shared: dict[str, Any] = {
        name: getattr(base, name) for name in ("placement", "activation", "bias", "norm", "positions", "n_types")
    }
    ours = (
        Classifier(ClassifierConfig(**SIZES, **shared, head_bias=True, n_classes=3, pooling="first", pooler=True))
        .double()
        .eval()
    )
    config = transformers.BertConfig(**THEIR_SIZES, **eager, num_labels=3)
    theirs = transformers.BertForSequenceClassification(config).double().eval()
    names = trunk_map("bert") | {"pooler": "bert.pooler.dense", "class_head": "classifier"}
    full = copy_weights(ours, theirs, names)
    logits = ours(tokens(), PADDING, types())
    wanted = theirs(tokens(), attention_mask=(~PADDING).long(), token_type_ids=types()).logits
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-10)
    for made in (logits, wanted):
        made.log_softmax(-1)[:, 1].sum().backward()
    check_gradients(ours, theirs, full)


def test_bert_base_has_its_parameters():
    """The count of huggingface's bert-base-uncased with its head for masked tokens, decoder tied."""
    with torch.device("meta"):
        ours = Encoder(bert_config())
        theirs = transformers.BertForMaskedLM(transformers.BertConfig())
    count = sum(p.numel() for p in ours.parameters())
    assert count == sum(p.numel() for p in theirs.parameters()) == 109_514_298


def test_the_defaults_are_those_of_every_text_model():
    assert EncoderConfig().norm == NormConfig()
    assert EncoderConfig().positions.kind == "rotary"
