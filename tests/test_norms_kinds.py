"""PB-Relax, ScaleNorm, DyT and Derf, and the gain at the start, against the formulas of their papers."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream.init import initialize
from normstream.models import DecoderConfig, DecoderLM
from normstream.norms import Derf, DyT, LayerNorm, NormConfig, PBRelaxNorm, RMSNorm, ScaleNorm

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
KINDS = ("rms", "layer", "pb_relax", "scale", "dyt", "derf")
WITH_BIAS = ("layer", "pb_relax", "dyt", "derf")


def random_norm(config: NormConfig, dim: int, seed: int = 0) -> Any:
    """A float64 norm whose parameters are all away from their start."""
    generator = torch.Generator().manual_seed(seed)
    norm = config.build(dim).double()
    for parameter in norm.parameters():
        parameter.data.copy_(0.5 + torch.rand(parameter.shape, generator=generator, dtype=torch.float64))
    return norm


def by_hand(kind: str, norm: Any, x: Tensor, gain: Tensor | float, scope: str = "token") -> Tensor:
    """The papers' formulas in float64."""
    x = x.double()
    bias = 0.0 if getattr(norm, "bias", None) is None else norm.bias
    match kind:
        case "rms":
            return gain * x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
        case "scale":
            return gain * x / x.pow(2).sum(-1, keepdim=True).sqrt().clamp(min=norm.eps)
        case "dyt":
            return gain * torch.tanh(norm.alpha * x) + bias
        case "derf":
            return gain * torch.erf(norm.alpha * x + norm.shift) + bias
        case "pb_relax":
            x = x / (x.abs().max(-1, keepdim=True).values if scope == "token" else x.abs().max() / 8)
    centred = x - x.mean(-1, keepdim=True)
    return gain * centred / (centred.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() + bias


def effective_gain(norm: Any) -> Tensor | float:
    gain = getattr(norm, "gain", "plain")
    return {"plain": lambda: norm.weight, "zero_centered": lambda: 1 + norm.weight, "none": lambda: 1.0}[gain]()


CONVENTIONS = [
    NormConfig(kind=kind, eps=1e-3, gain=gain, cast=cast, bias=bias, scope=scope)
    for kind, gain, cast, bias, scope in itertools.product(
        KINDS,
        ("plain", "zero_centered", "none"),
        ("after_gain", "before_gain", "gain_dtype"),
        (False, True),
        ("token", "tensor"),
    )
    if (not bias or kind in WITH_BIAS)
    and (kind != "scale" or (gain, cast) == ("plain", "after_gain"))
    and (kind == "pb_relax" or scope == "token")
]
IDS = [f"{c.kind}-{c.gain}-{c.cast}-{c.scope}-bias={c.bias}" for c in CONVENTIONS]


@pytest.mark.parametrize("config", CONVENTIONS, ids=IDS)
def test_every_convention_is_the_formula_in_float64(config):
    norm = random_norm(config, 7)
    x = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = by_hand(config.kind, norm, x, effective_gain(norm), config.scope)
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("config", CONVENTIONS, ids=IDS)
def test_gradcheck(config):
    if config.scope == "tensor":
        config = replace(config, eps=0.0)  # the maximum has no gradient, which is exact only where it cancels
    norm = random_norm(config, 5)
    names = [name for name, _ in norm.named_parameters()]
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(norm, dict(zip(names, values, strict=True)), (x,))

    leaves = [p.detach().clone().requires_grad_() for p in norm.parameters()]
    assert torch.autograd.gradcheck(function, (x, *leaves))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("input_dtype", "gain_dtype"), list(itertools.product(FLOATS, FLOATS)))
