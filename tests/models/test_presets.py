"""The presets, built on the meta device; parameter counts by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from normstream.models import PRESETS, DecoderConfig, DecoderLM, preset
from normstream.norms import LayerNorm, RMSNorm

STATED = {"tiny": 0.66e6, "10m": 10e6, "60m": 64e6, "125m": 124e6, "400m": 389e6, "1.3b": 1.28e9}


def on_meta(config: DecoderConfig) -> DecoderLM:
    with torch.device("meta"):
        return DecoderLM(config)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def by_hand(c: DecoderConfig, placement: str) -> int:
    """RMSNorm, SwiGLU, no biases."""
    heads, kv_heads = c.n_heads, c.n_kv_heads or c.n_heads
    head_dim = c.head_dim or c.dim // c.n_heads
    attention = c.dim * head_dim * (2 * heads + 2 * kv_heads)
    sublayers = c.n_layers * (attention + 3 * c.dim * (c.ffn_dim or 0))
    vectors = {
        "pre": 2 * c.n_layers + 1,
        "post": 2 * c.n_layers,
        "siamese": 3 * (2 * c.n_layers + 1),
        "siamese_hybrid_pre": 5 * c.n_layers + 3,  # four gains and c1 a block
    }[placement]
    head_norms = 3 * head_dim * c.n_layers if placement == "siamese_hybrid_pre" else 0
    return c.vocab_size * c.dim * (1 if c.tied else 2) + sublayers + vectors * c.dim + head_norms


@pytest.mark.parametrize("name", STATED)
@pytest.mark.parametrize("placement", ["pre", "post", "siamese", "siamese_hybrid_pre"])
def test_parameter_counts(name, placement):
    config = replace(preset(name), placement=placement)
    assert (config.activation, config.norm.kind, config.bias) == ("swiglu", "rms", "none")
    model = on_meta(config)
    assert all(p.is_meta for p in model.parameters())
    assert count(model) == by_hand(config, placement)


@pytest.mark.parametrize(("name", "stated"), STATED.items())
def test_sizes_are_as_stated(name, stated):
    assert by_hand(preset(name), "pre") == pytest.approx(stated, rel=0.05)


def test_the_largest_preset_has_1_3_billion():
    config = preset("1.3b")
    assert (config.dim, config.n_layers, config.n_heads) == (2048, 16, 16)
    assert round(by_hand(config, "pre") / 1e9, 1) == 1.3


def test_siamese_adds_less_than_a_thousandth():
    """Three norms where Pre-Norm has one: 2 * 33 gains of width 2048."""
    config = preset("1.3b")
    pre, siamese = (on_meta(replace(config, placement=p)) for p in ("pre", "siamese"))
    added = count(siamese) - count(pre)
    assert added == 66 * 2048
    assert added < 0.001 * count(pre)
    norms = [sum(isinstance(m, RMSNorm | LayerNorm) for m in model.modules()) for model in (pre, siamese)]
    assert norms == [33, 99]
    hybrid = on_meta(replace(config, placement="siamese_hybrid_pre"))
    assert count(hybrid) - count(pre) < 0.001 * count(pre)


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"125m"):
        preset("125mm")
    assert set(STATED) <= set(PRESETS)
