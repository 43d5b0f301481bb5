"""The norms and their named conventions.

Expected values are written by hand or computed here, in float64, from the formulas of the papers; nothing is taken
from the library.
"""

import itertools
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream.norms import LayerNorm, NormConfig, RMSNorm

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
DTYPE_PAIRS = list(itertools.product(FLOATS, FLOATS))
CASTS = ("after_gain", "before_gain", "gain_dtype")
WIDTHS = (1, 3, 31, 96, 127, 1000, 4097, 12288)


def set_gain(norm: Any, values: Tensor | float, dtype: torch.dtype) -> None:
    """Store ``values`` as the gain, in the given dtype (a norm may keep its gain in another dtype than its input)."""
    full = torch.zeros(norm.weight.shape) + values
    norm.weight = nn.Parameter(full.to(dtype))


def rms_by_hand(x: Tensor, gain: Tensor | float, eps: float) -> Tensor:
    """Root-mean-square norm in float64."""
    x = x.double()
    return gain * x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def layer_norm_by_hand(x: Tensor, gain: Tensor | float, bias: Tensor | float, eps: float) -> Tensor:
    """Layer norm in float64, biased variance."""
    centred = x.double() - x.double().mean(-1, keepdim=True)
    return gain * centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps) + bias


# --- start values, config, errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(("gain", "start"), [("plain", 1.0), ("zero_centered", 0.0)])
def test_rms_gain_starts_at_one_effectively(gain, start):
    norm: Any = RMSNorm(5, eps=1e-6, gain=gain)
    assert torch.equal(norm.weight, torch.full((5,), start))
    x = torch.tensor([[1.0, -1.0, 1.0, 1.0, -1.0]], dtype=torch.float64)
    torch.testing.assert_close(norm.double()(x), x / math.sqrt(1 + 1e-6))


def test_layer_norm_start_values():
    norm: Any = LayerNorm(4, eps=1e-5)
    assert torch.equal(norm.weight, torch.ones(4))
    assert torch.equal(norm.bias, torch.zeros(4))
    zero_centred: Any = LayerNorm(4, eps=1e-5, gain="zero_centered")
    assert torch.equal(zero_centred.weight, torch.zeros(4))


def test_layer_norm_without_bias_has_no_bias_parameter():
    norm = LayerNorm(4, eps=1e-5, bias=False)
    assert norm.bias is None
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


@pytest.mark.parametrize("norm_class", [RMSNorm, LayerNorm])
def test_non_parametric_norm_has_no_gain(norm_class):
    norm = norm_class(4, eps=0.0, gain="none", **({"bias": False} if norm_class is LayerNorm else {}))
    assert norm.weight is None
    assert list(norm.parameters()) == []
    out = norm(torch.tensor([3.0, 4.0, -3.0, -4.0], dtype=torch.float64))
    expected = torch.tensor([3.0, 4.0, -3.0, -4.0], dtype=torch.float64) / math.sqrt(12.5)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("config", "norm_class", "parameters"),
    [
        (NormConfig(kind="rms", eps=1e-6), RMSNorm, ["weight"]),
        (NormConfig(kind="layer", eps=1e-6, bias=True), LayerNorm, ["bias", "weight"]),
        (NormConfig(kind="layer", eps=1e-6, bias=False), LayerNorm, ["weight"]),
        (NormConfig(kind="rms", eps=1e-6, gain="none"), RMSNorm, []),
    ],
)
def test_config_builds_the_norm_it_names(config, norm_class, parameters):
    norm = config.build(8)
    assert type(norm) is norm_class
    assert sorted(name for name, _ in norm.named_parameters()) == parameters
    assert norm.eps == 1e-6


def test_config_rejects_a_bias_on_rms():
    with pytest.raises(ValueError, match="bias"):
        NormConfig(kind="rms", bias=True).build(8)


WRONG_VALUES = """
from normstream.norms import LayerNorm, NormConfig, RMSNorm

def message(build):
    try:
        build()
    except ValueError as error:
        return str(error)
    return "no error"

for build in (
    lambda: RMSNorm(2, eps=None),
    lambda: LayerNorm(2, eps=None),
    lambda: NormConfig(eps=None).build(2),
    lambda: NormConfig(kind="nonsense").build(2),
    lambda: NormConfig(gain="nonsense").build(2),
    lambda: NormConfig(cast="nonsense").build(2),
):
    print(message(build).replace("\\n", " "))
"""


