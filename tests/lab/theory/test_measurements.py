"""The probes against references that are written out here: exact Jacobians, the paper's equations, plain autograd."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normstream import placements
from normstream.lab.theory.config import ModelKind, TheoryConfig
from normstream.lab.theory.jacobian import closed_form, spectral_norm
from normstream.lab.theory.measure import decoder, measure, simplified
from normstream.lab.theory.probe import (
    gradients,
    hidden_squares,
    input_jacobians,
    norm_jacobians,
    output_jacobians,
    run,
)
from normstream.lab.theory.update import first_update
from normstream.norms import LayerNorm, NormConfig, RMSNorm

SMALL = TheoryConfig(dim=16, tokens=3, seeds=(0,))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vector(width: int, seed: int) -> Tensor:
    return 3 * torch.randn(width, generator=generator(seed), dtype=torch.float64) + 1


@pytest.mark.parametrize("width", [4, 32])
def test_lemma_3_is_an_equality(width: int) -> None:
    x = vector(width, 0)
    norm = LayerNorm(width, eps=0.0).double()
    exact = torch.linalg.matrix_norm(torch.autograd.functional.jacobian(norm, x), ord=2).item()
    assert exact == pytest.approx(math.sqrt(width) / (x - x.mean()).norm().item(), rel=1e-12)
    assert spectral_norm(norm, x) == pytest.approx(exact, rel=1e-10)
    assert closed_form(norm, x) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    "norm",
    [
        RMSNorm(16, eps=1e-2),
        LayerNorm(16, eps=1e-2, gain="zero_centered"),
        LayerNorm(16, eps=1e-2, gain="none", bias=False),
        NormConfig(kind="rms", eps=1e-2, gain_init=0.25).build(16),
    ],
)
def test_closed_form_with_eps_and_gain(norm: nn.Module) -> None:
    x = vector(16, 1)
    exact = torch.linalg.matrix_norm(torch.autograd.functional.jacobian(norm.double(), x), ord=2).item()
    assert closed_form(norm, x) == pytest.approx(exact, rel=1e-6)
    assert spectral_norm(norm, x) == pytest.approx(exact, rel=1e-6)


def test_spectral_norm_of_an_uneven_gain_has_no_closed_form() -> None:
    norm = RMSNorm(16, eps=0.0).double()
    with torch.no_grad():
        norm.get_parameter("weight")[3] = 5.0
    x = vector(16, 2)
    exact = torch.linalg.matrix_norm(torch.autograd.functional.jacobian(norm, x), ord=2).item()
    assert closed_form(norm, x) is None
    assert spectral_norm(norm, x) == pytest.approx(exact, rel=1e-4)


def reference(model, x: Tensor, post: bool) -> list[Tensor]:
    """The paper's Post-LN and Pre-LN blocks with uniform attention: the stream before and after every sublayer."""

    def n(v: Tensor) -> Tensor:
        return F.layer_norm(v, v.shape[-1:], eps=0.0)

    streams = [x]
    for layer in model.layers:
        w_v, w_1, w_2 = layer.attention.w_v.weight, layer.feed_forward.w_up.weight, layer.feed_forward.w_down.weight
        for sublayer in (
            lambda z, w=w_v: (z.mean(1, keepdim=True) @ w.T).expand_as(z),
            lambda z, a=w_1, b=w_2: (z @ a.T).relu() @ b.T,
        ):
            x = n(x + sublayer(x)) if post else x + sublayer(n(x))
            streams.append(x)
    return streams


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_the_simplified_model_is_the_papers(placement: str) -> None:
    one = simplified(placement, 3, 0, SMALL, tokens=3)
    streams = reference(one.model, one.inputs, placement == "post")
    expected = [stream.square().mean().item() for stream in streams]
    trace = run(one, lambda embedding: embedding)
    assert hidden_squares(trace, ("x",))["x"] == pytest.approx(expected, rel=1e-12)


def test_weights_are_gaussian_xavier_and_alike_for_every_placement() -> None:
    config = TheoryConfig(dim=128, ffn_ratio=4, seeds=(0,))
    weights = []
    for placement in ("pre", "siamese"):
        feed_forward = simplified(placement, 1, 0, config, tokens=1).model.layers[0].feed_forward
        weights.append(feed_forward.w_up.weight.detach().clone())
    assert torch.equal(*weights)
    assert weights[0].std().item() == pytest.approx(math.sqrt(2 / (5 * 128)), rel=0.02)
    half = simplified("deepnorm", 2, 0, config, tokens=1).model.layers[0].feed_forward.w_up.weight
    assert half.std().item() == pytest.approx(math.sqrt(2 / (5 * 128)) / 2, rel=0.02)


@pytest.mark.parametrize("placement", ["post", "pre", "siamese"])
def test_gradients_are_those_of_autograd(placement: str) -> None:
    one = simplified(placement, 2, 0, SMALL, tokens=3)
    found = gradients(one, run(one, lambda embedding: embedding.requires_grad_()))
    one.loss(one.model.hidden(one.inputs)).backward()
    for index, layer in enumerate(one.model.layers):
        squares = [p.grad.square().sum().item() for p in layer.parameters() if p.grad is not None]
        assert found["block"][index] == pytest.approx(math.sqrt(sum(squares)), rel=1e-9)
        assert found["ffn"][index] == pytest.approx(layer.feed_forward.w_down.weight.grad.norm().item(), rel=1e-9)
    one.model.zero_grad()


