"""Hyper-Connections and mHC under their public names against numbers of the library: outputs, streams, gradients."""

import pytest

from normstream.layers import PositionConfig
from normstream.models import DecoderConfig
from normstream.norms import NormConfig


def config(placement: str) -> DecoderConfig:
    return DecoderConfig(
        placement=placement,
        vocab_size=40,
        dim=32,
        n_layers=2,
        n_heads=4,
        ffn_dim=48,
        activation="gelu",
        bias="feed_forward",
        positions=PositionConfig(kind="none"),
        norm=NormConfig(kind="layer", eps=1e-5, bias=True),
        tied=True,
    )


def names(mapping: dict[str, str]) -> dict[str, str]:
    """``mapping`` gives the parameters of a connection. The library's norm stores its gain as an offset from 1."""
    names = {
        "tok_embeddings.weight": "emb.weight",
        "after_layers.read.norm.weight": "norm.weight",
        "after_layers.read.norm.bias": "norm.bias",
    }
    for layer in range(2):
        ours = f"layers.{layer}"
        attention, feed_forward = f"layers.{2 * layer}", f"layers.{2 * layer + 1}"
        for i, letter in enumerate("qkv"):
            names[f"{ours}.attention.w{letter}.weight"] = f"{attention}.branch.qkv.weight[{32 * i}:{32 * i + 32}]"
        names[f"{ours}.attention.wo.weight"] = f"{attention}.branch.out.weight"
        for part in ("weight", "bias"):
            names[f"{ours}.feed_forward.w_up.{part}"] = f"{feed_forward}.branch.fc1.{part}"
            names[f"{ours}.feed_forward.w_down.{part}"] = f"{feed_forward}.branch.fc2.{part}"
        for kind, official in (("attention", attention), ("feed_forward", feed_forward)):
            read = f"{ours}.before_{kind}.read"
            names[f"{read}.norm.weight"] = f"{official}.branch.norm.weight"
            names[f"{read}.norm.bias"] = f"{official}.branch.norm.bias"
            names[f"{read}.mix.norm.weight"] = f"{official}.norm.gamma + 1"
            names |= {f"{read}.mix.{name}": f"{official}.{theirs}" for name, theirs in mapping.items()}
    return names


SHARED = {
    "static_alpha": "static_alpha",
    "static_beta": "static_beta",
    "dynamic_alpha": "dynamic_alpha_fn",
    "dynamic_beta": "dynamic_beta_fn",
}
CASES = {
    "hyper_connections_lm": (
        config("hyper_connections(n_streams=3,mapping_norm=code)"),
        names(SHARED | {"scale_alpha": "dynamic_alpha_scale", "scale_beta": "dynamic_beta_scale"}),
    ),
    "mhc_lm": (
        config("mhc(n_streams=3,mapping=code)"),
        names(SHARED | {"scale_pre": "pre_branch_scale", "scale_res": "residual_scale", "scale_post": "h_post_scale"}),
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
    """A connection is one sublayer; the library has the axis of the streams before that of time."""
    points = {"reduced": ("after_layers.read.norm", lambda args, output: args[0])}
    for i in range(4):
        layer, kind = f"layers.{i // 2}", ("attention", "feed_forward")[i % 2]
        points[f"{i}.streams"] = (f"{layer}.after_{kind}.join", lambda args, output: output[0].transpose(1, 2))
        points[f"{i}.branch_output"] = (f"{layer}.{kind}", lambda args, output: output)
        points[f"{i}.branch_input"] = (f"{layer}.before_{kind}.read.norm", lambda args, output: args[0])
    case.check_hidden(points)