def test_dtypes_and_precision(kind, input_dtype, gain_dtype):
    """Output and input gradient in the dtype of the input; one rounding away from float64."""
    config = NormConfig(kind=kind, eps=1e-5, bias=kind in WITH_BIAS)
    exact = random_norm(config, 33).to(gain_dtype).double()
    norm = config.build(33).to(gain_dtype)
    norm.load_state_dict(exact.state_dict())
    x = torch.randn(4, 33, generator=torch.Generator().manual_seed(3)).to(input_dtype).requires_grad_()
    out = norm(x)
    assert out.dtype == input_dtype
    expected = by_hand(kind, exact, x.detach(), exact.weight)
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(input_dtype).eps / 2 + 2e-6, atol=2e-6)
    grads = torch.autograd.grad(out, [x, *norm.parameters()], torch.ones_like(out))
    assert [g.dtype for g in grads] == [input_dtype] + [gain_dtype] * (len(grads) - 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm(x).dtype == input_dtype


# --- start values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gain_init", [1.0, 0.0, 0.01, -2.0])
@pytest.mark.parametrize("gain", ["plain", "zero_centered"])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "scale"])
def test_gain_init_is_the_effective_gain_at_the_start(kind, gain, gain_init):
    norm: Any = NormConfig(kind=kind, gain=gain, gain_init=gain_init).build(4)
    assert norm.weight.tolist() == pytest.approx([gain_init - (gain == "zero_centered")] * 4)
    unit = NormConfig(kind=kind, gain="none").build(4)
    x = torch.tensor([[1.0, -2.0, 0.5, 3.0]])
    torch.testing.assert_close(norm(x), gain_init * unit(x))


def test_swin_v2_starts_with_no_output():
    norm: Any = LayerNorm(4, eps=1e-5, gain_init=0.0)
    assert not norm.weight.any()
    assert not norm.bias.any()
    assert not norm(torch.randn(2, 4)).any()


def test_scale_norm_starts_at_the_root_of_the_width_or_at_neox_one():
    authors, neox = ScaleNorm(64, eps=1e-5), ScaleNorm(64, eps=1e-8, gain_init=64**-0.5)
    assert (authors.weight.tolist(), neox.weight.tolist()) == ([8.0], [1.0])
    x = torch.randn(5, 64)
    torch.testing.assert_close(authors(x).norm(dim=-1), torch.full((5,), 8.0))
    torch.testing.assert_close(neox(x).norm(dim=-1), torch.ones(5))
    torch.testing.assert_close(authors(x), RMSNorm(64, eps=0.0)(x))


def test_pointwise_start_values_are_those_of_the_papers():
    dyt, derf = DyT(3), Derf(3)
    assert {name: p.tolist() for name, p in dyt.named_parameters()} == {
        "weight": [1.0] * 3,
        "bias": [0.0] * 3,
        "alpha": [0.5],
    }
    assert {name: p.tolist() for name, p in derf.named_parameters()} == {
        "weight": [1.0] * 3,
        "bias": [0.0] * 3,
        "alpha": [0.5],
        "shift": [0.0],
    }
    x = torch.tensor([-2.0, 0.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(dyt.double()(x), torch.tensor([-0.7615942, 0.0, 0.9640276], dtype=torch.float64))
    torch.testing.assert_close(derf.double()(x), torch.tensor([-0.8427008, 0.0, 0.9953223], dtype=torch.float64))
    x_transformers: Any = NormConfig(kind="dyt", alpha=1.0, bias=True).build(3)
    assert x_transformers.alpha.tolist() == [1.0]


@pytest.mark.parametrize(
    ("config", "norm_class", "parameters"),
    [
        (NormConfig(kind="pb_relax", bias=True), PBRelaxNorm, ["bias", "weight"]),
        (NormConfig(kind="scale"), ScaleNorm, ["weight"]),
        (NormConfig(kind="dyt"), DyT, ["alpha", "weight"]),
        (NormConfig(kind="derf", bias=True), Derf, ["alpha", "bias", "shift", "weight"]),
        (NormConfig(kind="derf", gain="none"), Derf, ["alpha", "shift"]),
    ],
)
def test_config_builds_the_norm_it_names(config, norm_class, parameters):
    norm = config.build(8)
    assert type(norm) is norm_class
    assert sorted(name for name, _ in norm.named_parameters()) == parameters


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_from_the_meta_device_starts_equal(kind):
    config = NormConfig(kind=kind, gain_init=0.5, alpha=0.7, bias=kind in WITH_BIAS)
    with torch.device("meta"):
        late: Any = config.build(6)
    late = late.to_empty(device="cpu")
    late.reset_parameters()
    early = config.build(6)
    assert all(torch.equal(value, late.state_dict()[name]) for name, value in early.state_dict().items())


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "rms", "bias": True}, "bias"),
        ({"kind": "scale", "bias": True}, "bias"),
        ({"kind": "scale", "gain": "none"}, "plain"),
        ({"kind": "scale", "gain": "zero_centered"}, "plain"),
        ({"kind": "scale", "cast": "before_gain"}, "after_gain"),
        ({"gain": "none", "gain_init": 0.5}, "gain_init"),
        ({"gain_init": math.inf}, "gain_init"),
        ({"kind": "dyt", "alpha": 0.0}, "alpha"),
        ({"kind": "dyt", "alpha": math.nan}, "alpha"),
        ({"kind": "pb_relax", "scope": "batch"}, "scope"),
        ({"kind": "dyn_tanh"}, "norm.kind"),
    ],
)
def test_conventions_that_do_not_exist_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        NormConfig(**options)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_widths_are_errors(kind):
    with pytest.raises(ValueError, match="8"):
        NormConfig(kind=kind).build(8)(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="0"):
        NormConfig(kind=kind).build(0)


