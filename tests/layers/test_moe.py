"""The mixture of experts against the dense feed-forward, dense sums and brute force."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream.layers import FeedForward, MoE, MoEConfig
from normstream.layers.expert_linear import ExpertLinear, grouped, is_grouped, one_by_one
from normstream.layers.learned_scale import LearnedScale
from normstream.layers.moe import Experts
from normstream.layers.router import Router

D, F, E = 6, 10, 4


def moe_of(n_experts: int = E, top_k: int = 2, n_shared: int = 0, capacity: float | None = None, **router: Any) -> MoE:
    """In float64, with scores far enough from 0 that no two are nearly equal."""
    moe = MoE(
        Router(D, n_experts=n_experts, top_k=top_k, **router),
        Experts(D, n_experts=n_experts, ffn_dim=F, activation="swiglu"),
        FeedForward(D, ffn_dim=n_shared * F, activation="swiglu") if n_shared else None,
        capacity,
    ).double()
    with torch.no_grad():
        moe.router.scores.weight.normal_()
    return moe


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, dtype=torch.float64)


def expert(moe: MoE, e: int, z: Tensor) -> Tensor:
    """One expert on every token, written out."""
    w_gate, w_up, w_down = (getattr(moe.experts, name).weight[e] for name in ("w_gate", "w_up", "w_down"))
    gate, up = z @ w_gate.T, z @ w_up.T
    return (gate / (1 + torch.exp(-gate)) * up) @ w_down.T


def masked_sum(moe: MoE, z: Tensor, top_k: int) -> Tensor:
    """Every expert on every token, times gates that are 0 where a token does not choose it; softmax, normalized."""
    scores = torch.exp(z @ moe.router.scores.weight.T)
    scores = scores / scores.sum(-1, keepdim=True)
    smallest = scores.sort(-1, descending=True).values[..., top_k - 1, None]
    kept = torch.where(scores >= smallest, scores, 0.0)
    gates = kept / kept.sum(-1, keepdim=True)
    return sum((gates[..., e, None] * expert(moe, e, z) for e in range(scores.shape[-1])), torch.zeros_like(z))


@pytest.mark.parametrize("gates", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_expert_is_the_dense_feed_forward(gates: Any, dtype: torch.dtype):
    dense = FeedForward(D, ffn_dim=F, activation="swiglu").to(dtype)
    moe = moe_of(n_experts=1, top_k=1, gates=gates).to(dtype)
    with torch.no_grad():
        for name in ("w_gate", "w_up", "w_down"):
            getattr(moe.experts, name).weight.copy_(getattr(dense, name).weight[None])
    z = tokens(2, 5).to(dtype)
    one, other = z.clone().requires_grad_(), z.clone().requires_grad_()
    update, report = moe(one)
    expected = dense(other)
    torch.testing.assert_close(update, expected, rtol=0, atol=0)
    assert report.balance_loss == 1
    weights = torch.randn_like(expected)
    (update * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-14)


def test_two_of_four_against_the_masked_sum():
    """Values, and gradients of the input, of every expert and of the router."""
    moe = moe_of()
    z = tokens(3, 7).requires_grad_()
    update, _ = moe(z)
    expected = masked_sum(moe, z, top_k=2)
    torch.testing.assert_close(update, expected, rtol=0, atol=1e-12)
    weights, inputs = torch.randn_like(update), [z, *moe.parameters()]
    ours, theirs = (torch.autograd.grad((o * weights).sum(), inputs) for o in (update, expected))
    assert len(ours) == 5
    assert all(gradient.abs().max() > 0.01 for gradient in theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_second_derivatives_exist():
    """Jacobians of gradients are what theory pages and Hessians need."""
    moe = moe_of()
    z = tokens(1, 3).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: moe(x)[0], z)


def test_gates_by_hand():
    """Logits (0, log 2, log 3), two of three: softmax (2/6, 3/6), sigmoid (2/3, 3/4), then normalized and scaled."""
    z = torch.ones(1, 1, dtype=torch.float64)
    wanted: dict[tuple[Any, bool], tuple[float, float]] = {
        ("softmax", False): (3 / 6, 2 / 6),
        ("softmax", True): (3 / 5, 2 / 5),
        ("sigmoid", False): (3 / 4, 2 / 3),
        ("sigmoid", True): (9 / 17, 8 / 17),
    }
    for (gates, normalized), expected in wanted.items():
        router = Router(1, n_experts=3, top_k=2, gates=gates, normalized=normalized, scale=2.5).double()
        with torch.no_grad():
            router.scores.weight.copy_(torch.tensor([[0.0], [math.log(2)], [math.log(3)]]))
        routing = router(z)
        assert routing.chosen.tolist() == [[2, 1]]
        torch.testing.assert_close(routing.gates[0], 2.5 * torch.tensor(expected, dtype=torch.float64))


def test_order_of_experts_does_not_matter():
    moe, other = moe_of(n_shared=1, bias_rate=0.1), moe_of(n_shared=1, bias_rate=0.1)
    with torch.no_grad():
        assert moe.router.bias is not None
        moe.router.bias.copy_(torch.tensor([0.0, 0.3, -0.2, 0.1]))
    order = torch.tensor([2, 0, 3, 1])
    state = moe.state_dict()
    for name in state:
        if "shared" not in name:
            state[name] = state[name][order]
    other.load_state_dict(state)
    z = tokens(2, 9)
    (update, report), (permuted, permuted_report) = moe(z), other(z)
    torch.testing.assert_close(permuted, update, rtol=0, atol=1e-14)
    assert torch.equal(permuted_report.tokens, report.tokens[order])
    torch.testing.assert_close(permuted_report[2:], report[2:], rtol=0, atol=1e-14)


def test_expert_without_tokens_has_gradients_of_zero():
    moe = moe_of(bias_rate=1.0)
    assert moe.router.bias is not None
    moe.router.bias[1] = -100.0
    update, report = moe(tokens(2, 5))
    assert report.tokens[1] == 0
    (update**2).sum().backward()
    for name in ("w_gate", "w_up", "w_down"):
        gradient = getattr(moe.experts, name).weight.grad
        assert gradient[1].abs().max() == 0
        assert all(gradient[e].abs().max() > 0 for e in (0, 2, 3))


def test_no_token_at_all():
    moe = moe_of()
    update, report = moe(tokens(2, 0))
    assert update.shape == (2, 0, D)
    assert report.tokens.tolist() == [0] * E


def test_shared_experts_are_added():
    moe = moe_of(n_shared=2)
    z = tokens(2, 3)
    assert moe.shared is not None
    assert sum(p.numel() for p in moe.shared.parameters()) == 3 * D * 2 * F
    torch.testing.assert_close(moe(z)[0], masked_sum(moe, z, 2) + moe.shared(z), rtol=0, atol=1e-12)


def test_capacity_keeps_the_first_tokens():
    """Brute force, token by token: an expert that is full adds nothing."""
    moe = moe_of(capacity=0.7)
    z = tokens(3, 5)
    limit = math.ceil(0.7 * 2 * 15 / 4)  # 6
    chosen, gates, report = moe.router(z.flatten(0, 1))
    taken, dropped, rows = [0] * E, 0, []
    for token in range(15):
        row = torch.zeros(D, dtype=torch.float64)
        for e, gate in zip(chosen[token].tolist(), gates[token], strict=True):
            if taken[e] < limit:
                taken[e] += 1
                row = row + gate * expert(moe, e, z.flatten(0, 1)[token])
            else:
                dropped += 1
        rows.append(row)
    update, full_report = moe(z)
    assert dropped > 0
    assert full_report.dropped == dropped
    assert torch.equal(full_report.tokens, report.tokens)  # before dropping
    torch.testing.assert_close(update.flatten(0, 1), torch.stack(rows), rtol=0, atol=1e-12)

    evaluated, report = moe.eval()(z)
    assert report.dropped == 0
    torch.testing.assert_close(evaluated, masked_sum(moe, z, 2), rtol=0, atol=1e-12)


def test_large_capacity_drops_nothing():
    moe = moe_of(capacity=2.0)  # 2 K N / E = N: no expert can have more
    z = tokens(4, 6)
    update, report = moe(z)
    assert report.dropped == 0
    torch.testing.assert_close(update, masked_sum(moe, z, 2), rtol=0, atol=1e-12)


def test_capacity_does_not_look_ahead():
    """What a token of a sequence gets does not depend on later ones."""
    moe = moe_of(capacity=0.5)
    z = tokens(1, 12)
    jacobian: Any = torch.autograd.functional.jacobian(lambda x: moe(x)[0].sum(-1), z)
    gradient = jacobian[0, :, 0]
    assert moe(z)[1].dropped > 0
    later = torch.ones(12, 12).triu(1).bool()
    assert gradient[later].abs().max() == 0
    changed = z.clone()
    changed[0, 6:] = tokens(6)
    torch.testing.assert_close(moe(changed)[0][:, :6], moe(z)[0][:, :6], rtol=0, atol=0)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "geglu"])
def test_what_is_on_the_hidden_vector(activation: Any, normed: bool):
    """An expert with a norm and scales is the dense feed-forward with them."""

    def options() -> dict[str, Any]:
        scales: dict[str, nn.Module] = {"up_scale": LearnedScale(F, start=3.0)}
        if activation == "geglu":
            scales["gate_scale"] = LearnedScale(F, start=0.5)
        return scales | ({"hidden_norm": nn.LayerNorm(F)} if normed else {})

    dense = FeedForward(D, ffn_dim=F, activation=activation, **options()).double()
    experts = Experts(D, n_experts=2, ffn_dim=F, activation=activation, **options()).double()
    state = {n: p.detach().clone() for n, p in dense.named_parameters()}
    own = dict(experts.named_parameters())
    assert state.keys() == own.keys()
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(torch.stack([torch.zeros_like(value), value]) if name.startswith("w_") else value)
    z = tokens(5)
    torch.testing.assert_close(experts(z, torch.tensor([0, 5])), dense(z[None])[0], rtol=0, atol=1e-14)


ROWS = torch.tensor([5, 0, 9, 2])


def test_one_by_one_is_a_loop_over_rows():
    linear = ExpertLinear(4, 3, 5).double()
    x = torch.randn(16, 3, dtype=torch.float64)
    of_row = [e for e, n in enumerate(ROWS.tolist()) for _ in range(n)]
    expected = torch.stack([linear.weight[e] @ row for e, row in zip(of_row, x, strict=True)])
    torch.testing.assert_close(linear(x, ROWS), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("compiled", [False, True])
def test_grouped_products(compiled: bool):
    """The path of CUDA, which exists on the CPU too: it agrees with the loop in bf16, gradients included."""
    x = torch.randn(16, 24).bfloat16().requires_grad_()
    weight = torch.randn(4, 8, 24).bfloat16().requires_grad_()
    assert is_grouped(x, weight)
    assert not is_grouped(x.float(), weight)
    assert not is_grouped(x[:, :20], weight[:, :, :20])
    product = torch.compile(grouped, fullgraph=True, backend="aot_eager") if compiled else grouped
    results = []
    for function in (product, one_by_one):
        y = function(x, weight, ROWS)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).bfloat16())
        results.append((y.detach(), x.grad, weight.grad))
        x.grad = weight.grad = None
    assert results[0][2][1].abs().max() == 0  # the expert without rows
    torch.testing.assert_close(results[0], results[1], rtol=2**-6, atol=2**-6)


def test_grouped_experts_under_autocast(monkeypatch: pytest.MonkeyPatch):
    """The whole sublayer by grouped products, as on CUDA, against the loop."""
    moe = MoE(Router(16, n_experts=4, top_k=2), Experts(16, n_experts=4, ffn_dim=24, activation="swiglu"))
    z = torch.randn(2, 9, 16)
    results = []
    for by_group in (True, False):
        if by_group:
            monkeypatch.setattr(ExpertLinear, "forward", lambda self, x, rows: grouped(x, self.weight, rows))
        moe.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            update, report = moe(z)
        assert update.dtype == torch.bfloat16
        (update.float().square().mean() + report.balance_loss).backward()
        results.append((update, [p.grad for p in moe.parameters()]))
        monkeypatch.undo()
    torch.testing.assert_close(results[0], results[1], rtol=0.02, atol=0.002)


@pytest.mark.untyped
def test_messages():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"n_experts": 4, "top_k": 5}, r"moe\.top_k 5 is above moe\.n_experts 4; change one of them"),
        ({"n_experts": -1}, r"moe\.n_experts must be at least 0, got -1"),
        ({"n_experts": 4, "top_k": 0}, r"moe\.top_k must be at least 1, got 0"),
        ({"n_experts": 4, "capacity": 0.0}, r"moe\.capacity must be a positive number, got 0\.0"),
        ({"n_experts": 4, "scale": float("inf")}, r"moe\.scale must be a positive number, got inf"),
        ({"n_experts": 4, "bias_rate": -1.0}, r"moe\.bias_rate must be a number of at least 0, got -1\.0"),
        ({"n_experts": 4, "gates": "sigmoids"}, r"moe\.gates cannot be 'sigmoids'; did you mean 'sigmoid'"),
        ({"n_experts": 4, "top_k": 1}, r"top_k 1 a normalized gate is always 1.*set moe\.normalized to false"),
        ({"n_experts": 4, "first_dense": 1.5}, r"first_dense must be of type int"),
        ({"top_k": 4}, r"moe\.top_k is given, but moe\.n_experts is 0"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            MoEConfig(**options)
    assert MoEConfig(n_experts=1, top_k=1).normalized
