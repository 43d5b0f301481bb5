"""The router's losses, its bias and its precision."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from normstream.layers import MoE
from normstream.layers.moe import Experts
from normstream.layers.router import Router, balance_loss, router_z_loss

D = 6


def router_of(weight: list[list[float]], **options: Any) -> Router:
    router = Router(len(weight[0]), n_experts=len(weight), **options).double()
    with torch.no_grad():
        router.scores.weight.copy_(torch.tensor(weight))
    return router


def test_balance_loss_by_hand():
    """Two experts, three tokens with probabilities (3/4, 1/4), (2/3, 1/3), (1/5, 4/5): f = (2/3, 1/3)."""
    logits = [(math.log(3), 0.0), (math.log(2), 0.0), (0.0, math.log(4))]
    router = router_of([[1.0, 0.0], [0.0, 1.0]], top_k=1, normalized=False)
    report = router(torch.tensor(logits, dtype=torch.float64)).report
    assert report.tokens.tolist() == [2, 1]
    p = (3 / 4 + 2 / 3 + 1 / 5) / 3
    assert report.balance_loss.item() == pytest.approx(2 * (2 / 3 * p + 1 / 3 * (1 - p)), abs=1e-12)


def test_balance_loss_of_sigmoids_by_hand():
    """Sigmoids (3/4, 2/3) and (1/2, 2/3) as shares: (9/17, 8/17) and (3/7, 4/7)."""
    logits = [(math.log(3), math.log(2)), (0.0, math.log(2))]
    router = router_of([[1.0, 0.0], [0.0, 1.0]], top_k=1, normalized=False, gates="sigmoid")
    report = router(torch.tensor(logits, dtype=torch.float64)).report
    assert report.tokens.tolist() == [1, 1]
    assert report.balance_loss.item() == pytest.approx(1, abs=1e-12)  # equal loads: E / E times a sum of shares
    shares = torch.tensor([[9 / 17, 8 / 17], [3 / 7, 4 / 7]], dtype=torch.float64)
    skewed = balance_loss(torch.tensor([2, 0]), shares).item()
    assert skewed == pytest.approx(9 / 17 + 3 / 7, abs=1e-12)


def test_extremes_of_the_balance_loss():
    even = torch.full((8, 4), 0.25)
    assert balance_loss(torch.tensor([4, 4, 4, 4]), even).item() == pytest.approx(1)
    one_hot = torch.eye(4)[torch.zeros(8, dtype=torch.int64)]
    assert balance_loss(torch.tensor([8, 0, 0, 0]), one_hot).item() == pytest.approx(4)


@pytest.mark.parametrize("loss", ["balance_loss", "z_loss"])
@pytest.mark.parametrize("gates", ["softmax", "sigmoid"])
def test_gradients_by_finite_differences(loss: str, gates: Any):
    """Central differences of the router's matrix; the choice does not change over so small a step."""
    router = Router(D, n_experts=4, top_k=2, gates=gates).double()
    z = torch.randn(20, D, dtype=torch.float64)
    weight = router.scores.weight
    getattr(router(z).report, loss).backward()
    assert weight.grad is not None
    assert weight.grad.abs().max() > 1e-4
    step = 1e-6
    for place in ((0, 0), (1, 3), (3, 5)):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                weight[place] += sign * step
                ends.append(getattr(router(z).report, loss).item())
                weight[place] -= sign * step
        assert weight.grad[place].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-8)


def test_z_loss_by_hand():
    logits = torch.tensor([[math.log(1), math.log(2)], [math.log(3), math.log(4)]])
    expected = (math.log(3) ** 2 + math.log(7) ** 2) / 2
    assert router_z_loss(logits).item() == pytest.approx(expected)
    router = router_of([[1.0, 0.0], [0.0, 1.0]], top_k=2)
    assert router(logits.double()).report.z_loss.item() == pytest.approx(expected)


def test_bias_by_hand():
    """Loads 5, 1, 3, 3 with mean 3: the first goes down one step, the second up, the others stay."""
    router = Router(D, n_experts=4, top_k=2, bias_rate=0.25)
    assert router.bias is not None
    router.balance(torch.tensor([5, 1, 3, 3]))
    router.balance(torch.tensor([5, 1, 2, 4]))
    assert router.bias.tolist() == [-0.5, 0.5, 0.25, -0.25]
    assert router.bias.dtype == torch.float32
    router.reset_parameters()
    assert router.bias.tolist() == [0.0] * 4


def test_no_bias_without_a_rate():
    router = Router(D, n_experts=4, top_k=2)
    router.balance(torch.tensor([5, 1, 3, 3]))
    assert router.bias is None
    assert list(router.state_dict()) == ["scores.weight"]


def test_bias_serves_the_choice_alone():
    """It moves a token to another expert, whose gate is that of its own score; it has no gradient."""
    router = router_of([[1.0], [0.5], [0.0]], top_k=2, gates="sigmoid", normalized=False, bias_rate=1.0)
    z = torch.ones(1, 1, dtype=torch.float64)
    sigmoid = [1 / (1 + math.exp(-s)) for s in (1.0, 0.5, 0.0)]
    assert router(z).chosen.tolist() == [[0, 1]]
    assert router.bias is not None
    assert not router.bias.requires_grad
    router.bias.copy_(torch.tensor([0.0, -1.0, 0.0]))
    routing = router(z)
    assert routing.chosen.tolist() == [[0, 2]]
    assert routing.gates[0].tolist() == pytest.approx([sigmoid[0], sigmoid[2]], abs=1e-12)


def test_loads_become_even():
    """A router that prefers one expert by far, with nothing but the bias at work."""
    router = Router(D, n_experts=4, top_k=1, normalized=False, bias_rate=0.002)
    z = torch.randn(256, D)
    z[:, 0] = 2.0
    with torch.no_grad():
        router.scores.weight[0, 0] = 2.0
    loads = []
    for _ in range(600):
        loads.append(router(z).report.tokens)
        router.balance(loads[-1])
    assert loads[0].max() > 200
    assert torch.stack(loads[-100:]).double().mean(0).max() < 1.1 * 256 / 4  # signs of 1 and -1: it goes to and fro


def logits_of(router: Router, z: Tensor) -> Tensor:
    """Gates of all experts in the end are logits again, up to a constant."""
    routing = router(z)
    return routing.gates.log().gather(-1, routing.chosen.argsort(-1))


def test_router_is_in_float32_under_autocast():
    """Its gates in bf16 autocast are those of float32, not those of bf16."""
    moe = MoE(
        Router(64, n_experts=8, top_k=8, normalized=False), Experts(64, n_experts=8, ffn_dim=16, activation="swiglu")
    )
    z = torch.randn(32, 64)
    expected = logits_of(moe.router, z)
    with torch.autocast("cpu", torch.bfloat16):
        under = logits_of(moe.router, z)
        update, report = moe(z[None])
    assert under.dtype == report.balance_loss.dtype == report.z_loss.dtype == torch.float32
    assert torch.equal(under, expected)
    rounded = (z.bfloat16() @ moe.router.scores.weight.bfloat16().T).float()
    assert (rounded.log_softmax(-1) - expected).abs().max() > 1e-3  # what this test can tell apart
    assert update.dtype == torch.bfloat16

    with torch.autocast("cpu", torch.bfloat16):  # torch's own products leave float64 as it is
        assert moe.double()(z[None].double())[0].dtype == torch.float64

    low = moe.bfloat16()(z[None].bfloat16())
    assert low[0].dtype == torch.bfloat16
    assert low[1].balance_loss.dtype == torch.float32
