"""The Triton junction against its equations, written out in float64.

``test_triton.py`` runs this file in a process of its own, on the CPU with TRITON_INTERPRET=1, else on a GPU.
"""

import copy
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from normstream import placements
from normstream.ops import RebuiltZ, calls
from normstream.ops.form import DTYPES, Constants, Form, NormForm
from normstream.ops.triton_junction import junction, junction_backward
from normstream.ops.triton_norm import INTERPRETED

if not INTERPRETED.value and not torch.cuda.is_available():
    pytest.skip("there is no GPU, and TRITON_INTERPRET is not set", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED.value else "cuda"
RMS, LAYER = NormForm(1), NormForm(2)
CENTERED_RMS, CENTERED_LAYER = NormForm(1, True), NormForm(2, True)
EPS = {"eps_out": 0.1, "eps_x": 0.2, "eps_y": 0.3, "eps_in": 0.4}  # large and different, so that a wrong one shows
FORWARD = {torch.float32: 2e-6, torch.bfloat16: 2.5e-3, torch.float16: 3.2e-4}
BACKWARD = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.3e-3}


class Case(NamedTuple):
    """One kind of junction. Parameters: g gain and b bias of a slot, c the coefficient; by default all that fit."""

    form: Form
    constants: Constants = Constants(**EPS)
    scale: float = 1.0
    read_scale: float = 1.0
    gains: bool = True
    biases: bool = True
    coefficient: bool = False


def one(**options: Any) -> Form:
    return Form(1, **options)


def two(**options: Any) -> Form:
    return Form(2, **options)


CASES = {
    "pre": Case(one(norm_in=RMS)),
    "pre, layer": Case(one(norm_in=LAYER)),
    "pre, layer without bias": Case(one(norm_in=LAYER), biases=False),
    "pre, no gain": Case(one(norm_in=LAYER), gains=False, biases=False),
    "pre, zero-centred": Case(one(norm_in=CENTERED_RMS)),
    "pre, first": Case(one(norm_in=RMS, has_state=False)),
    "layernorm scaling": Case(one(norm_in=RMS), read_scale=0.5),
    "no norm at all": Case(one(), read_scale=0.5),
    "post": Case(one(norm_x=LAYER, has_z=False)),
    "post, first": Case(one(norm_x=LAYER, has_z=False, has_state=False)),
    "deepnorm": Case(one(norm_x=RMS, has_z=False), Constants(alpha=2.3, **EPS)),
    "keel": Case(one(norm_x=RMS, norm_in=RMS), Constants(alpha=2.3, **EPS)),
    "peri": Case(one(norm_out=RMS, norm_in=RMS)),
    "peri, layer": Case(one(norm_out=LAYER, norm_in=CENTERED_LAYER)),
    "olmo2": Case(one(norm_out=RMS, has_z=False)),
    "swin_v2": Case(one(norm_out=LAYER, norm_x=LAYER, has_z=False)),
    "residual": Case(two(norm_x=LAYER, has_z=False), Constants(second=0.7, **EPS)),
    "residual, read": Case(two(norm_x=RMS, norm_in=RMS), Constants(second=0.7, **EPS)),
    "siamese": Case(two(norm_x=RMS, norm_y=RMS, norm_in=RMS), scale=0.6),
    "siamese, layer": Case(two(norm_x=LAYER, norm_y=LAYER, norm_in=LAYER), scale=0.6),
    "siamese, first": Case(two(norm_x=RMS, norm_y=RMS, norm_in=RMS, has_state=False)),
    "siamese, paper's read": Case(two(norm_x=RMS, norm_y=RMS), scale=0.6),
    "siamese, no gain": Case(two(norm_x=RMS, norm_y=RMS, norm_in=RMS), gains=False),
    "hybrid-pre, attention": Case(two(norm_y=RMS), scale=0.6, coefficient=True),
    "hybrid-pre, ffn": Case(two(norm_x=RMS, norm_y=RMS, norm_in=RMS), scale=0.6, coefficient=True),
    "everything": Case(
        two(norm_out=CENTERED_LAYER, norm_x=CENTERED_RMS, norm_y=CENTERED_LAYER, norm_in=LAYER),
        *(Constants(alpha=1.4, second=0.7, **EPS), 0.6, 0.8),
        coefficient=True,
    ),
}


