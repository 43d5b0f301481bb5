"""Placements with one stream under their public names against numbers of official code: outputs, streams, gradients."""

from typing import Any

import pytest

from normstream.layers import PositionConfig
from normstream.models import DecoderConfig
from normstream.norms import NormConfig

# --- the Mix-LN repository and its fork for LayerNorm Scaling -------------------------------------------------------


def llama_map(
    before_attention: str, after_attention: str, before_ffn: str, after_ffn: str, join_norm: str = "norm"
) -> dict[str, str]:
    """Llama's names; the arguments say, block by block, which official norm sits where ("-" for none)."""
    names = {
        "tok_embeddings.weight": "embed_tokens.weight",
        "lm_head.weight": "head.weight",
        "after_layers.read.norm.weight": "norm.weight",
    }
    places = {
        "before_attention.read.norm": before_attention,
        f"after_attention.join.{join_norm}": after_attention,
        "before_feed_forward.read.norm": before_ffn,
        f"after_feed_forward.join.{join_norm}": after_ffn,
    }
    for layer in range(4):
        ours = f"layers.{layer}"
        for letter in "qkvo":
            names[f"{ours}.attention.w{letter}.weight"] = f"{ours}.self_attn.{letter}_proj.weight"
        for part in ("gate", "up", "down"):
            names[f"{ours}.feed_forward.w_{part}.weight"] = f"{ours}.mlp.{part}_proj.weight"
        for place, official in places.items():
            if (norm := official.split()[layer]) != "-":
                names[f"{ours}.{place}.weight"] = f"{ours}.{norm}_layernorm.weight"
    return names


def llama(placement: str) -> DecoderConfig:
    return DecoderConfig(
        placement=placement,
        vocab_size=40,
        dim=32,
        n_layers=4,
        n_heads=4,
        ffn_dim=48,
        max_seq_len=32,
        norm=NormConfig(eps=1e-6),
        tied=False,
    )


PRE_MAP = llama_map("input " * 4, "- " * 4, "post_attention " * 4, "- " * 4)
POST_MAP = llama_map("- " * 4, "post_attention " * 4, "- " * 4, "post_feedforward " * 4)

MIX_MAP = llama_map(
    "- - input input", "post_attention " * 2 + "- -", "- - " + "post_attention " * 2, "post_feedforward " * 2 + "- -"
)
SANDWICH_MAP = llama_map(
    "input " * 4, "post_attention " * 4, "pre_feedforward " * 4, "post_feedforward " * 4, "norm_out"
)

# --- HybridNorm ------------------------------------------------------------------------------------------------------


def hybridnorm_map() -> dict[str, str]:
    """att_proj is q | k | v, ff_proj is a | b with ff_out(a * silu(b)): b is the gate."""
    names = {
        "tok_embeddings.weight": "transformer.wte.weight",
        "after_layers.read.norm.weight": "transformer.ln_f.weight",
    }
    for layer in range(3):
        ours, official = f"layers.{layer}", f"transformer.blocks.{layer}"
        names |= {
            f"{ours}.attention.wq.weight": f"{official}.att_proj.weight[0:32]",
            f"{ours}.attention.wk.weight": f"{official}.att_proj.weight[32:48]",
            f"{ours}.attention.wv.weight": f"{official}.att_proj.weight[48:64]",
            f"{ours}.attention.wo.weight": f"{official}.attn_out.weight",
            f"{ours}.attention.q_norm.weight": f"{official}.q_norm.weight",
            f"{ours}.attention.k_norm.weight": f"{official}.k_norm.weight",
            f"{ours}.attention.v_norm.weight": f"{official}.v_norm.weight",
            f"{ours}.feed_forward.w_up.weight": f"{official}.ff_proj.weight[0:32]",
            f"{ours}.feed_forward.w_gate.weight": f"{official}.ff_proj.weight[32:64]",
            f"{ours}.feed_forward.w_down.weight": f"{official}.ff_out.weight",
            f"{ours}.after_attention.join.norm.weight": f"{official}.ff_norm.weight",
        }
    return names


HYBRIDNORM = DecoderConfig(
    placement="hybridnorm",
    vocab_size=48,
    dim=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=32,
    max_seq_len=16,
    norm=NormConfig(eps=1e-5),
    tied=True,
)

# --- x-transformers: one list of branches, attention and feed-forward in turn; gains stored as their offset from 1 ---


