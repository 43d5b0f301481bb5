"""The decoder: errors, shapes, causality, packed documents, options."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normstream import placements
from normstream.init import initialize
from normstream.layers.inner import Inner
from normstream.models import DecoderConfig, DecoderLM, PositionConfig
from normstream.norms import LayerNorm, NormConfig, RMSNorm

PLACEMENTS = ["pre", "post", "siamese", "siamese_hybrid_pre"]
SMALL = DecoderConfig(
    placement="pre", vocab_size=19, dim=24, n_layers=3, n_heads=4, n_kv_heads=2, max_seq_len=32, init_std=0.2
)


def build(placement: str = "pre", **options) -> DecoderLM:
    model = DecoderLM(replace(SMALL, placement=placement, **options))
    initialize(model, seed=0)
    return model.double().eval()


def tokens(batch: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(0, SMALL.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


# --- errors, before any work ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"head_dim": 7}, ["head_dim", "7", "even"]),
        ({"dim": 20, "n_heads": 4}, ["head_dim", "5", "even"]),
        ({"n_heads": 4, "n_kv_heads": 3}, ["n_heads", "4", "n_kv_heads", "3"]),
        ({"n_heads": 4, "n_kv_heads": 8}, ["n_kv_heads", "8"]),
        ({"n_kv_heads": 0}, ["n_kv_heads", "0"]),
        ({"dim": 30, "n_heads": 4}, ["dim", "30", "n_heads", "4"]),
        ({"n_layers": 0}, ["n_layers", "0"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"dim": 0}, ["dim", "0"]),
        ({"n_heads": 0}, ["n_heads", "0"]),
        ({"ffn_dim": 0}, ["ffn_dim", "0"]),
        ({"max_seq_len": 0}, ["max_seq_len", "0"]),
        ({"head_dim": 0}, ["head_dim", "0"]),
        ({"init_std": -1.0}, ["init_std", "-1"]),
        ({"dropout": 1.0}, ["dropout", "1"]),
        ({"drop_path": -0.5}, ["drop_path", "-0.5"]),
        ({"query_scale": 0.0}, ["query_scale", "0"]),
        ({"placement": "siamees"}, ["siamees", "'siamese'"]),
        ({"placement": "siamese(depth_scale=papre)"}, ["papre", "'paper'"]),
    ],
)
def test_wrong_configurations_say_what_is_wrong(wrong, words):
    with pytest.raises(ValueError, match=r".+") as error:
        DecoderLM(replace(SMALL, **wrong))
    assert all(word in str(error.value) for word in words), str(error.value)


WRONG_WORDS = """
from normstream.models import DecoderConfig, DecoderLM

for field in ("activation", "init", "bias"):
    try:
        DecoderLM(DecoderConfig(**{field: "nonsense"}))
    except ValueError as error:
        print(str(error).replace("\\n", " "))
    else:
        print(field, "was accepted")
