"""DeepNorm, Sub-LN, NormFormer and ResiDual under their public names against numbers of official code."""

from typing import Any

import pytest

from normstream.layers import PositionConfig
from normstream.layers.inner import Inner
from normstream.models import DecoderConfig
from normstream.norms import NormConfig

LINEAR = ("weight", "bias")


def affine(ours: str, official: str) -> dict[str, str]:
    """A matrix or norm with its bias."""
    return {f"{ours}.{part}": f"{official}.{part}" for part in LINEAR}


def config(placement: str, **changes: Any) -> DecoderConfig:
    """What all of these codes share: LayerNorm with eps 1e-5, biases, no positions."""
    options: dict[str, Any] = {
        "vocab_size": 40,
        "dim": 32,
        "n_layers": 3,
        "n_heads": 4,
        "ffn_dim": 48,
        "activation": "gelu",
        "bias": "all",
        "positions": PositionConfig(kind="none"),
        "norm": NormConfig(kind="layer", eps=1e-5, bias=True),
    }
    return DecoderConfig(placement=placement, **(options | changes))


def block_map(layer: int, ffn: str = "", prefix: str = "") -> dict[str, str]:
    """The matrices of a block of fairseq or torchscale; ``ffn`` is the official module around fc1 and fc2."""
    ours, official = f"layers.{layer}", f"{prefix}layers.{layer}"
    names = affine(f"{ours}.feed_forward.w_up", f"{official}.{ffn}fc1")
    names |= affine(f"{ours}.feed_forward.w_down", f"{official}.{ffn}fc2")
    for letter, word in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out")):
        names |= affine(f"{ours}.attention.w{letter}", f"{official}.self_attn.{word}_proj")
    return names


def blocks(ffn: str = "", prefix: str = "", **norms: str) -> dict[str, str]:
    """Three blocks; ``norms`` says which official norm is where, with __ for a dot."""
    names: dict[str, str] = {}
    for layer in range(3):
        names |= block_map(layer, ffn, prefix)
        for place, official in norms.items():
            names |= affine(f"layers.{layer}.{place.replace('__', '.')}", f"{prefix}layers.{layer}.{official}")
    return names


TORCHSCALE = {"tok_embeddings.weight": "embed_tokens.weight", "lm_head.weight": "output_projection.weight"}
POST = {
    "after_attention__join__norm": "self_attn_layer_norm",
    "after_feed_forward__join__norm": "final_layer_norm",
}
PRE = {
    "before_attention__read__norm": "self_attn_layer_norm",
    "before_feed_forward__read__norm": "final_layer_norm",
}


def normformer_map() -> dict[str, str]:
    names = blocks(**PRE, after_attention__join__norm_out="attn_ln", feed_forward__hidden_norm="ffn_layernorm")
    names |= {"tok_embeddings.weight": "embed_tokens.weight"} | affine("after_layers.read.norm", "layer_norm")
    return names | {f"layers.{i}.attention.head_scale.weight": f"layers.{i}.c_attn" for i in range(3)}


def x_transformers_map() -> dict[str, str]:
    """One list of branches; gains stored as their offset from 1, but for the norm inside the feed-forward."""
    names = {
        "tok_embeddings.weight": "token_emb.emb.weight",
        "lm_head.weight": "to_logits.weight",
        "after_layers.read.norm.weight": "attn_layers.final_norm.gamma + 1",
    }
    for branch in range(6):
        layer, kind = f"layers.{branch // 2}", ("attention", "feed_forward")[branch % 2]
        official = f"attn_layers.layers.{branch}"
        names[f"{layer}.before_{kind}.read.norm.weight"] = f"{official}.0.0.gamma + 1"
        if kind == "attention":
            names[f"{layer}.attention.head_scale.weight"] = f"{official}.1.head_scale_params"
            for ours, theirs in (("wq", "to_q"), ("wk", "to_k"), ("wv", "to_v"), ("wo", "to_out")):
                names[f"{layer}.attention.{ours}.weight"] = f"{official}.1.{theirs}.weight"
        else:
            names |= affine(f"{layer}.feed_forward.w_up", f"{official}.1.ff.0.0")
            names |= affine(f"{layer}.feed_forward.w_down", f"{official}.1.ff.3")
            names[f"{layer}.feed_forward.hidden_norm.weight"] = f"{official}.1.ff.1.gamma"
    return names


CASES = {
    "deepnorm_encoder": (config("deepnorm", causal=False), TORCHSCALE | blocks("ffn.", **POST)),
    "subln_encoder": (
        config("sub_ln", causal=False),
        TORCHSCALE
        | affine("after_layers.read.norm", "layer_norm")
        | blocks(
            "ffn.",
            **PRE,
            attention__context_norm="self_attn.inner_attn_ln",
            feed_forward__hidden_norm="ffn.ffn_layernorm",
        ),
    ),
    "normformer_decoder": (
        config("normformer(head_scale=code,residual_scale=false)", embedding_multiplier=32**0.5, tied=True),
        normformer_map(),
    ),
    "xt_normformer_headscale_only": (
        config(
            "pre",
            bias="feed_forward",
            norm=NormConfig(kind="layer", eps=1e-5),
            inner=Inner(head_scale="before_output", hidden="model"),
        ),
        x_transformers_map(),
    ),
    # The official encoder has no head: our head shares its embedding, and the loss of this file does not reach it.
    "residual_encoder": (
        config("residual", causal=False, ffn_dim=40, activation="relu", embedding_multiplier=32**0.5, tied=True),
        {"tok_embeddings.weight": "encoder.embed_tokens.weight"}
        | affine("after_layers.read.norm_d", "encoder.layer_norm")
        | blocks(prefix="encoder.", **POST),
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


def sublayer_input(args: tuple[Any, ...], output: Any) -> Any:
    return args[0]


def module_output(args: tuple[Any, ...], output: Any) -> Any:
    return output


def points(name: str) -> dict[str, tuple[str, Any]]:
    """Where the official code records something else than the usual."""
    own: dict[str, tuple[str, Any]] = {}
    for i in range(3):
        layer = f"layers.{i}"
        own[f"{i}.res"] = (layer, lambda args, output: output[0][1])
        own[f"{i}.fc2_input"] = (f"{layer}.feed_forward.w_down", sublayer_input)
        if name == "normformer_decoder":
            own[f"{i}.self_attn_module_output"] = (f"{layer}.attention.wo", module_output)
            own[f"{i}.attn_update"] = (f"{layer}.after_attention.join.norm_out", module_output)
        for j, kind in enumerate(("attention", "feed_forward")):
            own |= {
                f"{2 * i + j}.branch_input": (f"{layer}.{kind}", sublayer_input),
                f"{2 * i + j}.branch_output": (f"{layer}.{kind}", module_output),
                f"{2 * i + j}.after_residual": (f"{layer}.after_{kind}", lambda args, output: output[0][0]),
            }
    return own


def test_streams_and_sublayers(case):
    own = points(case.name)
    own["out"] = ("after_layers", lambda args, output: output[1])
    case.check_hidden(own)
