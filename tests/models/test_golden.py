"""SiameseNorm under its public names against numbers of the official code: outputs, streams, gradients."""

import pytest

from normstream.models import DecoderConfig
from normstream.norms import NormConfig


def hybrid_pre_map(n_layers: int) -> dict[str, str]:
    """SiameseNorm hybrid-pre. att_proj is q | k | v, ff_proj is a | b with ff_out(a * silu(b)): b is the gate."""
    names = {
        "tok_embeddings.weight": "transformer.wte.weight",
        "after_layers.join.norm_x.weight": "transformer.ln_f.weight",
        "after_layers.read.norm_y.weight": "transformer.ln_y_f.weight",
        "after_layers.read.norm_in.weight": "transformer.ln_final_f.weight",
    }
    for layer in range(n_layers):
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
            f"{ours}.before_attention.read.c1": f"{official}.c1",
            f"{ours}.before_attention.read.norm_y.weight": f"{official}.attn_y_norm.weight",
            f"{ours}.after_attention.join.norm_x.weight": f"{official}.ff_norm.weight",
            f"{ours}.before_feed_forward.read.norm_y.weight": f"{official}.ff_y_norm.weight",
            f"{ours}.before_feed_forward.read.norm_in.weight": f"{official}.ff_input_norm.weight",
        }
    return names


CASES = {
    "siamese_hybrid_pre_lm": (
        DecoderConfig(
            placement="siamese_hybrid_pre",
            vocab_size=48,
            dim=32,
            n_layers=3,
            n_heads=4,
            n_kv_heads=2,
            ffn_dim=32,
            max_seq_len=16,
            norm=NormConfig(eps=1e-5),
            tied=True,
        ),
        hybrid_pre_map(3),
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


def test_streams_and_sublayers(case):
    """The official code leaves the last x raw and norms it at the head; ours norms it in the last join."""
    case.check_hidden({"2.x": ("after_layers.join.norm_x", lambda args, output: args[0])})
