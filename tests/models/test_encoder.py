"""Encoders of every placement: padding changes nothing elsewhere, packed documents stay apart, bad input is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream import placements
from normstream.init import initialize
from normstream.layers import PositionConfig
from normstream.models import (
    Classifier,
    ClassifierConfig,
    DecoderConfig,
    DecoderLM,
    Encoder,
    EncoderConfig,
    build_model,
)
from normstream.norms import NormConfig

NAMES = placements.names()
OPTIONS = ["residual(dual_eps=1e-12)", "post(embedding_norm=true)", "siamese(read_out=paper)"]
CONFIG = EncoderConfig(vocab_size=20, dim=16, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=24, max_seq_len=16)
N_REAL = torch.tensor([7, 3, 5])
PADDING = torch.arange(7) >= N_REAL[:, None]


def randomize(model: nn.Module) -> None:
    """Every parameter, gains and mixing weights included, away from values that hide something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += (0.2 * noise).to(parameter.dtype)


def model_of(placement: str, **changes: Any) -> Encoder:
    model = Encoder(replace(CONFIG, placement=placement, **changes))
    initialize(model, seed=0)
    randomize(model)
    return model.double().eval()


def tokens(length: int = 7, seed: int = 2) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (3, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("name", [*NAMES, *OPTIONS])
def test_padding_never_changes_other_positions(name: str, norm: Any):
    """A row by itself without padding, with other tokens under the padding, and with more padding gives one output."""
    model = model_of(name, norm=NormConfig(kind=norm, bias=norm == "layer"))
    changed = torch.where(PADDING, tokens(seed=3), tokens())
    longer = torch.cat((tokens(), tokens(4, seed=4)), dim=1)
    more_padding = torch.cat((PADDING, torch.ones(3, 4, dtype=torch.bool)), dim=1)
    with torch.no_grad():
        padded = model(tokens(), PADDING)
        assert padded.isfinite().all()
        for row, n_real in enumerate(N_REAL):
            alone = model(tokens()[row : row + 1, :n_real])
            torch.testing.assert_close(padded[row, :n_real], alone[0], rtol=0, atol=1e-12)
        for other in (model(changed, PADDING), model(longer, more_padding)[:, :7]):
            torch.testing.assert_close(other[~PADDING], padded[~PADDING], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["learned", "sinusoidal", "alibi", "none"])
@pytest.mark.parametrize("name", ["post", "siamese", "residual"])
def test_padding_with_other_positions(name: str, kind: Any):
    model = model_of(name, positions=PositionConfig(kind=kind), n_types=2)
    types = torch.arange(7).expand(3, 7) % 2
    with torch.no_grad():
        padded = model(tokens(), PADDING, types)
        for row, n_real in enumerate(N_REAL):
            alone = model(tokens()[row : row + 1, :n_real], types_BT=types[row : row + 1, :n_real])
            torch.testing.assert_close(padded[row, :n_real], alone[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [*NAMES, *OPTIONS])
def test_gradients_of_padded_batches_are_finite_and_those_of_the_rows_alone(name: str):
    """In float32 with an eps that a zero row divides by; a row of nothing but padding included."""
    model = model_of(name, norm=NormConfig(kind="layer", eps=1e-12, bias=True)).float().train()
    padding = torch.cat((PADDING, torch.ones(1, 7, dtype=torch.bool)))
    padded_tokens = torch.cat((tokens(), tokens()[:1]))
    model(padded_tokens, padding)[~padding].logsumexp(-1).square().sum().backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    assert all(grad is not None and grad.isfinite().all() for grad in found.values())

    model.zero_grad()
    for row, n_real in enumerate(N_REAL):
        model(tokens()[row : row + 1, :n_real]).logsumexp(-1).square().sum().backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    got = torch.cat([grad.flatten() for grad in found.values() if grad is not None])
    assert (got - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_are_as_if_alone(name: str):
    model = model_of(name)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 3)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 3)
    padding = torch.arange(7).expand(3, 7) == 6
    with torch.no_grad():
        packed = model(tokens(), padding, documents_BT=documents, positions_BT=positions)
        first, second = model(tokens()[:, :3]), model(tokens()[:, 3:6])
    torch.testing.assert_close(packed[:, :6], torch.cat((first, second), dim=1), rtol=0, atol=1e-12)


def test_padding_in_front_and_negative_document_ids():
    """Padding may stand anywhere, and its document is one that no id names."""
    model = model_of("siamese")
    documents = torch.tensor([[-1] * 7] * 3)
    padding = torch.arange(7).expand(3, 7) < 2
    with torch.no_grad():
        padded = model(tokens(), padding, documents_BT=documents)
        alone = model(tokens()[:, 2:], positions_BT=torch.arange(2, 7).expand(3, 5))
    torch.testing.assert_close(padded[:, 2:], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_every_position_sees_every_other(name: str):
    """The gradient of each output by the embedding of each token is not zero."""
    model = model_of(name)
    embeddings: list[Tensor] = []
    model.tok_embeddings.register_forward_hook(lambda module, args, out: embeddings.append(out) or out.retain_grad())
    for position in range(7):
        model(tokens())[0, position].square().sum().backward()
        grad = embeddings.pop().grad
        assert grad is not None
        assert (grad[0].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_without_padding_it_is_a_decoder_that_is_not_causal(name: str):
    model = model_of(name)
    options = {"vocab_size": 20, "dim": 16, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 24}
    decoder = DecoderLM(DecoderConfig(placement=name, causal=False, **options)).double().eval()  # pyright: ignore[reportArgumentType]
    decoder.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), decoder(tokens()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [EncoderConfig, ClassifierConfig])
def test_built_on_meta_it_starts_with_the_same_values(kind: type[EncoderConfig], name: str):
    config = kind(placement=name, vocab_size=20, dim=16, n_layers=2, n_heads=4, n_types=2)
    with torch.device("meta"):
        model = build_model(config)
    model.to_empty(device="cpu")
    usual = build_model(config)
    for made in (model, usual):
        initialize(made, seed=0)
    torch.testing.assert_close(model(tokens()), usual(tokens()), rtol=0, atol=0)


def test_types_of_none_are_type_zero():
    model = model_of("pre", n_types=2)
    zeros, ones = torch.zeros(3, 7, dtype=torch.int64), torch.ones(3, 7, dtype=torch.int64)
    assert torch.equal(model(tokens()), model(tokens(), types_BT=zeros))
    assert not torch.allclose(model(tokens()), model(tokens(), types_BT=ones))


@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("name", [*NAMES, *OPTIONS])
def test_a_classifier_ignores_padding(name: str, pooling: Any):
    config = ClassifierConfig(
        placement=name, vocab_size=20, dim=16, n_layers=2, n_heads=4, n_classes=3, pooler=pooling == "first"
    )
    model = Classifier(replace(config, pooling=pooling))
    randomize(model)
    model = model.double().eval()
    with torch.no_grad():
        padded = model(tokens(), PADDING)
        alone = [model(tokens()[row : row + 1, :n_real]) for row, n_real in enumerate(N_REAL)]
    torch.testing.assert_close(padded, torch.cat(alone), rtol=0, atol=1e-12)


def test_pooling_without_pooler_is_the_head_of_the_mean():
    config = ClassifierConfig(vocab_size=20, dim=16, n_layers=1, n_heads=4, pooling="mean")
    model = Classifier(config).double().eval()
    hidden = model.hidden(tokens(), PADDING)
    means = torch.stack([hidden[row, :n].mean(0) for row, n in enumerate(N_REAL)])
    torch.testing.assert_close(model(tokens(), PADDING), means @ model.class_head.weight.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_types": -1}, "n_types must be at least 0, got -1"),
        ({"head": "brt"}, "head cannot be 'brt'; did you mean 'bert'"),
        ({"n_types": 1.5}, "n_types must be of type int"),
        ({"positions": PositionConfig(local_theta=5.0)}, "windowed"),
    ],
)
@pytest.mark.untyped
def test_wrong_configurations(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tied": True}, "tied is for a head that predicts tokens, .* leave it at false, got true"),
        ({"head": "bert"}, "head is for a head that predicts tokens"),
        ({"pooling": "last"}, "pooling cannot be 'last'; .*Known: first, mean"),
        ({"n_classes": 0}, "n_classes must be at least 1, got 0"),
    ],
)
@pytest.mark.untyped
def test_wrong_classifiers(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ClassifierConfig(**options)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"tokens_BT": torch.full((1, 2), 20)}, "token ids must be at least 0 and below vocab_size 20, got 20"),
        ({}, {"tokens_BT": torch.zeros(1, 17, dtype=torch.int64)}, "sequence of 17 tokens, .*max_seq_len 16"),
        ({}, {"tokens_BT": torch.zeros(1, 0, dtype=torch.int64)}, "sequence of 0 tokens"),
        ({}, {"types_BT": torch.zeros(1, 2, dtype=torch.int64)}, "no token types; leave types_BT out"),
        ({"n_types": 2}, {"types_BT": torch.full((1, 2), 2)}, "token types must .* below n_types 2, got 2"),
        ({}, {"padding_BT": torch.zeros(1, 3, dtype=torch.bool)}, r"padding_BT .* shape \(1, 2\).* got \(1, 3\)"),
        (
            {"positions": PositionConfig(kind="learned")},
            {"positions_BT": torch.full((1, 2), 16)},
            "learned positions must .* below max_seq_len 16, got 16",
        ),
    ],
)
@pytest.mark.untyped
def test_wrong_inputs(options: dict[str, Any], arguments: dict[str, Tensor], message: str):
    model = Encoder(replace(CONFIG, **options))
    with pytest.raises(ValueError, match=message):
        model(**({"tokens_BT": torch.zeros(1, 2, dtype=torch.int64)} | arguments))
