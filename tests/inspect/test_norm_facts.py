"""Norms are found by what they compute. Expected facts are the ones that each norm was built with."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.tiny_models import tiny_model
from torch import Tensor, nn

from normstream import norms
from normstream.inspect.anatomy import NormFacts
from normstream.inspect.probing.functional import functional_norms
from normstream.inspect.probing.norm_facts import find_norms

WIDTH, TOKENS = 12, 7


def facts_of(module: nn.Module, *shape: int, **changes: Any) -> NormFacts | None:
    """Of a module that stands behind a matrix, under a name that says nothing."""
    shape = shape or (1, TOKENS, WIDTH)
    model = nn.Sequential(nn.Linear(shape[-1], shape[-1]), module)
    return find_norms(model, {"input": torch.randn(*shape)}).get("1")


class Affine(nn.Module):
    """A norm with every convention as an argument; gains start where ``start`` says."""

    def __init__(self, gain: str, cast: str, eps: float, width: int = WIDTH, start: float = 1.0) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.full((width,), start))
        self.gain, self.cast, self.eps = gain, cast, eps

    def forward(self, x: Tensor) -> Tensor:
        high = x.float() if x.dtype == torch.bfloat16 else x
        normed = high * (high.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        if self.gain == "none":
            return normed.to(x.dtype)
        if self.cast == "before_gain":
            return normed.to(x.dtype) * self._weight()
        result = normed * self._weight().to(high.dtype)
        return result if self.cast == "float32" else result.to(x.dtype)

    def _weight(self) -> Tensor:
        return {"plain": self.q, "one_plus_w": 1 + self.q, "other": self.q.exp()}[self.gain]


@pytest.mark.parametrize("start", [0.0, 1.0])
@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-3, 0.1])
@pytest.mark.parametrize("cast", ["before_gain", "after_gain", "float32"])
@pytest.mark.parametrize("gain", ["plain", "one_plus_w", "other"])
def test_conventions_of_rms_norms(gain: str, cast: str, eps: float, start: float) -> None:
    facts = facts_of(Affine(gain, cast, eps, start=start))
    assert facts is not None
    assert (facts.kind, facts.gain, facts.cast, facts.has_bias) == ("rms", gain, cast, False)
    assert facts.eps == pytest.approx(eps, rel=0.01)
    assert (facts.width, facts.features) == (WIDTH, WIDTH)


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1e-2])
@pytest.mark.parametrize(("affine", "bias"), [(True, True), (True, False), (False, False)])
def test_torch_layer_norms(affine: bool, bias: bool, eps: float) -> None:
    facts = facts_of(nn.LayerNorm(WIDTH, eps=eps, elementwise_affine=affine, bias=bias))
    assert facts is not None
    assert (facts.kind, facts.gain, facts.has_bias) == ("layer", "plain" if affine else "none", bias)
    assert facts.eps == pytest.approx(eps, rel=0.01)
    assert facts.cast == ("after_gain" if affine else "unknown")


@pytest.mark.parametrize("cast", ["before_gain", "after_gain"])
@pytest.mark.parametrize(("ours", "theirs"), [("plain", "plain"), ("zero_centered", "one_plus_w")])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_our_own_norms(kind: str, ours: Any, theirs: str, cast: Any) -> None:
    cls = norms.RMSNorm if kind == "rms" else norms.LayerNorm
    facts = facts_of(cls(WIDTH, eps=1e-4, gain=ours, cast=cast))
    assert facts is not None
    assert (facts.kind, facts.gain, facts.cast) == (kind, theirs, cast)
    assert facts.eps == pytest.approx(1e-4, rel=0.01)


class Grouped(nn.Module):
    """Normalises groups of neighbours of the last axis; one gain for all of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.weight = width, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(-1, (-1, self.width))
        return F.rms_norm(grouped, (self.width,), None, 1e-5).flatten(-2) * self.weight