def xt_map(*norms: tuple[str, int], final_norm: bool) -> dict[str, str]:
    """``norms``: where a norm of ours is in every junction, and its place in the official list of three."""
    names = {"tok_embeddings.weight": "token_emb.emb.weight", "lm_head.weight": "to_logits.weight"}
    if final_norm:
        names["after_layers.read.norm.weight"] = "attn_layers.final_norm.gamma + 1"
    for branch in range(6):
        layer, kind = f"layers.{branch // 2}", ("attention", "feed_forward")[branch % 2]
        official = f"attn_layers.layers.{branch}"
        for place, index in norms:
            names[f"{layer}.{place.format(kind)}.weight"] = f"{official}.0.{index}.gamma + 1"
        if kind == "attention":
            for ours, theirs in (("wq", "to_q"), ("wk", "to_k"), ("wv", "to_v"), ("wo", "to_out")):
                names[f"{layer}.attention.{ours}.weight"] = f"{official}.1.{theirs}.weight"
        else:
            for parameter in ("weight", "bias"):
                names[f"{layer}.feed_forward.w_up.{parameter}"] = f"{official}.1.ff.0.0.{parameter}"
                names[f"{layer}.feed_forward.w_down.{parameter}"] = f"{official}.1.ff.2.{parameter}"
    return names


def xt(placement: str) -> DecoderConfig:
    return DecoderConfig(
        placement=placement,
        vocab_size=40,
        dim=32,
        n_layers=3,
        n_heads=4,
        ffn_dim=48,
        activation="gelu",
        bias="feed_forward",
        positions=PositionConfig(kind="none"),
        norm=NormConfig(kind="layer", eps=1e-5),
    )


BEFORE, AFTER = ("before_{}.read.norm", 0), ("after_{}.join.norm", 2)
OUT = ("after_{}.join.norm_out", 1)

CASES = {
    "mixln_repo_pre_norm_lm": (llama("pre"), PRE_MAP),
    "mixln_repo_post_norm_lm": (llama("post(final_norm=true)"), POST_MAP),
    "mix_ln_lm": (llama("mix_ln(alpha=0.5)"), MIX_MAP),
    "mixln_repo_sandwich_lm": (llama("sandwich"), SANDWICH_MAP),
    "layernorm_scaling_lm": (llama("layernorm_scaling"), PRE_MAP),
    "hybridnorm_lm": (HYBRIDNORM, hybridnorm_map()),
    "xt_pre_norm": (xt("pre"), xt_map(BEFORE, final_norm=True)),
    "xt_post_norm": (xt("post"), xt_map(AFTER, final_norm=False)),
    "xt_sandwich_norm": (xt("sandwich"), xt_map(BEFORE, OUT, final_norm=True)),
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


def xt_points() -> dict[str, tuple[str, Any]]:
    """x-transformers records every branch: its input, its raw output, the sum, and the sum after Post-Norm's norm."""
    points = {}
    for branch in range(6):
        layer, kind = f"layers.{branch // 2}", ("attention", "feed_forward")[branch % 2]
        points |= {
            f"{branch}.branch_input": (f"{layer}.{kind}", lambda args, output: args[0]),
            f"{branch}.branch_output": (f"{layer}.{kind}", lambda args, output: output),
            f"{branch}.after_residual": (f"{layer}.after_{kind}", lambda args, output: output[0][0]),
            f"{branch}.after_post_main_norm": (f"{layer}.after_{kind}", lambda args, output: output[0][0]),
        }
    return points


def post_norm_sums() -> dict[str, tuple[str, Any]]:
    return {
        f"{branch}.after_residual": (
            f"layers.{branch // 2}.after_{('attention', 'feed_forward')[branch % 2]}.join.norm",
            lambda args, output: args[0],
        )
        for branch in range(6)
    }


def test_streams_and_sublayers(case):
    points = xt_points() if case.name.startswith("xt_") else {}
    case.check_hidden(points | (post_norm_sums() if case.name == "xt_post_norm" else {}))


def test_a_wrong_map_is_noticed(golden_case):
    """Two equally wide norms in the wrong order, a row read twice, a parameter left out."""
    before, after = "layers.1.before_attention.read.norm.weight", "layers.1.before_feed_forward.read.norm.weight"
    config, names = CASES["mixln_repo_pre_norm_lm"]
    swapped = names | {before: names[after], after: names[before]}
    case = golden_case("mixln_repo_pre_norm_lm", config, swapped)
    case.check_map()
    with pytest.raises(AssertionError, match=r"logits|final_hidden"):
        case.check_outputs()
    with pytest.raises(AssertionError):
        golden_case("mixln_repo_pre_norm_lm", config, names | {before: names[after]}).check_map()
    with pytest.raises(AssertionError, match="not in the map"):
        golden_case("mixln_repo_pre_norm_lm", config, {n: o for n, o in names.items() if n != before})