def through(values: Tensor, code: int) -> Tensor:
    """Rounded to the dtype, with the gradient of no rounding."""
    return values + (values.to(DTYPES[code]).double() - values).detach() if code else values


def normed(h: Tensor, norm: NormForm, gain: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if norm.kind == 0:
        return h
    if norm.kind == 2:
        h = h - h.mean(-1, keepdim=True)
    n = through(h / (h.square().mean(-1, keepdim=True) + eps).sqrt(), norm.round_normalized)
    g = 1.0 if gain is None else 1 + gain if norm.zero_centered else gain
    return through(n * g, norm.round_product) + (0.0 if bias is None else bias)


def equations(case: Case, o: Tensor, x: Tensor | None, y: Tensor | None, p: list[Tensor | None]) -> list[Tensor]:
    """x', y' and z, as far as the form has them, in float64."""
    form, k = case.form, case.constants
    u = normed(o, form.norm_out, p[0], p[1], k.eps_out)
    h = (case.scale * u if form.n_streams == 2 else u) + (0.0 if x is None else k.alpha * x)
    x_new = normed(h, form.norm_x, p[2], p[3], k.eps_x)
    y_new = k.second * u + (0.0 if y is None else y)
    w = x_new
    if form.norm_y.kind:
        w = (1.0 if p[8] is None else p[8]) * x_new + normed(y_new, form.norm_y, p[4], p[5], k.eps_y)
    z = case.read_scale * normed(w, form.norm_in, p[6], p[7], k.eps_in)
    return [x_new, *([y_new] if form.n_streams == 2 else []), *([z] if form.has_z else [])]


class Inputs(NamedTuple):
    update: Tensor
    x: Tensor | None
    y: Tensor | None
    parameters: list[Tensor | None]


def inputs(case: Case, rows: int, dim: int, dtype: torch.dtype, gain_dtype: torch.dtype = torch.float32) -> Inputs:
    """Random numbers, with every parameter that the case has."""
    form = case.form
    stream = DTYPES[form.stream_dtype]
    parameters: list[Tensor | None] = []
    for norm in form.norms:
        there = (norm.kind > 0 and case.gains, norm.kind == 2 and case.biases)
        parameters += [torch.randn(dim).to(gain_dtype).to(DEVICE) if is_there else None for is_there in there]
    parameters.append(torch.randn(dim, device=DEVICE) if case.coefficient else None)
    update, x, y = (torch.randn(rows, dim).to(t).to(DEVICE) for t in (dtype, stream, stream))
    has_y = form.has_state and form.n_streams == 2
    return Inputs(update, x if form.has_state else None, y if has_y else None, parameters)


def scales(case: Case) -> tuple[Tensor, Tensor]:
    return torch.tensor(case.scale, dtype=torch.float64), torch.tensor(case.read_scale, dtype=torch.float64)


def forward(case: Case, given: Inputs) -> list[Tensor]:
    return list(junction(*given, *scales(case), list(case.constants), case.form.encode()))


def backward(case: Case, given: Inputs, outputs: list[Tensor], incoming: list[Tensor | None]) -> list[Tensor]:
    """From dx', dy', dz, as far as the form has them: gradients of update, x, y and each parameter, as there are."""
    form, (x_out, y_out, _, raw_x, stats) = case.form, outputs
    dx, dy, dz = placed(form, incoming)
    code = DTYPES.index(given.update.dtype)
    d_update, d_x, d_y, d_parameters = junction_backward(
        *(dz, dx, dy, given.update if form.norm_out.kind else None, raw_x if form.norm_x.kind else x_out),
        *(y_out if form.norm_y.kind else None, stats, given.parameters, *scales(case)),
        *(list(case.constants), form.encode(), code),
    )
    if form.shares_gradient(case.constants.alpha, code):
        assert d_update.shape == (0,)
        d_update = d_x
    assert d_update.dtype == given.update.dtype
    assert (d_x.shape == given.update.shape) == form.has_state
    return [d_update, *(d for d in (d_x, d_y) if d.ndim == 2), *d_parameters]


def placed(form: Form, tensors: list[Any]) -> tuple[Any, Any, Any]:
    """(x', y', z) from the list of those that the form has."""
    x_out, *rest = tensors
    y_out = rest.pop(0) if form.n_streams == 2 else None
    return x_out, y_out, rest.pop() if form.has_z else None


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest relative error of a row; a row below 0.3, a difference of larger numbers, counts as one of 0.3."""
    least = 0.3 * expected.shape[-1] ** 0.5
    error = (actual.double() - expected.detach()).norm(dim=-1) / expected.detach().norm(dim=-1).clamp(min=least)
    return float(error.max()) if error.numel() else 0.0


def compare(case: Case, given: Inputs, tolerances: tuple[float, float, float], none: tuple[int, ...] = ()) -> None:
    """Outputs and gradients against the equations; no gradient arrives for the outputs whose place is in ``none``."""
    form = case.form
    high: Any = [t.double().requires_grad_() if t is not None else None for t in (*given[:3], *given.parameters)]
    expected = equations(case, high[0], high[1], high[2], high[3:])
    before = [t.clone() for t in (*given[:3], *given.parameters) if t is not None]
    outputs = forward(case, given)

    x_out, y_out, z, raw_x, stats = outputs
    actual = [x_out, *([y_out] if form.n_streams == 2 else []), *([z] if form.has_z else [])]
    assert [t.shape == (0,) for t in (y_out, z, raw_x)] == [form.n_streams == 1, not form.has_z, not form.norm_x.kind]
    assert stats.shape == (len(x_out), form.n_statistics)
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape
        assert error(got, want) <= tolerances[0 if got.dtype == torch.float32 else 1]

    incoming = [None if k in none else torch.randn(t.shape).to(t.dtype).to(DEVICE) for k, t in enumerate(actual)]
    copies = [t.clone() for t in incoming if t is not None]
    gradients = backward(case, given, outputs, incoming)
    total = sum((t * d.double()).sum() for t, d in zip(expected, incoming, strict=True) if d is not None)
    leaves = [t for t in high if t is not None]
    wanted = torch.autograd.grad(total, leaves, allow_unused=True) if torch.is_tensor(total) else [None] * len(leaves)
    for got, want, leaf in zip(gradients, wanted, leaves, strict=True):
        assert got.shape == leaf.shape
        assert error(got, torch.zeros_like(leaf) if want is None else want) <= tolerances[2]

    kept = [t for t in (*given[:3], *given.parameters) if t is not None]
    assert all(map(torch.equal, before + copies, kept + [t for t in incoming if t is not None]))


EXACT = (FORWARD[torch.float32], FORWARD[torch.bfloat16], BACKWARD[torch.float32])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 5])
def test_every_placement(name: str, rows: int) -> None:
    compare(CASES[name], inputs(CASES[name], rows, 31, torch.float32), EXACT)


@pytest.mark.parametrize("dim", [1, 3, 64, 127, 1000])
@pytest.mark.parametrize("name", ["pre", "siamese", "everything"])
def test_every_width(name: str, dim: int) -> None:
    compare(CASES[name], inputs(CASES[name], 5, dim, torch.float32), EXACT)


@pytest.mark.parametrize(("rows", "dim"), [(5, 4097), (70, 64), (10, 1000)])
def test_many_rows(rows: int, dim: int) -> None:
    """More rows than programs hold at once: each takes several."""
    compare(CASES["siamese, layer"], inputs(CASES["siamese, layer"], rows, dim, torch.float32), EXACT)


@pytest.mark.parametrize("name", CASES)
def test_no_rows(name: str) -> None:
    case = CASES[name]
    given = inputs(case, 0, 31, torch.float32)
    compare(case, given, EXACT)
    outputs = forward(case, given)
    incoming: list[Tensor | None] = [torch.empty(0, 31, device=DEVICE)] * (case.form.n_streams + case.form.has_z)
    gradients = backward(case, given, outputs, incoming)
    n = sum(p is not None for p in given.parameters)
    assert all(torch.equal(d, torch.zeros(31, device=DEVICE)) for d in gradients[len(gradients) - n :])


def test_too_wide() -> None:
    case = CASES["pre"]
    with pytest.raises(ValueError, match="at most 16384 columns, got 16385; take plain"):
        forward(case, inputs(case, 1, 16_385, torch.float32))


@pytest.mark.parametrize("name", ["pre", "peri", "siamese", "everything"])
@pytest.mark.parametrize(
    ("update", "stream", "z"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float16, torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16, torch.float16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_every_dtype(name: str, update: torch.dtype, stream: torch.dtype, z: torch.dtype) -> None:
    codes = {"stream_dtype": DTYPES.index(stream), "z_dtype": DTYPES.index(z)}
    case = CASES[name]._replace(form=CASES[name].form._replace(**codes))
    given = inputs(case, 5, 127, update, gain_dtype=z)
    coarsest = max((update, stream, z), key=lambda dtype: torch.finfo(dtype).eps)
    compare(case, given, (FORWARD[torch.float32], FORWARD[coarsest], BACKWARD[coarsest]))


@pytest.mark.parametrize("rounds", [(1, 0), (1, 1), (2, 2)])
@pytest.mark.parametrize("name", ["pre, layer", "siamese", "everything"])
def test_cast_conventions(name: str, rounds: tuple[int, int]) -> None:
    """Roundings before and after the gain. Without them, or with others, the error were several times the tolerance."""
    form = CASES[name].form
    norms = {f"norm_{s}": n._replace(round_normalized=rounds[0], round_product=rounds[1]) for s, n in slots(form)}
    case = CASES[name]._replace(form=form._replace(**norms))
    given = inputs(case, 5, 127, torch.float32)
    tolerance = 6e-4 if rounds[0] == 1 else 1e-4
    compare(case, given, (tolerance, tolerance, tolerance))
    plain = forward(CASES[name], given)[2]
    assert error(plain, forward(case, given)[2].double()) > 2 * tolerance


def slots(form: Form) -> Iterator[tuple[str, NormForm]]:
    return ((slot, norm) for slot, norm in zip(("out", "x", "y", "in"), form.norms, strict=True) if norm.kind)


@pytest.mark.parametrize("name", ["pre", "peri", "siamese", "hybrid-pre, attention", "everything", "post", "residual"])
def test_gradients_that_do_not_arrive(name: str) -> None:
    case = CASES[name]
    n = case.form.n_streams + case.form.has_z
    for count in range(1, n + 1):
        for none in itertools.combinations(range(n), count):
            compare(case, inputs(case, 3, 31, torch.float32), EXACT, none)


@pytest.mark.parametrize("name", ["pre", "keel", "peri", "siamese, layer", "everything"])
def test_zero_gains(name: str) -> None:
    """Nothing is divided by a gain: with all of them 0 every gradient is finite and right."""
    given = inputs(CASES[name], 5, 31, torch.float32)
    for parameter in given.parameters:
        if parameter is not None:
            parameter.zero_()
    compare(CASES[name], given, EXACT)


def test_two_runs_give_the_same_bits() -> None:
    case = CASES["everything"]
    given = inputs(case, 70, 64, torch.float32)
    incoming = [torch.randn(70, 64, device=DEVICE) for _ in range(3)]
    runs = [backward(case, given, forward(case, given), list(incoming)) for _ in range(2)]
    assert all(map(torch.equal, *runs))


def test_stored_bfloat16_is_rounded_to_nearest_even() -> None:
    special = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, -0.0, 3.4e38, float("inf"), -float("inf"), float("nan")]
    update = torch.cat([torch.tensor(special), torch.randn(91)]).view(1, 100).to(DEVICE)
    case = Case(one(has_state=False, has_z=False, stream_dtype=1))
    x_out = forward(case, Inputs(update, None, None, [None] * 9))[0]
    assert torch.equal(x_out.isnan(), update.isnan())
    assert torch.equal(x_out.nan_to_num(), update.bfloat16().nan_to_num())


def pre_norm(gain: list[float], *, norm: NormForm = RMS, eps: float = 0.0, dtype: torch.dtype = torch.float32) -> Any:
    """A Pre-Norm junction and its parameters."""
    codes = DTYPES.index(dtype), DTYPES.index(dtype)
    case = Case(one(norm_in=norm, stream_dtype=codes[0], z_dtype=codes[1]), Constants(eps_in=eps))
    return case, [None] * 6 + [torch.tensor(gain, dtype=dtype, device=DEVICE), None, None]


@pytest.mark.parametrize(
    ("gain", "expected"), [([1.0, 1.0], [0.1810193, 0.8642355]), ([0.0, 1.0], [0.0, 1.0])], ids=["ones", "a zero"]
)
def test_gradients_of_sum_and_norm_are_added_after_the_norms_derivative(
    gain: list[float], expected: list[float]
) -> None:
    case, parameters = pre_norm(gain)
    x, r, dz, dx = (torch.tensor([row], device=DEVICE) for row in ([1.0, 2.0], [2.0, 2.0], [1.0, 0.0], [0.0, 1.0]))
    given = Inputs(r, x, None, parameters)
    d_update, d_x, d_gain = backward(case, given, forward(case, given), [dx, dz])
    wanted = torch.tensor([expected], device=DEVICE)
    torch.testing.assert_close(d_update, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(d_x, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(d_gain, torch.tensor([0.8485281, 0.0], device=DEVICE), rtol=0, atol=1e-6)


def test_variance_does_not_cancel() -> None:
    case, parameters = pre_norm([1.0] * 16, norm=LAYER, eps=1e-5)
    row = 4096 + torch.arange(16.0, device=DEVICE)[None] * 2**-8
    z = forward(case, Inputs(row, torch.zeros_like(row), None, parameters))[2]
    assert z[0, 0].item() == pytest.approx(-1.6024558, abs=1e-4)
    assert z[0, -1].item() == pytest.approx(1.6024558, abs=1e-4)


def test_one_is_added_to_a_gain_in_float32() -> None:
    case, parameters = pre_norm([15.8125] * 8, norm=CENTERED_RMS, eps=1e-6, dtype=torch.bfloat16)
    row = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.0, 1.0, 1.0, 0.0]], dtype=torch.bfloat16, device=DEVICE)
    z = forward(case, Inputs(row, torch.zeros_like(row), None, parameters))[2]
    assert z[0, 0].item() == 25.25


def test_small_bfloat16_updates_reach_a_float32_stream() -> None:
    case = Case(one(has_z=False))
    x, update = torch.tensor([[256.0]], device=DEVICE), torch.tensor([[0.5]], dtype=torch.bfloat16, device=DEVICE)
    for _ in range(100):
        x = forward(case, Inputs(update, x, None, [None] * 9))[0]
        assert x.dtype == torch.float32
    assert x.item() == 306.0


@pytest.mark.skipif(not INTERPRETED.value, reason="kernels are counted where the interpreter starts them")
def test_one_kernel_forward_and_two_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    started: list[str] = []
    start = GridExecutor.__call__

    def counted(self: GridExecutor, *arguments: Any, **options: Any) -> None:
        started.append(self.fn.__name__)
        start(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    for case in CASES.values():
        given = inputs(case, 5, 31, torch.float32)
        incoming: list[Tensor | None] = [torch.ones(5, 31)] * (case.form.n_streams + case.form.has_z)
        backward(case, given, forward(case, given), incoming)
        adds_up = any(p is not None for p in given.parameters)
        assert started == ["forward", "backward", "add_up"][: 2 + adds_up]
        started.clear()


@pytest.mark.parametrize("placement", ["pre", "keel", "siamese", "siamese_hybrid_pre"])
def test_a_junction_whose_z_is_made_again(placement: str) -> None:
    """Through the registered operation, autograd and RebuiltZ, against the junction's own code."""
    torch.manual_seed(0)
    plain = placements.get(placement).junctions(24, 2)[2].to(DEVICE)
    fused = copy.deepcopy(plain)
    plain.backend, fused.backend = "plain", "triton"
    matrix = torch.randn(24, 24, device=DEVICE)
    state = tuple(torch.randn(5, 24, device=DEVICE) for _ in placements.get(placement).streams)
    gradients = []
    calls.clear()
    for of in (plain, fused):
        update = torch.ones(5, 24, device=DEVICE).cumsum(1).requires_grad_()
        streams, z = of(state, update)
        with RebuiltZ(z):
            y = z @ matrix.requires_grad_()
        loss = y.square().sum() + sum(s.square().sum() for s in streams)
        gradients.append(torch.autograd.grad(loss, [update, matrix, *of.parameters()]))
    assert calls == {"triton junction": 1, "triton junction_z": 1, "triton junction_backward": 1}
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-4)