class Transposed(nn.LayerNorm):
    """Features on the middle axis, as convolutions like them."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.mT).mT


class Gated(nn.Module):
    """The gated norm of state-space mixers, with the norm before or after the gate; needs a second tensor."""

    def __init__(self, gate_first: bool) -> None:
        super().__init__()
        self.gate_first, self.weight = gate_first, nn.Parameter(torch.ones(WIDTH))
        self.project = nn.Linear(WIDTH, 2 * WIDTH)
        self.inner = GatedNorm(gate_first)

    def forward(self, input: Tensor) -> Tensor:
        x, gate = self.project(input).chunk(2, -1)
        return self.inner(x, gate)


class GatedNorm(nn.Module):
    def __init__(self, gate_first: bool) -> None:
        super().__init__()
        self.gate_first, self.weight = gate_first, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if self.gate_first:
            return F.rms_norm(x * F.silu(gate), (WIDTH,), self.weight, 1e-5)
        return F.rms_norm(x, (WIDTH,), self.weight, 1e-5) * F.silu(gate)


class Pair(nn.Module):
    """Normalises queries and keys in one call and returns both."""

    def __init__(self) -> None:
        super().__init__()
        self.both = PairNorm()

    def forward(self, input: Tensor) -> Tensor:
        q, k = self.both(input, 2 * input)
        return q + k


class PairNorm(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1)


def test_groups_and_heads() -> None:
    grouped = facts_of(Grouped(4))
    assert grouped is not None
    assert (grouped.width, grouped.features, grouped.kind) == (4, WIDTH, "rms")
    per_head = facts_of(nn.RMSNorm(8, eps=1e-5), 1, TOKENS, 3, 8)
    assert per_head is not None
    assert (per_head.width, per_head.features) == (8, 8)


def test_features_on_another_axis() -> None:
    model = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 1), Transposed(WIDTH, eps=1e-4))
    facts = find_norms(model, {"input": torch.randn(1, WIDTH, TOKENS)})["1"]
    assert (facts.kind, facts.width, facts.features, facts.has_bias) == ("layer", WIDTH, WIDTH, True)


@pytest.mark.parametrize("gate_first", [True, False])
def test_gated_norms(gate_first: bool) -> None:
    facts = find_norms(Gated(gate_first), {"input": torch.randn(1, TOKENS, WIDTH)})
    assert set(facts) == {"inner"}
    assert (facts["inner"].kind, facts["inner"].gain, facts["inner"].width) == ("rms", "plain", WIDTH)
    if gate_first:  # silu(1) of the gate is part of the statistic and scales eps; the other way round it does not
        assert facts["inner"].eps == pytest.approx(1e-5 / F.silu(torch.ones(())).item() ** 2, rel=0.01)
    else:
        assert facts["inner"].eps == pytest.approx(1e-5, rel=0.01)


def test_a_norm_that_returns_a_pair() -> None:
    """torch's ``normalize`` guards against zero with a maximum: there is no eps inside a root."""
    facts = find_norms(Pair(), {"input": torch.randn(1, TOKENS, WIDTH)})["both"]
    assert (facts.kind, facts.gain, facts.eps) == ("rms", "none", None)


class Elsewhere(nn.Module):
    """eps outside the root."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-3)


def test_an_eps_outside_the_root_is_not_measured() -> None:
    facts = facts_of(Elsewhere())
    assert facts is not None
    assert facts.eps is None


def test_of_nested_norms_the_innermost_counts() -> None:
    model = nn.Sequential(nn.Sequential(nn.Identity(), nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.5))))
    assert set(find_norms(model.eval(), {"input": torch.randn(1, TOKENS, WIDTH)})) == {"0.1.0"}


class Clipped(nn.Module):
    """Shortens long vectors only."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 / x.norm(dim=-1, keepdim=True)).clamp(max=1.0)


class Sign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sign()


class OverTokens(nn.Module):
    """Normalises every channel over the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean((1, 2), keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize(
    "module",
    [
        *(nn.Identity(), nn.Tanh(), nn.Softmax(-1), nn.GELU(), nn.Dropout(), nn.Hardtanh(), Clipped(), Sign()),
        *(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(TOKENS), OverTokens()),
        *(norms.DyT(WIDTH, alpha=0.5), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH, eps=1e-5))),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_no_norm(module: nn.Module) -> None:
    assert facts_of(module.eval()) is None


def test_the_model_is_left_alone() -> None:
    model = tiny_model("gemma2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = {"input_ids": torch.arange(3, 34)[None]}
    first = find_norms(model, inputs)
    assert find_norms(model, inputs) == first
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("name", "eps_field", "expected"),
    [
        ("llama", "rms_norm_eps", ("rms", "plain", False, "before_gain")),
        ("gemma2", "rms_norm_eps", ("rms", "one_plus_w", False, "after_gain")),
        ("olmo2", "rms_norm_eps", ("rms", "plain", False, "after_gain")),
        ("gpt2", "layer_norm_epsilon", ("layer", "plain", True, "after_gain")),
        ("nemotron", "norm_eps", ("layer", "one_plus_w", True, "after_gain")),
        ("cohere2", "layer_norm_eps", ("layer", "plain", False, "after_gain")),
        ("nanochat", "rms_norm_eps", ("rms", "none", False, "unknown")),
    ],
)
def test_facts_of_released_families(name: str, eps_field: str, expected: tuple[Any, ...], seed: int) -> None:
    model = tiny_model(name, seed=seed)
    found = find_norms(model, {"input_ids": torch.arange(3, 34)[None]})
    assert found
    for facts in found.values():
        assert (facts.kind, facts.gain, facts.has_bias, facts.cast) == expected
        assert facts.eps == pytest.approx(getattr(model.config, eps_field), rel=0.01)


def test_every_norm_call_is_a_normalising_operation_and_no_other() -> None:
    """Without blind spots the operations of a Gemma 2 are those of its norms; Qwen3-Next normalises q and k by hand."""
    inputs = {"input_ids": torch.arange(3, 34)[None]}
    gemma, qwen = tiny_model("gemma2"), tiny_model("qwen3_next")
    config: Any = qwen.config
    found = find_norms(gemma, inputs)
    assert functional_norms(gemma, inputs, found) == {}
    assert sum(functional_norms(gemma, inputs, {}).values()) == len(found) == 4 * 4 + 1
    with warnings.catch_warnings(action="ignore"):
        blind = functional_norms(qwen, inputs, find_norms(qwen, inputs))
    linear = [index for index, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    assert list(blind.values()) == [2] * len(linear)
