"""Feed-forward sublayers against their formulas."""

import math

import pytest
import torch

from normstream.layers import FeedForward, default_ffn_dim


def test_swiglu():
    ffn = FeedForward(6, ffn_dim=10, activation="swiglu").double()
    z = torch.randn(2, 3, 6, dtype=torch.float64)
    assert ffn.w_gate is not None
    gate, up = z @ ffn.w_gate.weight.T, z @ ffn.w_up.weight.T
    expected = (gate / (1 + torch.exp(-gate)) * up) @ ffn.w_down.weight.T
    torch.testing.assert_close(ffn(z), expected, rtol=0, atol=1e-12)
    assert sum(p.numel() for p in ffn.parameters()) == 3 * 60


def test_gelu_is_the_exact_one():
    ffn = FeedForward(6, ffn_dim=10, activation="gelu", bias=True).double()
    z = torch.randn(2, 3, 6, dtype=torch.float64)
    up = z @ ffn.w_up.weight.T + ffn.w_up.bias
    expected = (up * 0.5 * (1 + torch.erf(up / math.sqrt(2)))) @ ffn.w_down.weight.T + ffn.w_down.bias
    torch.testing.assert_close(ffn(z), expected, rtol=0, atol=1e-12)
    assert sum(p.numel() for p in ffn.parameters()) == 2 * 60 + 10 + 6


@pytest.mark.parametrize(
    ("dim", "activation", "ffn_dim"),
    [(64, "swiglu", 192), (96, "swiglu", 256), (768, "swiglu", 2048), (100, "swiglu", 288), (64, "gelu", 256)],
)
def test_default_width(dim, activation, ffn_dim):
    """8/3 dim rounded up to a multiple of 32, and 4 dim."""
    assert default_ffn_dim(dim, activation) == ffn_dim