@pytest.mark.parametrize("placement", ["post", "pre", "peri"])
def test_effective_jacobians_are_estimates_of_the_exact_one(placement: str) -> None:
    """Hutchinson's estimate, the mean over many probes, against the Jacobian itself."""
    one = simplified(placement, 2, 0, SMALL, tokens=3)
    exact = torch.autograd.functional.jacobian(one.model.hidden, one.inputs).square().sum().item() / one.inputs.numel()
    forward, backward = [], []
    for seed in range(200):
        trace = run(one, lambda embedding: embedding.requires_grad_())
        forward.append(input_jacobians(one, trace, ("x",), generator(seed))["output"][0])
        backward.append(output_jacobians(trace, ("x",), generator(1000 + seed))["output"][0])
    assert sum(forward) / 200 == pytest.approx(exact, rel=0.1)
    assert sum(backward) / 200 == pytest.approx(exact, rel=0.1)


def test_jacobian_of_a_border_is_that_of_the_streams_there() -> None:
    """Border 0 is the embedding itself; with one probe the central difference is exact for a linear map."""
    one = simplified("pre", 1, 0, SMALL, tokens=3)
    trace = run(one, lambda embedding: embedding.requires_grad_())
    u = torch.randn(one.inputs.shape, generator=generator(0), dtype=torch.float64)
    found = input_jacobians(one, trace, ("x",), generator(0))["x"]
    assert found[0] == pytest.approx(u.square().mean().item(), rel=1e-6)
    after: Any = torch.autograd.functional.jvp(lambda x: reference(one.model, x, post=False)[-1], one.inputs, u)[1]
    assert found[-1] == pytest.approx(after.square().mean().item(), rel=1e-6)


def test_norms_are_found_with_their_border() -> None:
    one = simplified("post", 2, 0, SMALL, tokens=3)
    found = norm_jacobians(one)
    assert [norm["border"] for norm in found] == [1, 2, 3, 4]
    assert all(norm["norm"] == pytest.approx(norm["exact"], rel=1e-9) for norm in found)


def test_an_sgd_step_moves_the_output_by_the_tangent_kernel() -> None:
    """F(theta - eta g) - F(theta) = -eta J g to first order, J g by forward differentiation."""
    one = simplified("post", 2, 0, SMALL, tokens=3, output_matrix=True)
    matrices = {name: p for name, p in one.model.named_parameters() if p.ndim > 1 and name.startswith("layers")}
    found = torch.autograd.grad(one.loss(one.model.hidden(one.inputs)), list(matrices.values()))

    def outputs(*values: Tensor) -> Tensor:
        named = dict(zip(matrices, values, strict=True))
        return torch.func.functional_call(Hidden(one.model), {f"model.{k}": v for k, v in named.items()}, one.inputs)

    tangent: Any = torch.autograd.functional.jvp(outputs, tuple(matrices.values()), found)[1]
    assert first_update(one)["sgd"] == pytest.approx(tangent.square().mean().sqrt().item(), rel=1e-3)


class Hidden(nn.Module):
    """A model whose forward is another one's ``hidden``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model.hidden(inputs)  # pyright: ignore[reportCallIssue]


def test_a_step_is_undone() -> None:
    one = simplified("pre", 1, 0, SMALL, tokens=3)
    before = [p.detach().clone() for p in one.model.parameters()]
    first_update(one)
    assert all(torch.equal(old, new) for old, new in zip(before, one.model.parameters(), strict=True))


@pytest.mark.parametrize("placement", placements.names())
@pytest.mark.parametrize("kind", ["xiong", "decoder"])
def test_every_placement_can_be_measured(placement: str, kind: ModelKind) -> None:
    config = TheoryConfig(model=kind, dim=16, tokens=3, seeds=(0,), depths=(2,))
    found = measure(placement, 2, config)
    sublayers = sum(map(len, placements.get(placement).blocks(2, ("attention", "feed_forward"))))
    assert list(found["square"]) == list(placements.get(placement).streams)
    for values in (*found["square"].values(), *(found["to_output"][name] for name in found["streams"])):
        assert len(values) == sublayers + 1
        assert all(math.isfinite(value) and value >= 0 for value in values)
    assert len(found["gradient"]["ffn"]) == 2
    assert found["from_embedding"]["output"][0] > 0


def test_the_decoder_is_the_one_that_is_trained() -> None:
    config = TheoryConfig(model="decoder", dim=16, n_heads=2, tokens=5, ffn_ratio=2, init="xavier", seeds=(0,))
    one = decoder("pre", 2, 0, config)
    assert one.model.config.ffn_dim == 32
    assert one.model.layers[0].attention.wv.weight.std().item() == pytest.approx(1 / 4, rel=0.2)
    expected = one.model.tok_embeddings.weight[one.inputs].square().mean().item()
    assert hidden_squares(run(one, lambda embedding: embedding), ("x",))["x"][0] == pytest.approx(expected)
