"""Gemma 2 and OLMo 2 as transformers has them, against its numbers: outputs, streams, updates, every gradient."""

import pytest

from normstream.models.families import family
from normstream.norms import NormConfig

N_LAYERS = 3
SIZES = {
    "vocab_size": 40,
    "dim": 32,
    "n_layers": N_LAYERS,
    "n_heads": 4,
    "ffn_dim": 48,
    "max_seq_len": 32,
}


def common(layer: str, official: str) -> dict[str, str]:
    names = {f"{layer}.attention.w{x}.weight": f"{official}.self_attn.{x}_proj.weight" for x in "qkvo"}
    return names | {
        **{f"{layer}.feed_forward.w_{x}.weight": f"{official}.mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
        f"{layer}.after_attention.join.norm_out.weight": f"{official}.post_attention_layernorm.weight",
        f"{layer}.after_feed_forward.join.norm_out.weight": f"{official}.post_feedforward_layernorm.weight",
    }


def gemma2(layer: str, official: str) -> dict[str, str]:
    return common(layer, official) | {
        f"{layer}.before_attention.read.norm.weight": f"{official}.input_layernorm.weight",
        f"{layer}.after_attention.read.norm.weight": f"{official}.pre_feedforward_layernorm.weight",
    }


def olmo2(layer: str, official: str) -> dict[str, str]:
    norms = {f"{layer}.attention.{x}_norm.weight": f"{official}.self_attn.{x}_norm.weight" for x in "qk"}
    return common(layer, official) | norms


def in_all_layers(names) -> dict[str, str]:
    found = {"tok_embeddings.weight": "model.embed_tokens.weight", "after_layers.read.norm.weight": "model.norm.weight"}
    for i in range(N_LAYERS):
        found |= names(f"layers.{i}", f"model.layers.{i}")
    return found


CASES = {
    "peri_ln_gemma2": (
        family("gemma2", **SIZES, window=None, full_every=0, attention_cap=None, logit_cap=None),
        in_all_layers(gemma2),
    ),
    "output_norm_olmo2": (
        family("olmo2", **SIZES, n_kv_heads=2, norm=NormConfig(eps=1e-6)),
        in_all_layers(olmo2) | {"lm_head.weight": "lm_head.weight"},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, golden_case):
    return golden_case(request.param, *CASES[request.param])


def test_the_map_is_complete(case):
    case.check_map()


def test_outputs(case):
    case.check_outputs()


def test_every_gradient(case):
    case.check_gradients()


def test_streams_and_updates(case):
    case.check_hidden()
