"""Placements with one stream that contain each other: exact limits of the whole decoder, in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from normstream.init import initialize
from normstream.junctions import Junction
from normstream.layers.inner import Inner
from normstream.models import DecoderConfig, DecoderLM
from normstream.norms import NormConfig

QKV = Inner(qk="model", v="model")


def build(placement: str, eps: float = 1e-5, **options) -> DecoderLM:
    norm = NormConfig(kind="layer", bias=True, eps=eps)
    config = DecoderConfig(
        placement=placement, vocab_size=23, dim=24, n_layers=4, n_heads=4, n_kv_heads=2, norm=norm, **options
    )
    return DecoderLM(config).double().eval()


def randomize(model: DecoderLM) -> None:
    for p in model.parameters():
        values = torch.randn(p.shape, dtype=torch.float64)
        p.data = values / p.shape[1] ** 0.5 if p.ndim == 2 else 1 + 0.3 * values


def logits(model: DecoderLM) -> Tensor:
    with torch.no_grad():
        return model(torch.randint(0, 23, (2, 9), generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("one", "other", "inner"),
    [
        ("mix_ln(alpha=0)", "pre", Inner()),
        ("mix_ln(alpha=1)", "post(final_norm=true)", Inner()),
        ("mix_ln(alpha=0.5)", "post:0-1,pre:2-", Inner()),
        ("mix_ln(alpha=0.5)", "post:0-1,pre:2-3", Inner()),
        ("hybridnorm_star", "pre:0,hybridnorm:1-", QKV),
        ("bloom(embedding_norm=false)", "pre", Inner()),
        ("gpt2", "pre", Inner()),
    ],
)
def test_the_same_weights_give_the_same_logits(one, other, inner):
    a, b = build(one, inner=inner), build(other, inner=inner)
    randomize(a)
    b.load_state_dict(a.state_dict())
    assert torch.equal(logits(a), logits(b))
    assert logits(a).abs().max() > 0.1


@pytest.mark.parametrize(("one", "other"), [("mix_ln(alpha=0.5)", "pre"), ("hybridnorm", "hybridnorm_star")])
def test_other_weights_are_asked_for_where_placements_differ(one, other):
    with pytest.raises(RuntimeError, match=r"Missing key"):
        build(one).load_state_dict(build(other).state_dict())


def test_layernorm_scaling_is_pre_norm_with_gains_divided_by_the_root_of_the_block():
    scaled, pre = build("layernorm_scaling"), build("pre")
    randomize(scaled)
    pre.load_state_dict(scaled.state_dict())
    assert (logits(scaled) - logits(pre)).abs().max() > 0.1
    reads = [module.read for module in pre.modules() if isinstance(module, Junction)]
    for index, read in enumerate(reads[:-1]):
        for parameter in read.parameters():
            parameter.data /= math.sqrt(index // 2 + 1)
    torch.testing.assert_close(logits(scaled), logits(pre), rtol=0, atol=1e-12)


def test_two_equal_norms_in_a_parallel_block_are_one():
    one, two = build("parallel"), build("parallel(norms=2)")
    randomize(one)
    weights = one.state_dict()
    for layer in range(4):
        junction = "before_layers" if layer == 0 else f"layers.{layer - 1}.after_parallel"
        for name in ("weight", "bias"):
            gain = weights.pop(f"{junction}.read.norm.{name}")
            weights[f"layers.{layer}.parallel.attention_norm.{name}"] = gain
            weights[f"layers.{layer}.parallel.feed_forward_norm.{name}"] = gain
    two.load_state_dict(weights)
    assert torch.equal(logits(one), logits(two))


def test_hybridnorm_attention_does_not_see_the_size_of_the_stream():
    model: Any = build("hybridnorm", eps=1e-30)
    randomize(model)
    seen = []
    attention = model.layers[2].attention
    hook = attention.register_forward_hook(lambda module, args, output: seen.extend((args, output)))
    logits(model)
    hook.remove()
    (z, context), update = seen
    torch.testing.assert_close(attention(1000 * z, context), update, rtol=1e-9, atol=1e-12)


def test_a_swin_v2_model_starts_as_its_embedding():
    """Every update is multiplied by a gain of 0 at first: the final hidden vector is N(N(embedding))."""
    model = build("swin_v2")
    initialize(model, seed=0)
    tokens = torch.arange(9)[None]
    embedding = model.tok_embeddings(tokens)
    wanted = torch.nn.functional.layer_norm(torch.nn.functional.layer_norm(embedding, (24,)), (24,))
    torch.testing.assert_close(model.hidden(tokens), wanted, rtol=0, atol=1e-12)
