"""The encoder against torchscale's DeepNorm encoder: the same weights, map and numbers as for a decoder, not causal."""

import pytest
from torch import Tensor

from normstream.layers import PositionConfig
from normstream.models import Encoder, EncoderConfig
from normstream.norms import NormConfig

CONFIG = EncoderConfig(
    placement="deepnorm",
    vocab_size=40,
    dim=32,
    n_layers=3,
    n_heads=4,
    ffn_dim=48,
    activation="gelu",
    bias="all",
    positions=PositionConfig(kind="none"),
    norm=NormConfig(kind="layer", eps=1e-5, bias=True),
)


def names() -> dict[str, str]:
    found = {"tok_embeddings.weight": "embed_tokens.weight", "lm_head.weight": "output_projection.weight"}
    places = {
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.out_proj",
        "feed_forward.w_up": "ffn.fc1",
        "feed_forward.w_down": "ffn.fc2",
        "after_attention.join.norm": "self_attn_layer_norm",
        "after_feed_forward.join.norm": "final_layer_norm",
    }
    for layer in range(3):
        for ours, official in places.items():
            for part in ("weight", "bias"):
                found[f"layers.{layer}.{ours}.{part}"] = f"layers.{layer}.{official}.{part}"
    return found


def run(model: Encoder, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    (tokens,) = inputs.values()
    hidden = model.hidden(tokens)
    return {"final_hidden": hidden, "logits": model.logits(hidden)}


@pytest.fixture(scope="module")
def case(golden_case):
    return golden_case("deepnorm_encoder", Encoder(CONFIG), names(), run=run)


def test_the_map_is_complete(case):
    case.check_map()


def test_outputs(case):
    case.check_outputs()


def test_gradients(case):
    case.check_gradients()