def test_wrong_words_and_a_missing_eps_are_value_errors():
    """In a fresh interpreter: the type checks that run in this one would raise before the library does."""
    run = subprocess.run([sys.executable, "-c", WRONG_VALUES], capture_output=True, text=True, check=True)
    messages = run.stdout.splitlines()
    assert [("eps" in message) for message in messages[:3]] == [True] * 3, messages
    assert [("nonsense" in message) for message in messages[3:]] == [True] * 3, messages


@pytest.mark.parametrize("norm_class", [RMSNorm, LayerNorm])
def test_eps_has_no_default(norm_class):
    with pytest.raises(TypeError):
        norm_class(2)


@pytest.mark.parametrize("norm_class", [RMSNorm, LayerNorm])
def test_wrong_width_is_an_error(norm_class):
    with pytest.raises(ValueError, match="8"):
        norm_class(8, eps=1e-5)(torch.zeros(2, 7))
    with pytest.raises(ValueError, match="0"):
        norm_class(0, eps=1e-5)(torch.zeros(5, 0))
    with pytest.raises(ValueError, match="0"):
        norm_class(8, eps=1e-5)(torch.zeros(5, 0))


# --- field reports: zero-centred gain, dtypes and cast order, eps, empty input, cancellation ------------------------


def test_zero_centred_gain_is_added_in_float32():
    """vllm-project/vllm#29810: 1 + 15.8125 is 16.8125, which bfloat16 arithmetic rounds to 16.75."""
    norm = RMSNorm(8, eps=1e-6, gain="zero_centered")
    set_gain(norm, 15.8125, torch.bfloat16)
    x = torch.tensor([1.5, 1.5, 0.5, 0.5, 1, 1, 1, 0], dtype=torch.bfloat16)
    assert norm(x)[0].item() == 25.25


def test_zero_centred_value():
    norm = RMSNorm(2, eps=0.0, gain="zero_centered").double()
    set_gain(norm, 0.25, torch.float64)
    out = norm(torch.tensor([3.0, 4.0], dtype=torch.float64))
    torch.testing.assert_close(out, torch.tensor([1.0606602, 1.4142136], dtype=torch.float64), rtol=0, atol=1e-7)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("norm_class", [RMSNorm, LayerNorm])
@pytest.mark.parametrize(("input_dtype", "gain_dtype"), DTYPE_PAIRS)
def test_output_and_input_gradient_keep_the_input_dtype(norm_class, cast, input_dtype, gain_dtype):
    norm = norm_class(16, eps=1e-6, cast=cast).to(gain_dtype)
    x = torch.randn(3, 16).to(input_dtype).requires_grad_()
    out = norm(x)
    assert out.dtype == input_dtype
    dx, dgain = torch.autograd.grad(out, [x, norm.weight], torch.ones_like(out))
    assert (dx.dtype, dgain.dtype) == (input_dtype, gain_dtype)


