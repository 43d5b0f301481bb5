import copy
import math

import pytest
import torch
from torch import Tensor, nn

from normstream import DecoderConfig, DecoderLM, RMSNorm, initialize
from normstream.optim import OptimizerConfig, build_optimizer
from normstream.optim.config import Kind
from normstream.training.checkpoint import load_optimizer_tensors, optimizer_tensors

KINDS = ("adamw", "radam", "sgd", "muon")


class Net(nn.Module):
    """A hidden matrix of each shape, a head, an embedding, glued experts, a convolution and a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.tall, self.wide = nn.Linear(6, 24, bias=False), nn.Linear(24, 6)
        self.norm = RMSNorm(6, eps=1e-6)
        self.experts = nn.Parameter(torch.randn(2, 6, 6))
        self.conv = nn.Conv1d(6, 6, 3, bias=False)
        self.lm_head = nn.Linear(6, 7, bias=False)


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def rectification(t: int, beta2: float) -> float:
    """Liu et al. 2020, algorithm 2."""
    rho_inf = 2 / (1 - beta2) - 1
    rho = rho_inf - 2 * t * beta2**t / (1 - beta2**t)
    return math.sqrt((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho))


@pytest.mark.parametrize(
    ("beta2", "known"), [(0.999, {6: 0.0258, 100: 0.215, 1000: 0.645}), (0.98, {6: 0.1155, 100: 0.820, 1000: 1.0})]
)
def test_radam_is_rectified_from_the_sixth_step(beta2: float, known: dict[int, float]):
    """With a constant gradient of 1 both bias-corrected moments are 1, and the step is lr r."""
    model = nn.Linear(1, 1, bias=False).double()
    config = OptimizerConfig(kind="radam", lr=1e-3, betas=(0.9, beta2), eps=0.0, weight_decay=0.0)
    optimizer = build_optimizer(model, config)
    steps = []
    for _ in range(1000):
        before = model.weight.item()
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        steps.append((before - model.weight.item()) / 1e-3)
    assert steps[:5] == pytest.approx([1.0] * 5, rel=1e-9)
    for t in (6, 7, 100, 1000):
        assert steps[t - 1] == pytest.approx(rectification(t, beta2), rel=1e-6)
    for t, r in known.items():
        assert steps[t - 1] == pytest.approx(r, rel=3e-3)


def test_radam_decay_is_decoupled():
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    optimizer = build_optimizer(model, OptimizerConfig(kind="radam", lr=0.1, weight_decay=0.1))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before * 0.99, rtol=1e-6, atol=0)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_sgd(momentum: float | None):
    model = nn.Linear(2, 2, bias=False).double()
    optimizer = build_optimizer(model, OptimizerConfig(kind="sgd", lr=0.1, momentum=momentum, weight_decay=0.2))
    w, m = model.weight.detach().clone(), torch.zeros(2, 2, dtype=torch.float64)
    for gradient in (1.0, -2.0, 3.0):
        model.weight.grad = torch.full_like(model.weight, gradient)
        optimizer.step()
        m = (momentum or 0.0) * m + gradient + 0.2 * w
        w = w - 0.1 * m
        torch.testing.assert_close(model.weight.detach(), w)


def newton_schulz(m: Tensor) -> Tensor:
    """Five steps of X <- 3.4445 X - 4.7750 X X^T X + 2.0315 (X X^T)^2 X from X = M / |M|, in float64."""
    x = m.double() / m.double().norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
    return x


def test_muon_moves_hidden_matrices_and_adamw_the_rest():
    model = Net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = OptimizerConfig(kind="muon", lr=0.01, weight_decay=0.1)
    optimizer = build_optimizer(model, config)
    give_gradients(model, seed=1)
    optimizer.step()

    for name, p in model.named_parameters():
        assert p.grad is not None
        decayed = 0.1 if p.ndim > 1 and name != "embed.weight" else 0.0
        update = (before[name] * (1 - 0.01 * decayed) - p.detach()) / 0.01
        if name in ("tall.weight", "wide.weight"):
            expected = 0.2 * math.sqrt(24) * newton_schulz(p.grad)  # scale-invariant, so momentum does not matter yet
            assert (update - expected).norm() < 0.02 * expected.norm(), name
            assert 0.13 < update.square().mean().sqrt() < 0.25  # AdamW's typical 0.2
        else:
            torch.testing.assert_close(update, p.grad.sign(), rtol=1e-3, atol=1e-3)


def test_muon_has_momentum_with_a_look_ahead():
    model = nn.Linear(4, 4, bias=False)
    optimizer = build_optimizer(model, OptimizerConfig(kind="muon", lr=1.0, weight_decay=0.0, momentum=0.8))
    gradients = torch.randn(2, 4, 4)
    for gradient in gradients:
        before = model.weight.detach().clone()
        model.weight.grad = gradient.clone()
        optimizer.step()
    m = 0.8 * 0.2 * gradients[0] + 0.2 * gradients[1]
    expected = 0.2 * math.sqrt(4) * newton_schulz(0.8 * m + 0.2 * gradients[1])
    assert (before - model.weight.detach() - expected).norm() < 0.03 * expected.norm()


def test_head_and_junctions_of_a_decoder_are_not_for_muon():
    model = DecoderLM(DecoderConfig(placement="siamese_hybrid_pre", vocab_size=11, dim=8, n_layers=2, n_heads=2))
    groups = build_optimizer(model, OptimizerConfig(kind="muon")).param_groups
    taken = {name for group in groups if group["optimizer"] == "muon" for name in group["param_names"]}
    matrices = ("wq", "wk", "wv", "wo", "w_up", "w_gate", "w_down")
    assert taken == {n for n, _ in model.named_parameters() if n.rsplit(".", 2)[-2] in matrices}
    assert {(g["role"], g["optimizer"]) for g in groups if g["role"] == "matrix"} == {
        ("matrix", "muon"),
        ("matrix", "adamw"),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("momentum", [None, 0.5])
def test_every_optimizer_comes_back_bit_by_bit(kind: Kind, momentum: float | None):
    config = OptimizerConfig(kind=kind, lr=0.01, momentum=momentum)
    first = Net()
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    one, two, three = (build_optimizer(model, config) for model in (first, second, third))
    for step in range(9):
        for model, optimizer in ((first, one), (second, two), (third, three)):
            give_gradients(model, seed=step)
            optimizer.step()
        if step == 6:  # after RAdam's first adapted step
            saved = {key: value.clone() for key, value in optimizer_tensors(two).items()}
            two = build_optimizer(second, config)
            load_optimizer_tensors(two, saved)
            state = copy.deepcopy(three.state_dict())
            three = build_optimizer(third, config)
            three.load_state_dict(state)
    for model in (second, third):
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_loss_scaling_changes_nothing_and_skips_overflow(kind: Kind):
    plain, scaled = DecoderLM(DecoderConfig(vocab_size=11, dim=8, n_layers=1, n_heads=2)), None
    initialize(plain, seed=0)
    scaled = copy.deepcopy(plain)
    config = OptimizerConfig(kind=kind, lr=0.01)
    one, two = build_optimizer(plain, config), build_optimizer(scaled, config)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    tokens = torch.arange(10)[None]
    for step in range(3):
        plain(tokens).logsumexp(-1).sum().backward()
        scaler.scale(scaled(tokens).logsumexp(-1).sum()).backward()
        one.step()
        one.zero_grad()
        scaler.unscale_(two)
        scaler.step(two)
        scaler.update()
        two.zero_grad()
        if step == 1:
            before = [p.detach().clone() for p in scaled.parameters()]
            scaler.scale(scaled(tokens).sum() * torch.inf).backward()
            scaler.unscale_(two)
            scaler.step(two)
            scaler.update()
            two.zero_grad()
            assert all(torch.equal(a, b) for a, b in zip(before, scaled.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), scaled.parameters(), strict=True))


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "muonclipp"}, "optimizer.kind cannot be 'muonclipp'; did you mean 'muonclip'"),
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": math.nan}, "momentum"),
    ],
)
def test_impossible_options(wrong: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**wrong)  # pyright: ignore[reportArgumentType]
