"""Feed-forward sublayers against their formulas."""

import math

import pytest
import torch

from normstream.layers import FeedForward, default_ffn_dim
from normstream.norms import RMSNorm


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


def tanh_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FUNCTIONS = {
    "swiglu": lambda x: x / (1 + math.exp(-x)),
    "geglu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "geglu_tanh": tanh_gelu,
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": tanh_gelu,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("normed", [False, True])
def test_every_activation_by_hand(activation, normed):
    norm = RMSNorm(5, eps=1e-3).double() if normed else None
    ffn = FeedForward(3, ffn_dim=5, activation=activation, hidden_norm=norm).double()
    z = torch.randn(1, 1, 3, dtype=torch.float64)
    up = (ffn.w_up.weight @ z[0, 0]).tolist()
    gate = up if ffn.w_gate is None else (ffn.w_gate.weight @ z[0, 0]).tolist()
    assert (ffn.w_gate is not None) == ("glu" in activation)
    function = FUNCTIONS[activation]
    hidden = [function(g) * (1 if ffn.w_gate is None else u) for g, u in zip(gate, up, strict=True)]
    if normed:
        rms = math.sqrt(sum(h * h for h in hidden) / 5 + 1e-3)
        hidden = [h / rms for h in hidden]
    expected = ffn.w_down.weight @ torch.tensor(hidden, dtype=torch.float64)
    torch.testing.assert_close(ffn(z)[0, 0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dim", "activation", "ffn_dim"),
    [(64, "swiglu", 192), (96, "swiglu", 256), (768, "swiglu", 2048), (100, "swiglu", 288), (64, "gelu", 256)],
)
def test_default_width(dim, activation, ffn_dim):
    """8/3 dim rounded up to a multiple of 32, and 4 dim."""
    assert default_ffn_dim(dim, activation) == ffn_dim
