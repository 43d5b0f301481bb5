import pytest
import torch
from torch import nn

from normstream import DecoderConfig, DecoderLM, initialize
from normstream.optim import clip_gradients, global_grad_norm, grad_norms_by_role


def parameter(gradient: torch.Tensor) -> nn.Parameter:
    p = nn.Parameter(torch.zeros_like(gradient))
    p.grad = gradient
    return p


def test_norm_and_clipping_of_ones():
    p = parameter(torch.ones(8))
    norm = global_grad_norm([p])
    assert norm.item() == pytest.approx(2.8284271, abs=1e-6)
    clip_gradients([p], norm, max_norm=1.0)
    assert p.grad is not None
    torch.testing.assert_close(p.grad, torch.full((8,), 0.3535533))


def test_small_gradients_are_not_scaled_up():
    p = parameter(torch.full((4,), 0.1))
    clip_gradients([p], global_grad_norm([p]), max_norm=1.0)
    assert p.grad is not None
    assert p.grad.tolist() == torch.full((4,), 0.1).tolist()


def test_zero_gradients_stay_zero():
    p = parameter(torch.zeros(4))
    clip_gradients([p], global_grad_norm([p]), max_norm=1.0)
    assert p.grad is not None
    assert p.grad.tolist() == [0.0] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_are_taken_in_float32(dtype: torch.dtype):
    norm = global_grad_norm([parameter(torch.full((400,), 4992.0, dtype=dtype))])
    assert norm.item() == pytest.approx(4992 * 20)


def test_large_scale_does_not_change_the_norm_after_unscaling():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(5, 3)
    layer(x).square().sum().backward()
    plain = global_grad_norm(layer.parameters()).item()
    optimizer.zero_grad()
    scaler.scale(layer(x).square().sum()).backward()
    scaler.unscale_(optimizer)
    assert global_grad_norm(layer.parameters()).item() == pytest.approx(plain, rel=1e-6)


def test_roles_recombine_to_the_total():
    model = DecoderLM(DecoderConfig(placement="siamese_hybrid_pre", vocab_size=13, dim=8, n_layers=2, n_heads=2))
    initialize(model, seed=0)
    model(torch.arange(10).view(2, 5)).square().mean().backward()
    by_role = grad_norms_by_role(model)
    assert set(by_role) == {"matrix", "embedding", "norm_gain", "vector"}
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    total = torch.stack(list(by_role.values())).norm()
    torch.testing.assert_close(total, flat.norm())
    torch.testing.assert_close(global_grad_norm(model.parameters()), flat.norm())