"""


def test_wrong_words_are_value_errors():
    """In a fresh interpreter: the type checks that run in this one would raise before the library does."""
    run = subprocess.run([sys.executable, "-c", WRONG_WORDS], capture_output=True, text=True, check=True)
    messages = run.stdout.splitlines()
    assert ["nonsense" in message for message in messages] == [True] * 3, messages


def test_too_long_a_sequence():
    model = build(max_seq_len=8)
    model(tokens(length=8))
    with pytest.raises(ValueError, match=r"9.*8"):
        model(tokens(length=9))


@pytest.mark.parametrize("token", [-1, SMALL.vocab_size])
def test_a_token_outside_the_vocabulary(token):
    with pytest.raises((ValueError, IndexError)):
        build()(torch.tensor([[0, token]]))


# --- structure ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_names_and_shapes(placement):
    model = build(placement)
    assert model.streams == placements.get(placement).streams
    assert model(tokens()).shape == (2, 12, 19)
    assert model.hidden(tokens()).shape == (2, 12, 24)
    layer = model.layers[0]
    for name in ("attention", "after_attention", "feed_forward", "after_feed_forward"):
        assert hasattr(layer, name)
    torch.testing.assert_close(model(tokens()), model.lm_head(model.hidden(tokens())))


@pytest.mark.parametrize(
    ("placement", "norms"), [("pre", 13), ("post", 12), ("siamese", 39), ("siamese_hybrid_pre", 27)]
)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_number_of_norms_of_six_layers(placement, norms, kind):
    """q/k/v norms counted apart."""
    norm = NormConfig(kind=kind, bias=kind == "layer")
    model = DecoderLM(replace(SMALL, placement=placement, n_layers=6, norm=norm))
    found = [n for n, m in model.named_modules() if isinstance(m, RMSNorm if kind == "rms" else LayerNorm)]
    inner = [n for n in found if ".attention." in n]
    assert len(found) - len(inner) == norms
    assert len(inner) == (18 if placement == "siamese_hybrid_pre" else 0)


@pytest.mark.parametrize(("qk", "v", "per_layer"), [("none", "none", 0), ("model", "none", 2), ("model", "model", 3)])
@pytest.mark.parametrize("placement", ["pre", "siamese_hybrid_pre"])
def test_head_norms_can_be_chosen_for_any_placement(placement, qk, v, per_layer):
    model = build(placement, inner=Inner(qk=qk, v=v))
    gains = [p.shape for n, p in model.named_parameters() if ".attention." in n and "norm" in n]
    assert gains == [(6,)] * (3 * per_layer)


def test_tied_head_is_the_same_parameter():
    tied, untied = build(tied=True), build(tied=False)
    assert tied.lm_head.weight is tied.tok_embeddings.weight
    assert untied.lm_head.weight is not untied.tok_embeddings.weight
    count = {name: sum(p.numel() for p in m.parameters()) for name, m in (("tied", tied), ("untied", untied))}
    assert count["untied"] - count["tied"] == 19 * 24
    assert tied.double().lm_head.weight is tied.tok_embeddings.weight
    tied(tokens()).sum().backward()
    assert tied.tok_embeddings.weight.grad is not None


def test_bias_option():
    names = [n for n, _ in build(bias="all").named_parameters() if n.endswith("bias")]
    assert len(names) == 3 * 7
    assert not [n for n, _ in build(bias="none").named_parameters() if n.endswith("bias")]


def test_gelu_has_two_matrices():
    model = build(activation="gelu")
    shapes = {n: p.shape for n, p in model.named_parameters() if n.startswith("layers.0.feed_forward.")}
    assert shapes == {"layers.0.feed_forward.w_up.weight": (96, 24), "layers.0.feed_forward.w_down.weight": (24, 96)}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_embedding_multiplier_scales_the_embedding(placement):
    model = build(placement, embedding_multiplier=3.0, tied=False)
    plain = build(placement, tied=False)
    plain.load_state_dict(model.state_dict())
    plain.tok_embeddings.weight.data.mul_(3.0)
    torch.testing.assert_close(model(tokens()), plain(tokens()), rtol=0, atol=1e-12)


def test_rope_theta_is_read():
    assert (build(positions=PositionConfig(theta=100.0))(tokens()) - build()(tokens())).abs().max() > 1e-6


def test_non_parametric_norms():
    model = build("siamese", norm=NormConfig(gain="none"))
    assert not [n for n, _ in model.named_parameters() if "norm" in n]
    assert model(tokens()).isfinite().all()


# --- what a position sees -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_later_tokens_change_nothing_before(placement, dtype):
    model = build(placement).to(dtype)
    one = tokens()
    other = one.clone()
    other[:, 7] = (other[:, 7] + 1) % 19
    with torch.no_grad():
        a, b = model(one), model(other)
    assert torch.equal(a[:, :7], b[:, :7])
    assert not torch.equal(a[:, 7:], b[:, 7:])


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("positions_per_document", [True, False])
def test_packed_documents_equal_the_documents_alone(placement, positions_per_document):
    """Rotary positions are relative, so positions that run on through the row give the same numbers."""
    model = build(placement)
    first, second = tokens(length=5), tokens(length=7, seed=1)
    packed = torch.cat([first, second], dim=1)
    documents = torch.tensor([[0] * 5 + [1] * 7] * 2)
    positions = torch.tensor([[*range(5), *range(7)]] * 2) if positions_per_document else None
    with torch.no_grad():
        got = model(packed, documents_BT=documents, positions_BT=positions)
        alone = torch.cat([model(first), model(second)], dim=1)
        mixed = model(packed)
    torch.testing.assert_close(got, alone, rtol=0, atol=1e-12)
    assert (mixed[:, 5:] - alone[:, 5:]).abs().max() > 1e-6


def test_rows_may_have_different_documents():
    model, packed = build(), tokens(batch=2, length=6)
    documents = torch.tensor([[3, 3, 3, 3, 3, 3], [0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        got = model(packed, documents_BT=documents)
        torch.testing.assert_close(got[0], model(packed[:1])[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(got[1, 2:], model(packed[1:, 2:])[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_common_shift_of_positions_changes_nothing(placement):
    model, row = build(placement), tokens()
    positions = torch.arange(12).expand(2, -1)
    with torch.no_grad():
        shifted = model(row, positions_BT=positions + 500)
        torch.testing.assert_close(model(row), model(row, positions_BT=positions), rtol=0, atol=1e-13)
        torch.testing.assert_close(model(row), shifted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_of_a_batch_are_independent(placement):
    model, rows = build(placement), tokens(batch=3)
    with torch.no_grad():
        alone = torch.cat([model(row[None]) for row in rows])
        torch.testing.assert_close(model(rows), alone, rtol=0, atol=1e-12)


# --- precision, training mode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_streams_stay_in_float32_under_autocast(placement):
    model = build(placement).float()
    seen = []
    hooks = [layer.register_forward_hook(lambda m, a, out: seen.extend(out[0])) for layer in model.layers]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens())
    for hook in hooks:
        hook.remove()
    assert len(seen) == 3 * len(model.streams)
    assert all(stream.dtype == torch.float32 for stream in seen)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_low_precision_model_runs(placement, dtype):
    logits = build(placement).to(dtype)(tokens())
    assert logits.dtype == dtype
    assert logits.isfinite().all()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_parameter_receives_a_gradient(placement):
    model = build(placement)
    model(tokens()).square().sum().backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert dead == []


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_dropout_acts_in_training_only(placement):
    model = build(placement, dropout=0.3)
    plain = build(placement)
    with torch.no_grad():
        assert torch.equal(model(tokens()), plain(tokens()))
        model.train()
        torch.manual_seed(0)
        a = model(tokens())
        torch.manual_seed(0)
        b = model(tokens())
        c = model(tokens())
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_loss_at_the_start_is_that_of_a_uniform_guess(placement):
    model = DecoderLM(replace(SMALL, placement=placement, vocab_size=257, init_std=0.001, tied=False))
    initialize(model, seed=0)
    row = torch.randint(0, 257, (4, 32), generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(model(row).flatten(0, 1), row.flatten())
    assert loss.item() == pytest.approx(math.log(257), abs=0.01)