@pytest.mark.parametrize("norm_class", [RMSNorm, LayerNorm])
def test_autocast_does_not_change_the_dtype(norm_class):
    norm = norm_class(16, eps=1e-6)
    for dtype in (torch.bfloat16, torch.float32):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert norm(torch.randn(3, 16, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("cast", "expected"), [("before_gain", [2.546875, 3.40625]), ("after_gain", [2.546875, 3.390625])]
)
def test_the_two_cast_orders_give_their_own_values(cast, expected):
    """huggingface/transformers#30236: both orders are called RMSNorm and differ in the last bit."""
    norm = RMSNorm(2, eps=1e-6, cast=cast)
    set_gain(norm, 3.0, torch.bfloat16)
    out = norm(torch.tensor([3.0, 4.0], dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert out.tolist() == expected


def bf16_example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 1024, generator=generator).bfloat16()
    gain = (1 + 0.2 * torch.randn(1024, generator=generator)).bfloat16()
    return x, gain


def rms_policy_by_hand(x: Tensor, gain: Tensor, cast: str, eps: float) -> Tensor:
    """The cast orders as the model families write them: Llama, OLMo and T5."""
    unit = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    if cast == "after_gain":
        return (gain.float() * unit).to(x.dtype)
    if cast == "before_gain":
        return (gain * unit.to(x.dtype)).to(x.dtype)
    if gain.dtype in (torch.float16, torch.bfloat16):
        unit = unit.to(gain.dtype)
    return (gain * unit).to(x.dtype)


@pytest.mark.parametrize(("input_dtype", "gain_dtype"), DTYPE_PAIRS)
@pytest.mark.parametrize("cast", CASTS)
def test_each_cast_order_is_exact(cast, input_dtype, gain_dtype):
    x, gain = bf16_example()
    x, gain = x.to(input_dtype), gain.to(gain_dtype)
    norm = RMSNorm(1024, eps=1e-6, cast=cast)
    set_gain(norm, gain.float(), gain_dtype)
    out, expected = norm(x), rms_policy_by_hand(x, gain, cast, 1e-6)
    # The root may be taken in another order of operations: a last-bit change before rounding flips few elements.
    different = (out != expected).float().mean().item()
    assert different < (1e-3 if input_dtype != torch.float32 or gain_dtype != torch.float32 else 0.7)
    torch.testing.assert_close(out.float(), expected.float(), rtol=2 * torch.finfo(input_dtype).eps, atol=1e-6)


def test_the_cast_orders_differ_in_a_quarter_of_the_elements():
    x, gain = bf16_example()
    exact = rms_by_hand(x, gain.double(), 1e-6)
    outputs = {}
    for cast in ("before_gain", "after_gain"):
        norm = RMSNorm(1024, eps=1e-6, cast=cast)
        set_gain(norm, gain.float(), torch.bfloat16)
        outputs[cast] = norm(x).double()
    before, after = outputs["before_gain"], outputs["after_gain"]
    assert 0.2 < (before != after).double().mean().item() < 0.3
    error = {cast: ((out - exact).norm() / exact.norm()).item() for cast, out in outputs.items()}
    assert error["before_gain"] == pytest.approx(2.35e-3, rel=0.02)
    assert error["after_gain"] == pytest.approx(1.66e-3, rel=0.02)


def test_t5_order_multiplies_in_the_dtype_of_the_gain():
    x, gain = bf16_example()
    half_gain, full_gain = RMSNorm(1024, eps=1e-6, cast="gain_dtype"), RMSNorm(1024, eps=1e-6, cast="gain_dtype")
    set_gain(half_gain, gain.float(), torch.bfloat16)
    set_gain(full_gain, gain.float(), torch.float32)
    unit = rms_by_hand(x, 1.0, 1e-6)
    # Rounding float64 and float32 values to bfloat16 differs only next to a tie.
    assert (half_gain(x) != unit.bfloat16() * gain).double().mean().item() < 1e-3
    assert (full_gain(x) != (unit * gain.double()).bfloat16()).double().mean().item() < 1e-3


@pytest.mark.parametrize(("eps", "expected"), [(1e-6, 0.7071068), (1e-5, 0.3015113)])
def test_eps_sits_inside_the_root(eps, expected):
    """apache/tvm#15856."""
    norm = RMSNorm(6, eps=eps).double()
    out = norm(torch.full((6,), 1e-3, dtype=torch.float64))
    torch.testing.assert_close(out, torch.full_like(out, expected), rtol=0, atol=1e-7)


def test_layer_norm_eps_sits_inside_the_root():
    """A row of +-1e-3 has variance 1e-6: the values of the root-mean-square case."""
    out = LayerNorm(2, eps=1e-6).double()(torch.tensor([1e-3, -1e-3], dtype=torch.float64) + 7)
    expected = torch.tensor([0.7071068, -0.7071068], dtype=torch.float64)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("norm_class", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_zero_rows_stay_connected_to_autograd(norm_class, shape):
    """pytorch/pytorch#80893."""
    norm = norm_class(64, eps=1e-5)
    x = torch.zeros(shape, requires_grad=True)
    out = norm(x)
    assert out.shape == shape
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    assert torch.equal(norm.weight.grad, torch.zeros(64))


def test_variance_does_not_cancel():
    """tracel-ai/burn#5607: a large mean and a small spread."""
    row = 4096 + torch.arange(16, dtype=torch.float32) * 2.0**-8
    out = LayerNorm(16, eps=1e-5)(row)
    assert out[0].item() == pytest.approx(-1.6024558, abs=1e-4)
    assert out[-1].item() == pytest.approx(1.6024558, abs=1e-4)


def test_transposed_input_value():
    """ModelTC/LightLLM#1467: arange(12) as 3 x 4, transposed."""
    out = RMSNorm(3, eps=0.0)(torch.arange(12, dtype=torch.float32).reshape(3, 4).t())
    torch.testing.assert_close(out[0], torch.tensor([0.0, 0.7745967, 1.5491933]), rtol=0, atol=1e-6)


# --- layouts, widths, dtypes ----------------------------------------------------------------------------------------


def random_values(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values away from zero, so that a row of width 1 is well conditioned."""
    magnitude = 0.5 + torch.rand(shape, generator=generator)
    return magnitude * torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)


def layouts(width: int, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Six rows of the given width in every memory layout; all have the shape (2, 3, width)."""

    def values(*shape: int) -> Tensor:
        return random_values(shape, generator).to(dtype)

    return {
        "contiguous": values(2, 3, width),
        "transposed": values(2, width, 3).transpose(1, 2),
        "every second": values(2, 3, 2 * width)[..., ::2],
        "expanded": values(1, 3, width).expand(2, 3, width),
        "permuted": values(3, 2, width).transpose(0, 1),
    }


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_layouts_widths_and_dtypes(kind, width, dtype):
    eps, generator = 1e-5, torch.Generator().manual_seed(width)
    norm: Any = NormConfig(kind=kind, eps=eps, bias=kind == "layer").build(width).to(dtype)
    gain, bias = (random_values((width,), generator).to(dtype) for _ in range(2))
    norm.weight.data.copy_(gain)
    if kind == "layer":
        norm.bias.data.copy_(bias)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-5, torch.float64: 1e-11}[dtype]
    # One centred entry is 0: its exact gradient 0 is a difference of numbers of the size 1 / sqrt(eps).
    scale = 1 / math.sqrt(eps) if (kind, width) == ("layer", 1) else 1.0
    names = list(layouts(1, dtype, generator))
    pairs = [(name, name) for name in names] + [("contiguous", name) for name in names[1:]] + [("permuted", "expanded")]
    for x_layout, dy_layout in pairs:
        x = layouts(width, dtype, generator)[x_layout]
        dy = layouts(width, dtype, generator)[dy_layout]
        x_before, dy_before = x.clone(), dy.clone()

        leaf = x.detach().requires_grad_()
        out = norm(leaf)
        out_before = out.detach().clone()
        got = torch.autograd.grad(out, [leaf, *norm.parameters()], dy)

        exact = [t.detach().double().requires_grad_() for t in (x, gain, bias)]
        by_hand = rms_by_hand(*exact[:2], eps=eps) if kind == "rms" else layer_norm_by_hand(*exact, eps=eps)
        wanted = torch.autograd.grad(by_hand, exact[: len(got)], dy.double())

        where = f"x {x_layout}, dy {dy_layout}"
        for label, ours, reference in zip(
            ("forward", "dx", "dgain", "dbias"), (out, *got), (by_hand, *wanted), strict=False
        ):
            assert ours.dtype == dtype
            assert ours.shape == reference.shape
            error = (ours.double() - reference).abs().max().item()
            assert error <= tolerance * max(scale, reference.abs().max().item()), f"{label}: {error} ({where})"
        assert torch.equal(x, x_before), f"input changed ({where})"
        assert torch.equal(dy, dy_before), f"incoming gradient changed ({where})"
        assert torch.equal(out.detach(), out_before), f"output changed by backward ({where})"


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_expanded_scalar_gradient(kind):
    """y.sum().backward() sends a gradient whose strides are all zero."""
    generator = torch.Generator().manual_seed(0)
    x = random_values((4, 31), generator).double().requires_grad_()
    norm = NormConfig(kind=kind, eps=1e-5, bias=kind == "layer").build(31).double()
    norm(x).sum().backward()
    exact = x.detach().clone().requires_grad_()
    (rms_by_hand(exact, 1.0, 1e-5) if kind == "rms" else layer_norm_by_hand(exact, 1.0, 0.0, 1e-5)).sum().backward()
    torch.testing.assert_close(x.grad, exact.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_gradient_shared_with_a_skip_path_is_not_overwritten(kind, dtype):
    """linkedin/Liger-Kernel#370: y = x + N(N(x)) with incoming gradient [1, 0]."""
    norm = NormConfig(kind=kind, eps=0.0, bias=kind == "layer").build(2)
    x = torch.tensor([3.0, 4.0], dtype=dtype, requires_grad=True)
    dy = torch.tensor([1.0, 0.0], dtype=dtype)
    (x + norm(norm(x))).backward(dy)
    assert x.tolist() == [3.0, 4.0]
    assert dy.tolist() == [1.0, 0.0]
    expected = [1.1810193, -0.1357645] if kind == "rms" else [1.0, 0.0]  # two centred entries are always +-1
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert x.grad is not None
    torch.testing.assert_close(x.grad.float(), torch.tensor(expected), rtol=0, atol=tolerance)


# --- derivatives ----------------------------------------------------------------------------------------------------

CONVENTIONS = [
    NormConfig(kind=kind, eps=1e-3, gain=gain, cast=cast, bias=bias)
    for kind, gain, cast, bias in itertools.product(
        ("rms", "layer"), ("plain", "zero_centered", "none"), CASTS, (False, True)
    )
    if not (bias and kind == "rms") and not (bias and gain == "none")
]


@pytest.mark.parametrize("config", CONVENTIONS, ids=lambda c: f"{c.kind}-{c.gain}-{c.cast}-bias={c.bias}")
def test_gradcheck_of_every_convention(config):
    generator = torch.Generator().manual_seed(0)
    norm = config.build(5).double()
    for parameter in norm.parameters():
        parameter.data.copy_(torch.randn(5, generator=generator, dtype=torch.float64))
    names = [name for name, _ in norm.named_parameters()]
    x = torch.randn(2, 5, generator=generator, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(norm, dict(zip(names, values, strict=True)), (x,))

    leaves = [p.detach().clone().requires_grad_() for p in norm.parameters()]
    assert torch.autograd.gradcheck(function, (x, *leaves))


@pytest.mark.parametrize("config", CONVENTIONS, ids=lambda c: f"{c.kind}-{c.gain}-{c.cast}-bias={c.bias}")
def test_every_convention_is_the_same_function_in_float64(config):
    generator = torch.Generator().manual_seed(1)
    norm: Any = config.build(7).double()
    x, weight, bias = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in [(4, 7), (7,), (7,)])
    gain = {"plain": weight, "zero_centered": 1 + weight, "none": 1.0}[config.gain]
    if norm.weight is not None:
        norm.weight.data.copy_(weight)
    if config.bias:
        norm.bias.data.copy_(bias)
    if config.kind == "rms":
        expected = rms_by_hand(x, gain, config.eps)
    else:
        expected = layer_norm_by_hand(x, gain, bias if config.bias else 0.0, config.eps)
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_spectral_norm_of_the_jacobian(kind, scale):
    """At eps 0 and unit gain it is sqrt(d) / |x - mean(x)| for layer norm and sqrt(d) / |x| for RMSNorm, exactly."""
    dim = 32
    x = scale * torch.randn(dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    norm = NormConfig(kind=kind, eps=0.0, bias=kind == "layer").build(dim).double()
    jacobian = torch.autograd.functional.jacobian(norm, x)
    singular = torch.linalg.svdvals(jacobian)
    centre = x - x.mean() if kind == "layer" else x
    assert singular[0].item() * centre.norm().item() / math.sqrt(dim) == pytest.approx(1.0, abs=1e-10)
    rank = dim - 2 if kind == "layer" else dim - 1
    assert int((singular > 1e-10).sum()) == rank


@pytest.mark.parametrize("rms", [1.0, 0.1, 0.01, 1e-3])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_eps_shrinks_small_inputs_by_the_closed_form(kind, rms):
    """1 / sqrt(1 + eps / rms^2): 5e-6, 5e-4, 4.7 % and 70 % below the eps-free answer with eps 1e-5."""
    unit = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    out = NormConfig(kind=kind, eps=1e-5, bias=kind == "layer").build(4).double()(rms * unit)
    torch.testing.assert_close(out, unit / math.sqrt(1 + 1e-5 / rms**2), rtol=0, atol=1e-12)
