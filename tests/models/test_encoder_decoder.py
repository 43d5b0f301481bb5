"""Encoder-decoder: every placement trains and decodes step by step; padding, cross-attention, embeddings, errors."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normstream
from normstream import placements
from normstream.layers import Context, CrossAttention, KVCache, PositionConfig
from normstream.models import EncoderDecoder, EncoderDecoderConfig, build_model, trunks
from normstream.optim import QKClip, parameter_roles
from normstream.training.probes import LayerProbe
from normstream.training.step import wrap_layers

NAMES = placements.names()
CONFIG = EncoderDecoderConfig(
    vocab_size=19, dim=16, n_layers=2, n_encoder_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=24, max_seq_len=10
)
LENGTHS = torch.tensor([7, 4, 1])


def build(**changes: Any) -> EncoderDecoder:
    model = EncoderDecoder(replace(CONFIG, **changes))
    normstream.initialize(model, seed=0)
    return model


def randomized(**changes: Any) -> EncoderDecoder:
    """In float64, every parameter away from values that hide something."""
    model, generator = build(**changes).double(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def tokens(length: int, seed: int = 0, high: int = 19) -> Tensor:
    return torch.randint(high, (3, length), generator=torch.Generator().manual_seed(seed))


SOURCE, TARGET = tokens(7), tokens(6, seed=1)
PADDING = torch.arange(7) >= LENGTHS[:, None]
KINDS: tuple[Any, ...] = ("alibi", "learned", "sinusoidal", "none")
POSITIONS = [(name, "rotary") for name in NAMES] + [
    (name, kind) for name in ("siamese", "realformer") for kind in KINDS
]


@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_in_float32(name):
    """The loss of fixed targets falls, and every parameter has a finite gradient."""
    model = build(placement=name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        return F.cross_entropy(model(SOURCE, TARGET[:, :-1], PADDING).flatten(0, 1), TARGET[:, 1:].flatten())

    before = loss()
    before.backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert missing == []
    optimizer.step()
    placements.get(name).after_step(model)
    assert loss().item() < before.item()


@pytest.mark.parametrize(("name", "kind"), POSITIONS)
def test_decoding_step_by_step_is_decoding_at_once(name, kind):
    model, cache = randomized(placement=name, positions=PositionConfig(kind=kind)), KVCache()
    with torch.no_grad():
        memory = model.encode(SOURCE, PADDING)
        parts = [model.decode(part, memory, PADDING, cache) for part in TARGET.split([1, 3, 2], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(SOURCE, TARGET, PADDING), rtol=0, atol=1e-10)
    assert cache.length == 6


@pytest.mark.parametrize(("name", "kind"), POSITIONS)
def test_padding_changes_nothing(name, kind):
    """A padded source gives what the source alone gives, whatever tokens the padding holds, and no NaN."""
    model = randomized(placement=name, positions=PositionConfig(kind=kind))
    memory, logits = model.encode(SOURCE, PADDING), model(SOURCE, TARGET, PADDING)
    other = SOURCE.masked_fill(PADDING, 3)
    torch.testing.assert_close(model.encode(other, PADDING), memory, rtol=0, atol=0)
    for row, length in enumerate(LENGTHS.tolist()):
        alone, target = SOURCE[row : row + 1, :length], TARGET[row : row + 1]
        torch.testing.assert_close(model.encode(alone)[0], memory[row, :length], rtol=0, atol=1e-10)
        torch.testing.assert_close(model(alone, target)[0], logits[row], rtol=0, atol=1e-10)
    torch.testing.assert_close(model(SOURCE, TARGET[:, :4], PADDING), logits[:, :4], rtol=0, atol=1e-10)
    everything = torch.ones_like(PADDING)
    loss = model(SOURCE, TARGET, everything).square().sum() + model(SOURCE, TARGET, PADDING).square().sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ["learned", "sinusoidal", "none"])
def test_padded_rows_start_as_zero_vectors_and_stay_finite(kind):
    """ResiDual norms its dual stream of zeros at the end, with an eps of 1e-7."""
    model, states = randomized(placement="residual", positions=PositionConfig(kind=kind)), []
    for border in (model.encoder.before_layers, *model.encoder.layers):
        border.register_forward_hook(lambda m, args, out: states.append(out[0]))
    memory = model.encode(SOURCE, PADDING)
    for stream in states[0]:
        assert not stream[PADDING].any()
        assert stream[~PADDING].all()
    assert all(stream.isfinite().all() for state in states for stream in state)
    assert memory.isfinite().all()


def test_cross_attention_is_that_of_torch():
    """All heads against nn.MultiheadAttention with its own weights, padding hidden, and no causal mask."""
    torch.manual_seed(0)
    ours = CrossAttention(8, n_heads=2, n_kv_heads=2, head_dim=4, layer=0, bias=True, output_bias=True).double()
    theirs = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    matrices = ours.wq, ours.wk, ours.wv
    theirs.in_proj_weight.data.copy_(torch.cat([m.weight for m in matrices]))
    theirs.in_proj_bias.data.copy_(torch.cat([m.bias for m in matrices]))
    theirs.out_proj.load_state_dict(ours.wo.state_dict())
    z, memory = torch.randn(3, 6, 8, dtype=torch.float64), torch.randn(3, 7, 8, dtype=torch.float64)
    wanted, _ = theirs(z, memory, memory, key_padding_mask=PADDING, need_weights=False)
    context = Context(memory=memory, memory_mask=~PADDING[:, None, None])
    torch.testing.assert_close(ours(z, context), wanted, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="memory"):
        ours(z, Context())


def test_keys_of_the_memory_are_computed_once():
    model, cache, calls = build(placement="post"), KVCache(), []
    for layer in model.decoder.layers:
        layer.get_submodule("cross_attention.wk").register_forward_hook(lambda *args: calls.append(1))
    memory = model.encode(SOURCE, PADDING)
    for part in TARGET.split(2, dim=1):
        model.decode(part, memory, PADDING, cache)
    assert len(calls) == 2


def test_a_reordered_cache_goes_on_from_other_rows():
    model, cache = randomized(placement="siamese"), KVCache()
    rows = torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        memory = model.encode(SOURCE, PADDING)
        model.decode(TARGET[:, :4], memory, PADDING, cache)
        cache.reorder(rows)
        got = model.decode(TARGET[rows, 4:], memory[rows], PADDING[rows], cache)
        wanted = model(SOURCE[rows], TARGET[rows], PADDING[rows])[:, 4:]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


INSIDE = {"hybridnorm": {"q_norm", "k_norm", "v_norm"}, "gemma3": {"q_norm", "k_norm"}, "ngpt": {"q_norm", "k_norm"}}


@pytest.mark.parametrize("name", ["pre", "normformer", "sub_ln", *INSIDE])
def test_norms_inside_cross_attention(name):
    """Those on queries, keys and values as in attention; fairseq and torchscale have none of their others there."""
    cross = build(placement=name).decoder.layers[0].get_submodule("cross_attention")
    matrices = {"wq", "wk", "wv", "wo"}
    assert {child for child, _ in cross.named_children()} - matrices == INSIDE.get(name, set())


def test_a_norm_that_the_configuration_asks_for_is_in_cross_attention_too():
    model = build(placement="pre", inner=normstream.layers.inner.Inner(context="rms"))
    assert model.decoder.layers[0].get_submodule("cross_attention").context_norm is not None


def test_embeddings_and_head():
    """Numbers of parameters outside the blocks, counted by hand."""

    def outside(**changes: Any) -> int:
        model = build(placement="post", **changes)
        return sum(p.numel() for n, p in model.named_parameters() if "layers" not in n)

    table, learned = 19 * 16, PositionConfig(kind="learned")
    assert outside() == 2 * table
    assert outside(tied=True) == table
    assert outside(shared_embeddings=False) == 3 * table
    assert outside(shared_embeddings=False, tied=True) == 2 * table
    assert outside(source_vocab_size=30) == 2 * table + 30 * 16
    assert outside(positions=learned) == 2 * table + 2 * 10 * 16
    model = build(tied=True, shared_embeddings=False)
    assert model.decoder_tok_embeddings is not None
    assert model.lm_head.weight is model.decoder_tok_embeddings.weight
    assert build(source_vocab_size=30)(tokens(7, high=30), TARGET).shape == (3, 6, 19)


@pytest.mark.parametrize("name", ["deepnorm", "siamese", "ngpt", "hyper_connections"])
def test_meta_then_to_empty_starts_with_the_same_values(name):
    changes: dict[str, Any] = {"placement": name, "tied": True}
    with torch.device("meta"):
        model = build_model(replace(CONFIG, **changes))
    model.to_empty(device="cpu")
    normstream.initialize(model, seed=0)
    torch.testing.assert_close(model(SOURCE, TARGET), build(**changes)(SOURCE, TARGET), rtol=0, atol=0)


@pytest.mark.parametrize("recomputed", ["layer", "selective", "inputs"])
@pytest.mark.parametrize("name", ["siamese", "realformer", "siamese_depth_attention"])
def test_recomputed_activations_give_the_same_gradients(name, recomputed):
    def gradients(how: Any) -> dict[str, Tensor | None]:
        model = build(placement=name, dropout=0.1, drop_path=0.1).train()
        wrap_layers(model, compiled=False, recomputed=how)
        torch.manual_seed(0)
        model(SOURCE, TARGET, PADDING).logsumexp(-1).square().mean().backward()
        return {n: p.grad for n, p in model.named_parameters()}

    torch.testing.assert_close(gradients(recomputed), gradients("none"), rtol=1e-5, atol=1e-7)


def test_layer_probe_measures_both_stacks():
    model = build(placement="siamese")
    with LayerProbe(model) as probe:
        model(SOURCE, TARGET, PADDING).square().mean().backward()
        probe.record_gradients()
    row = probe.row(step=1)
    assert list(trunks(model)) == ["encoder", "decoder"]
    assert {name: len(values) for name, values in row["rms"].items()} == {
        "encoder.x": 4,
        "encoder.y": 4,
        "decoder.x": 3,
        "decoder.y": 3,
    }
    assert len(row["grad_norm"]["layers"]) == 5
    assert row["grad_norm"]["embedding"] > 0


def test_roles_of_parameters():
    roles = parameter_roles(build(placement="siamese", shared_embeddings=False, tied=True))
    assert {n for n, role in roles.items() if role == "embedding"} == {
        "encoder_tok_embeddings.weight",
        "decoder_tok_embeddings.weight",
    }
    assert roles["decoder.layers.0.cross_attention.wk.weight"] == "matrix"


def test_qk_clip_bounds_the_logits_of_cross_attention():
    """More queries than are looked at at a time, over a mask that has one row for all of them."""
    model = build(placement="pre", max_seq_len=200, n_heads=1, n_kv_heads=1).double()
    cross: Any = model.decoder.layers[0].get_submodule("cross_attention")
    cross.wq.weight.data *= 50
    target, clip = torch.randint(19, (3, 150)), QKClip(model, threshold=2.0)
    seen: dict[str, Tensor] = {}
    cross.register_forward_hook(lambda m, args, out: seen.update(z=args[0], memory=args[1].memory))

    def largest() -> float:
        logits = cross.wq(seen["z"]) @ cross.wk(seen["memory"]).mT / 4
        return logits.masked_fill(PADDING[:, None], -torch.inf).max().item()

    with torch.no_grad():
        with clip.watching():
            model(SOURCE, target, PADDING)
        index = [attention is cross for attention in clip.attentions].index(True)
        assert clip.max_logits()[index] == [pytest.approx(largest())]
        assert largest() > 2
        clip.clip()
        assert largest() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_embeddings": True, "source_vocab_size": 30}, "shared_embeddings needs one vocabulary"),
        ({"n_encoder_layers": 0}, "n_encoder_layers must be at least 1"),
        ({"placement": "post:0,pre:1"}, "covers blocks 0-1, but the model has 3"),
        ({"positions": PositionConfig(kind="sinusoidal"), "dim": 5, "n_heads": 1, "n_kv_heads": 1}, "even dim"),
    ],
)
def test_wrong_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **changes)


@pytest.mark.untyped
def test_wrong_inputs():
    model = build(placement="pre", source_vocab_size=30)
    memory = model.encode(SOURCE)
    for run, message in (
        (lambda: model(tokens(7) + 30, TARGET), "below source_vocab_size 30, got"),
        (lambda: model(SOURCE, TARGET + 19), "below vocab_size 19, got"),
        (lambda: model(tokens(11), TARGET), "source of 11 tokens, but max_seq_len is 10"),
        (lambda: model(SOURCE, tokens(11)), "target of 11 tokens, but max_seq_len is 10"),
        (lambda: model(SOURCE[:, :0], TARGET), "source is empty"),
        (lambda: model.decode(TARGET[:2], memory), "need one batch size"),
        (lambda: model.encode(SOURCE, PADDING[:, :5]), "source's shape"),
    ):
        with pytest.raises(ValueError, match=message):
            run()