# --- PB-Relax -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scope", "divisor"), [("token", 1.0), ("tensor", 8.0)])
def test_eps_of_pb_relax_is_relative_to_the_largest_magnitude(scope: Any, divisor):
    """It is LayerNorm with eps (max|x| / divisor)^2, for a single token."""
    x = 100 * torch.randn(1, 16, dtype=torch.float64)
    relaxed = PBRelaxNorm(16, eps=1e-2, scope=scope).double()
    plain = LayerNorm(16, eps=1e-2 * (x.abs().max().item() / divisor) ** 2).double()
    torch.testing.assert_close(relaxed(x), plain(x), rtol=0, atol=1e-12)


def test_only_the_tensor_scope_depends_on_the_rest_of_the_batch():
    quiet, loud = torch.randn(1, 8), 1000 * torch.randn(1, 8)
    cases: list[tuple[Any, bool]] = [("token", False), ("tensor", True)]
    for scope, depends in cases:
        norm = PBRelaxNorm(8, eps=1e-3, scope=scope)
        alone, together = norm(quiet)[0], norm(torch.cat((quiet, loud)))[0]
        assert torch.equal(alone, together) != depends


@pytest.mark.parametrize("scope", ["token", "tensor"])
def test_pb_relax_of_zeros_is_the_bias(scope):
    norm: Any = PBRelaxNorm(4, eps=1e-5, scope=scope)
    norm.bias.data.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    x = torch.zeros(2, 3, 4, requires_grad=True)
    out = norm(x)
    assert torch.equal(out, norm.bias.expand(2, 3, 4))
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_a_token_of_zeros_beside_others_is_the_bias():
    norm = PBRelaxNorm(4, eps=1e-5)
    x = torch.tensor([[0.0] * 4, [1.0, 2.0, 3.0, 4.0]])
    assert norm(x)[0].tolist() == [0.0] * 4
    assert norm(x)[1].isfinite().all()


def test_pb_relax_survives_squares_that_overflow_float32():
    x = torch.tensor([1e30, 2e30, 3e30])
    expected = [-math.sqrt(1.5), 0.0, math.sqrt(1.5)]
    assert PBRelaxNorm(3, eps=0.0)(x).tolist() == pytest.approx(expected)
    assert LayerNorm(3, eps=0.0)(x).tolist() != pytest.approx(expected)


# --- in a model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_each_kind_trains_every_norm_parameter(kind):
    config = DecoderConfig("peri", dim=16, n_layers=2, n_heads=2, vocab_size=11, norm=NormConfig(kind=kind))
    model = DecoderLM(config)
    initialize(model, seed=0)
    tokens = torch.randint(11, (2, 8))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    assert math.isfinite(loss.item())
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
