"""Attention options in the whole decoder: windows, positions, links, caps, latent attention, parallel blocks.

What holds for all of them (causality, packed documents, cache, recomputation, meta device) is tested for all of them.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from normstream import placements
from normstream.generation import generate
from normstream.init import initialize
from normstream.layers import KVCache, LatentConfig, PositionConfig
from normstream.layers.inner import Inner
from normstream.models import DecoderConfig, DecoderLM
from normstream.norms import NormConfig

SMALL = DecoderConfig(
    placement="pre", vocab_size=19, dim=24, n_layers=4, n_heads=4, n_kv_heads=2, max_seq_len=32, init_std=0.2
)
LATENT = LatentConfig(kv_rank=6, q_rank=10, nope_head_dim=4, rope_head_dim=4, v_head_dim=5)
OPTIONS: dict[str, dict[str, Any]] = {
    "windows": {"window": 3},
    "every second layer full, two bases": {
        "window": 4,
        "full_every": 2,
        "positions": PositionConfig(theta=1e5, local_theta=100.0),
    },
    "positions in windowed layers only": {
        "window": 4,
        "full_every": 4,
        "positions": PositionConfig(layers="windowed", pairing="interleaved"),
    },
    "partial rotary": {"head_dim": 8, "positions": PositionConfig(fraction=0.5)},
    "alibi": {"positions": PositionConfig(kind="alibi")},
    "alibi in windows": {"positions": PositionConfig(kind="alibi"), "window": 3, "attention_cap": 5.0},
    "learned": {"positions": PositionConfig(kind="learned")},
    "no positions": {"positions": PositionConfig(kind="none")},
    "caps and scales": {"attention_cap": 2.0, "query_scale": 1.0, "logit_cap": 3.0, "logit_multiplier": 0.5},
    "norm of all heads": {"inner": Inner(qk="rms", qk_statistics="all_heads", qk_gain="per_head", v="rms")},
    "unit vectors after rope": {"inner": Inner(qk="l2", qk_gain="number_per_head", qk_after_rope="yes")},
    "inner norms and head scale": {"inner": Inner(context="layer", hidden="rms", head_scale="before_output")},
    "head scale after": {"inner": Inner(head_scale="after_output"), "bias": "all"},
    "linked scores": {"inner": Inner(link="scores")},
    "linked scores in windows": {"inner": Inner(link="scores"), "window": 3, "full_every": 2},
    "linked values": {"inner": Inner(link="depth")},
    "linked values of every layer": {"inner": Inner(link="depth", qk="rms"), "depth_stride": 1},
    "latent": {"latent": LATENT, "n_kv_heads": None, "positions": PositionConfig(pairing="interleaved")},
    "latent in windows": {"latent": replace(LATENT, q_rank=0), "n_kv_heads": None, "window": 3, "attention_cap": 5.0},
}
every_option = pytest.mark.parametrize("name", OPTIONS)


def build(seed: int = 0, **options: Any) -> DecoderLM:
    model = DecoderLM(replace(SMALL, **options))
    initialize(model, seed=seed)
    return model.double().eval()


def tokens(batch: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(0, SMALL.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


# --- what holds for every option ------------------------------------------------------------------------------------


@every_option
def test_an_option_does_something(name):
    plain = {key: value for key, value in OPTIONS[name].items() if key in ("n_kv_heads", "head_dim", "bias")}
    model = build(**OPTIONS[name])
    with torch.no_grad():
        for parameter in (p for n, p in model.named_parameters() if "head_scale" in n):
            parameter.mul_(2)  # it starts at 1
        assert (model(tokens()) - build(**plain)(tokens())).abs().max() > 1e-6


@every_option
def test_later_tokens_change_nothing_before(name):
    model, one = build(**OPTIONS[name]), tokens()
    other = one.clone()
    other[:, 7] = (other[:, 7] + 1) % 19
    with torch.no_grad():
        a, b = model(one), model(other)
    torch.testing.assert_close(a[:, :7], b[:, :7], rtol=0, atol=1e-13)
    assert (a[:, 7] - b[:, 7]).abs().max() > 1e-6


@every_option
def test_packed_documents_equal_the_documents_alone(name):
    model = build(**OPTIONS[name])
    first, second = tokens(length=5), tokens(length=7, seed=1)
    documents = torch.tensor([[0] * 5 + [1] * 7] * 2)
    positions = torch.tensor([[*range(5), *range(7)]] * 2)
    with torch.no_grad():
        packed = model(torch.cat([first, second], dim=1), documents_BT=documents, positions_BT=positions)
        alone = torch.cat([model(first), model(second)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)


@every_option
@pytest.mark.parametrize("chunks", [[1] * 12, [5, 3, 1, 3]])
def test_cached_logits_equal_the_full_forward(name, chunks):
    model, row, cache = build(**OPTIONS[name]), tokens(), KVCache()
    with torch.no_grad():
        parts = [model(chunk, cache=cache) for chunk in row.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(row), rtol=0, atol=1e-11)


@every_option
def test_greedy_generation_is_the_argmax_of_the_full_forward(name):
    model, expected = build(**OPTIONS[name]), tokens(length=3)
    got = generate(model, expected, 8)
    with torch.no_grad():
        for _ in range(8):
            expected = torch.cat([expected, model(expected)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(got, expected)


@every_option
def test_recomputed_layers_have_the_same_gradients(name):
    gradients = []
    for recomputed in (False, True):
        model = build(**OPTIONS[name])
        if recomputed:
            for layer in model.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        model(tokens()).square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for parameter, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][parameter]), parameter


@every_option
def test_every_parameter_receives_a_gradient(name):
    """But for key biases, which move all scores of a query alike where nothing is rotated."""
    model = build(**OPTIONS[name])
    model(tokens()).square().sum().backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert dead == []


@every_option
def test_the_meta_device_loses_nothing(name):
    config = replace(SMALL, **OPTIONS[name])
    with torch.device("meta"):
        model = DecoderLM(config)
    assert all(p.is_meta for p in model.parameters())
    assert list(model.buffers()) == []
    model.to_empty(device="cpu")
    initialize(model, seed=0)
    with torch.no_grad():
        torch.testing.assert_close(model.double().eval()(tokens()), build(**OPTIONS[name])(tokens()), rtol=0, atol=0)


@every_option
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_runs(name, dtype):
    logits = build(**OPTIONS[name]).to(dtype)(tokens())
    assert logits.dtype == dtype
    assert logits.isfinite().all()


@every_option
def test_autocast_runs(name):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert build(**OPTIONS[name]).float()(tokens()).isfinite().all()


@every_option
def test_largest_logits_are_the_same_when_layers_are_recomputed(name):
    records = []
    for recomputed in (False, True):
        model: Any = build(**OPTIONS[name])
        for layer in model.layers:
            layer.attention.max_logits = torch.full((4,), -math.inf, dtype=torch.float64)
            if recomputed:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        model(tokens()).sum().backward()
        records.append(torch.stack([layer.attention.max_logits for layer in model.layers]))
    assert records[0].isfinite().all()
    assert torch.equal(*records)


# --- single options -------------------------------------------------------------------------------------------------


def reach(model: DecoderLM, at: int) -> list[int]:
    """Positions whose logits a token changes."""
    one = tokens(batch=1)
    other = one.clone()
    other[:, at] = (other[:, at] + 1) % 19
    with torch.no_grad():
        difference = (model(one) - model(other)).abs().amax((0, 2))
    return [i for i, d in enumerate(difference.tolist()) if d > 1e-9]


def test_a_window_reaches_as_many_positions_as_it_says():
    assert reach(build(n_layers=1, window=3), at=4) == [4, 5, 6]
    assert reach(build(n_layers=2, window=3), at=4) == [4, 5, 6, 7, 8]
    assert reach(build(n_layers=2, window=3, full_every=2), at=4) == list(range(4, 12))
    assert reach(build(n_layers=1, window=3, causal=False), at=4) == [2, 3, 4, 5, 6]
    assert reach(build(n_layers=1, causal=False), at=4) == list(range(12))


def test_which_layers_are_full():
    """Gemma 2: every second from layer 1 on; Gemma 3: every sixth from layer 5 on; Cohere 2: every fourth."""
    config = replace(SMALL, n_layers=12, window=4)
    for every, full in {0: [], 2: [1, 3, 5, 7, 9, 11], 6: [5, 11], 4: [3, 7, 11], 1: list(range(12))}.items():
        windowed = [replace(config, full_every=every).is_windowed(i) for i in range(12)]
        assert [i for i in range(12) if not windowed[i]] == full


@pytest.mark.parametrize("kind", ["alibi", "none"])
def test_without_rotary_a_shift_of_positions_means_nothing(kind):
    model, positions = build(positions=PositionConfig(kind=kind)), torch.arange(12).expand(2, -1)
    with torch.no_grad():
        assert torch.equal(model(tokens(), positions_BT=positions + 7), model(tokens()))


def test_learned_positions_are_added_to_the_embedding():
    learned = build(positions=PositionConfig(kind="learned"), tied=False)
    assert learned.pos_embeddings is not None
    assert learned.pos_embeddings.weight.shape == (32, 24)
    row = torch.full((1, 4), 7)
    nowhere = build(positions=PositionConfig(kind="none"), tied=False, vocab_size=32)
    nowhere.load_state_dict(
        {
            **{n: p for n, p in learned.state_dict().items() if "embeddings" not in n and "head" not in n},
            "tok_embeddings.weight": learned.pos_embeddings.weight + learned.tok_embeddings.weight[7],
            "lm_head.weight": torch.zeros(32, 24, dtype=torch.float64),
        }
    )
    with torch.no_grad():
        expected = nowhere.hidden(torch.tensor([[0, 1, 2, 3]]))
        torch.testing.assert_close(learned.hidden(row), expected, rtol=0, atol=1e-13)


def test_logits_are_multiplied_then_capped():
    plain, both = build(), build(logit_multiplier=3.0, logit_cap=2.0)
    with torch.no_grad():
        expected = 2 * torch.tanh(3 * plain(tokens()) / 2)
        torch.testing.assert_close(both(tokens()), expected, rtol=0, atol=1e-13)


def test_head_bias():
    model = build(head_bias=True)
    assert torch.equal(model.lm_head.bias, torch.zeros(19, dtype=torch.float64))
    model.lm_head.bias.data.fill_(2.0)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), build()(tokens()) + 2.0)


@pytest.mark.parametrize(
    ("bias", "matrices"),
    [
        ("none", []),
        ("all", ["wk", "wo", "wq", "wv", "w_down", "w_gate", "w_up"]),
        ("qkv", ["wk", "wq", "wv"]),
        ("feed_forward", ["w_down", "w_gate", "w_up"]),
    ],
)
def test_biases(bias, matrices):
    names = [n.split(".") for n, _ in build(n_layers=1, bias=bias).named_parameters() if n.endswith("bias")]
    assert sorted(n[3] for n in names) == sorted(matrices)


def test_scores_linked_into_the_last_layer_only():
    """With one linked layer there is nothing to add: equal to plain attention."""
    linked = build(n_layers=1, inner=Inner(link="scores"))
    with torch.no_grad():
        torch.testing.assert_close(linked(tokens()), build(n_layers=1)(tokens()), rtol=0, atol=1e-12)


def test_sources_of_depth_attention_default_to_half_the_layers():
    assert replace(SMALL, n_layers=16).resolved_depth_stride == 8
    assert replace(SMALL, n_layers=1).resolved_depth_stride == 1
    assert replace(SMALL, depth_stride=3).resolved_depth_stride == 3


def test_inner_norms_of_different_layers_follow_the_placement():
    mixed = replace(SMALL, placement="siamese_hybrid_pre:0-1,siamese:2-3")
    assert [mixed.inner_of(i).qk for i in range(4)] == ["model", "model", "none", "none"]
    assert replace(mixed, inner=Inner(qk="l2")).inner_of(3).qk == "l2"


def test_inner_norms_can_have_an_eps_of_their_own():
    """x-transformers: an RMSNorm without eps on the stream, a LayerNorm with 1e-5 on the hidden vector."""
    inner = Inner(qk="model", hidden="layer", eps=1e-5)
    block: Any = DecoderLM(replace(SMALL, norm=NormConfig(eps=0.0), inner=inner)).layers[0]
    norms = (block.attention.q_norm, block.feed_forward.hidden_norm, block.after_attention.read.norm)
    assert [norm.eps for norm in norms] == [1e-5, 1e-5, 0.0]
    with pytest.raises(ValueError, match="eps must be"):
        Inner(eps=-1.0)


@pytest.mark.parametrize("branch_norms", [False, True])
def test_parallel_blocks(branch_norms, monkeypatch):
    """x <- x + attention(z) + feed_forward(z), with z = N(x) or each branch with a norm of its own."""
    one: Any = build(n_layers=1)
    two = placements.get("pre")
    monkeypatch.setattr(type(two), "parallel", True)
    monkeypatch.setattr(type(two), "branch_norms", branch_norms)
    model = build(n_layers=1)
    parallel = model.layers[0].get_submodule("parallel")
    for kind in ("attention", "feed_forward"):
        theirs, ours = one.layers[0].get_submodule(kind), parallel.get_submodule(kind)
        ours.load_state_dict(theirs.state_dict())
        assert isinstance(getattr(parallel, f"{kind}_norm", None), torch.nn.Module) is branch_norms
    z = torch.randn(1, 5, 24, dtype=torch.float64)
    context = model._contexts(torch.arange(5)[None], None, 5, None)[False]
    unit = z / torch.sqrt(z.square().mean(-1, keepdim=True) + 1e-5) if branch_norms else z
    expected = one.layers[0].attention(unit, context) + one.layers[0].feed_forward(unit)
    torch.testing.assert_close(parallel(z, context), expected, rtol=0, atol=1e-12)


def test_encoders_have_no_cache():
    with pytest.raises(ValueError, match="causal"):
        build(causal=False)(tokens(), cache=KVCache())


# --- errors, before any work ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"window": 0}, ["window", "0"]),
        ({"full_every": -1}, ["full_every", "-1"]),
        ({"full_every": 2}, ["full_every", "window"]),
        ({"positions": PositionConfig(local_theta=10.0)}, ["local_theta", "window"]),
        ({"positions": PositionConfig(layers="windowed")}, ["layers", "window"]),
        ({"positions": PositionConfig(kind="alibi", local_theta=1.0), "window": 3}, ["local_theta", "alibi"]),
        ({"positions": PositionConfig(kind="learned", fraction=0.5)}, ["fraction", "learned", "leave"]),
        ({"positions": PositionConfig(fraction=0.2)}, ["fraction", "even"]),
        ({"attention_cap": 0.0}, ["attention_cap", "0"]),
        ({"logit_cap": -1.0}, ["logit_cap", "-1"]),
        ({"logit_multiplier": 0.0}, ["logit_multiplier", "0"]),
        ({"depth_stride": 0}, ["depth_stride", "0"]),
        ({"latent": LATENT}, ["n_kv_heads", "2"]),
        ({"latent": LATENT, "n_kv_heads": None, "head_dim": 8}, ["head_dim", "8"]),
        ({"latent": LATENT, "n_kv_heads": None, "inner": Inner(qk="rms")}, ["inner.qk", "rms", "none"]),
        ({"latent": LATENT, "n_kv_heads": None, "placement": "siamese_hybrid_pre"}, ["placement", "model"]),
        ({"inner": Inner(head_scale="after_output"), "dim": 25, "head_dim": 6}, ["dim", "25", "4"]),
        ({"placement": "post:0-1,pre:2-9"}, ["9", "4"]),
        (
            {"inner": Inner(qk="model", qk_gain="per_head"), "norm": NormConfig(kind="scale")},
            ["scale", "per_head", "l2"],
        ),
    ],
)
def test_wrong_options_say_what_is_wrong(wrong, words):
    with pytest.raises(ValueError, match=r".+") as error:
        DecoderLM(replace(SMALL, **wrong))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("position", [-1, 32])
def test_learned_positions_outside_the_table(position):
    model = DecoderLM(replace(SMALL, positions=PositionConfig(kind="learned")))
    with pytest.raises(ValueError, match=f"max_seq_len 32, got {position}"):
        model(torch.zeros(1, 2, dtype=torch.int64), positions_BT=torch.tensor([[0, position]]))
