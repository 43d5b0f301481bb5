"""Faults that users of other fused norms reported, checked on the fused junction with the numbers of the reports."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from row_program import Case, case_of, derive, errors, incoming_of, plain_of
from torch import Tensor, nn

from normstream.junctions import (
    DeepNormJoin,
    Drop,
    Junction,
    OutputNormJoin,
    PostNormJoin,
    PostNormRead,
    PreNormJoin,
    PreNormRead,
    ResiDualJoin,
    ResiDualRead,
    SiameseJoin,
    SiameseRead,
    State,
    set_backend,
)
from normstream.norms import LayerNorm, RMSNorm
from normstream.ops import calls

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
KINDS = [
    ("pre", 1),
    ("post", 1),
    ("peri", 0),
    ("peri", 1),
    ("keel(alpha=3,first_block=none)", 1),
    ("residual(scale=0.3)", 1),
    ("siamese", 0),
    ("siamese", 2),
    ("siamese_hybrid_pre", 2),
]
ids = "{0[0]}[{0[1]}]".format


def rms(dim: int = 2, eps: float = 0.0, gain: list[float] | None = None) -> RMSNorm:
    norm = RMSNorm(dim, eps=eps)
    if gain is not None:
        norm.weight = nn.Parameter(torch.tensor(gain))
    return norm


def pre_norm(norm: nn.Module) -> Junction:
    return Junction(PreNormJoin(Drop()), PreNormRead(norm))


def fused_calls(run: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    before = calls.copy()
    result = run()
    return result, dict(calls - before)


# --- linkedin/Liger-Kernel#370: the incoming gradient was overwritten ------------------------------------------------


def test_a_norm_on_either_side_and_the_skip_path() -> None:
    """y = x + rms(rms(x)), the skip path and the branch sharing one incoming gradient."""
    x, d = torch.tensor([[3.0, 4.0]], requires_grad=True), torch.tensor([[1.0, 0.0]])
    (state, o) = pre_norm(rms())((x,), torch.zeros(1, 2))
    (y,), _ = Junction(OutputNormJoin(rms(), Drop()), PostNormRead())(state, o)
    (dx,) = torch.autograd.grad(y, x, d)
    torch.testing.assert_close(dx, torch.tensor([[1.1810193, -0.1357645]]), rtol=0, atol=1e-6)
    assert d.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_inputs_and_incoming_gradients_stay_as_they_are(kind: tuple[str, int], dtype: torch.dtype) -> None:
    case = case_of(*kind, (70, 33), dtype, dtype, dtype)
    incoming = incoming_of(case)
    read_only = [case.update, *case.state, *(p.detach() for p in case.junction.parameters()), *incoming]
    before = [t.clone() for t in read_only]
    outputs, gradients = derive(case, incoming)
    assert all(map(torch.equal, read_only, before))
    taken = {t.untyped_storage().data_ptr() for t in read_only}
    assert not taken & {t.untyped_storage().data_ptr() for t in (*outputs, *gradients)}
    assert len({t.untyped_storage().data_ptr() for t in outputs}) == len(outputs)


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_gradients_of_leaves_can_be_added_to(kind: tuple[str, int]) -> None:
    """The update's and the stream's gradient are equal in a Pre-Norm junction, and still two tensors."""
    case = case_of(*kind)
    leaves = [t.requires_grad_() for t in (case.update, *case.state)]
    incoming = incoming_of(case)
    for _ in range(3):
        streams, z = case.junction(case.state, case.update)
        outputs = [*streams] if z is streams[0] else [*streams, z]
        torch.autograd.backward(outputs, incoming)
    _, once = derive(case, incoming)
    for leaf, gradient in zip(leaves, once, strict=False):
        torch.testing.assert_close(leaf.grad, 3 * gradient)


# --- Dao-AILab/quack#53 and ServiceNow/Fast-LLM#220: order of the gradient sum, zero gains --------------------------


@pytest.mark.parametrize(
    ("gain", "d_z", "d_x", "expected", "expected_gain"),
    [
        ([1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.1810193, 0.8642355], [0.8485281, 0.0]),
        ([0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.8485281, 0.0]),
        ([1.0, 1.0], [1.0, 0.0], None, [0.1810193, -0.1357645], [0.8485281, 0.0]),
        ([1.0, 1.0], None, [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]),
    ],
    ids=["both", "a zero gain", "only z", "only x"],
)
def test_derivative_of_the_norm_first_then_the_sum(
    gain: list[float],
    d_z: list[float] | None,
    d_x: list[float] | None,
    expected: list[float],
    expected_gain: list[float],
) -> None:
    x, o = torch.tensor([[1.0, 2.0]], requires_grad=True), torch.tensor([[2.0, 2.0]], requires_grad=True)
    norm = rms(gain=gain)
    (new_x,), z = pre_norm(norm)((x,), o)
    used = [(t, torch.tensor([d])) for t, d in ((new_x, d_x), (z, d_z)) if d is not None]
    outputs, incoming = zip(*used, strict=True)
    dx, do, d_gain = torch.autograd.grad(outputs, (x, o, norm.get_parameter("weight")), incoming)
    for gradient, wanted in ((dx, [expected]), (do, [expected]), (d_gain, expected_gain)):
        torch.testing.assert_close(gradient, torch.tensor(wanted), rtol=0, atol=1e-6)


@pytest.mark.parametrize("norm", [{"kind": "rms"}, {"kind": "layer", "bias": True}], ids=["rms", "layer"])
@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_zero_gains(kind: tuple[str, int], norm: dict[str, Any]) -> None:
    for share in (0.3, 1.0):
        case = case_of(*kind, **norm)
        with torch.no_grad():
            for parameter in case.junction.parameters():
                parameter.masked_fill_(torch.rand(parameter.shape) < share, 0.0)
        incoming = incoming_of(case)
        assert max(errors(case, incoming)[0]) <= 2e-6
        assert all(t.isfinite().all() for ts in derive(case, incoming) for t in ts)


# --- ModelTC/LightLLM#1467: strides --------------------------------------------------------------------------------


def test_the_stride_of_a_transposed_matrix() -> None:
    x = torch.arange(12.0).view(3, 4).t()
    _, z = pre_norm(rms(3))((x,), torch.zeros(4, 3))
    torch.testing.assert_close(z[0], torch.tensor([0.0, 0.7745967, 1.5491933]))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.clone(),
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "every second column": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    "every second row": lambda t: t.repeat_interleave(2, dim=1)[:, ::2],
    "expanded over the batch": lambda t: t[:1].expand_as(t),
    "leading axes permuted": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "one number": lambda t: t[:1, :1, :1].expand_as(t),
}


@pytest.mark.parametrize("dim", [1, 3, 31, 96, 127, 1000, 4097, 12288])
def test_layouts(dim: int) -> None:
    """Any strides of the update, of a stream and of an incoming gradient: the bits of contiguous tensors."""
    for dtype, kind in itertools.product((F32, BF16, F16), (("siamese", 1), ("peri", 1))):
        case = case_of(*kind, (2, 2, dim), dtype, dtype)
        for name, layout in LAYOUTS.items():
            changed = case._replace(update=layout(case.update), state=tuple(map(layout, case.state)))
            equal = case._replace(update=changed.update.contiguous())
            equal = equal._replace(state=tuple(s.contiguous() for s in changed.state))
            incoming = [layout(d) for d in incoming_of(case)]
            contiguous = derive(equal, [d.contiguous() for d in incoming])
            for ours, wanted in zip(derive(changed, incoming), contiguous, strict=True):
                assert all(map(torch.equal, ours, wanted)), (name, kind, dtype)
                assert all(t.is_contiguous() for t in ours)


def test_the_expanded_gradient_of_a_sum() -> None:
    case = case_of("siamese", 2, (2, 3, 48))
    given = [t.requires_grad_() for t in (case.update, *case.state)]
    _, z = case.junction(case.state, case.update)
    z.sum().backward()
    _, wanted = derive(case, [None, None, torch.ones(2, 3, 48)])
    for leaf, gradient in zip([*given, *case.junction.parameters()], wanted, strict=True):
        torch.testing.assert_close(leaf.grad, gradient, rtol=0, atol=0)


@pytest.mark.parametrize("strided", [True, False], ids=["strided", "expanded"])
def test_strides_of_gains(strided: bool) -> None:
    def change(gain: Tensor) -> Tensor:
        return gain.repeat_interleave(2)[::2] if strided else gain[:1].expand(48)

    case = case_of("siamese_hybrid_pre", 2, (5, 48))
    for module in case.junction.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(change(parameter.detach()), requires_grad=False))
    ours, wanted = derive(case, incoming_of(case)), derive(plain_of(case), incoming_of(case))
    torch.testing.assert_close(ours[0], wanted[0])


# --- pytorch/pytorch#80893: empty inputs ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_no_rows(kind: tuple[str, int], shape: tuple[int, ...]) -> None:
    """Shapes stay, the graph stays connected, and gains have a gradient of zeros."""
    case = case_of(*kind, shape, kind="layer", bias=True)
    given = [t.requires_grad_() for t in (case.update, *case.state)]

    def run() -> None:
        streams, z = case.junction(case.state, case.update)
        assert all(t.shape == shape for t in (*streams, z))
        (z.sum() + sum(s.sum() for s in streams)).backward()

    assert fused_calls(run)[1] == {"cpp junction": 1, "cpp junction_backward": 1}
    for t in given:
        assert t.grad is not None
        assert t.grad.shape == shape
    for name, parameter in case.junction.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros(64)), name


@pytest.mark.untyped
def test_no_columns() -> None:
    with pytest.raises(ValueError, match="width"):
        RMSNorm(0, eps=1e-5)
    with pytest.raises(ValueError, match="width 64"):
        pre_norm(rms(64))((torch.ones(5, 0),), torch.ones(5, 0))


# --- tracel-ai/burn#5607: variance ----------------------------------------------------------------------------------


def test_a_large_mean_does_not_cancel_the_variance() -> None:
    """In each of the four places of a norm."""
    variance = (16**2 - 1) / 12 * 2**-16  # 3.2425e-4
    row, zero = 4096 + torch.arange(16.0)[None] * 2**-8, torch.zeros(1, 16)
    a, b, c = (LayerNorm(16, eps=1e-5) for _ in range(3))
    runs: list[tuple[str, Junction, State, Tensor, int]] = [
        ("in", pre_norm(a), (row,), zero, -1),
        ("x", Junction(PostNormJoin(a, Drop()), PostNormRead()), (row,), zero, 0),
        ("out", Junction(OutputNormJoin(a, Drop()), PostNormRead()), (zero,), row, 0),
        ("y", Junction(SiameseJoin(b, 1.0, Drop()), SiameseRead(a, None)), (zero, row), zero, -1),
        ("siamese", Junction(SiameseJoin(b, 1.0, Drop()), SiameseRead(a, c)), (zero, row), zero, -1),
    ]
    for name, junction, state, update, which in runs:
        (streams, z), done = fused_calls(lambda j=junction, s=state, o=update: j(s, o))
        assert done == {"cpp junction": 1}
        out = (*streams, z)[which][0]
        bound = 1.6024558 if name != "siamese" else 1.6024558 / (variance / (variance + 1e-5) + 1e-5) ** 0.5
        assert out[0].item() == pytest.approx(-bound, abs=1e-4), name
        assert out[-1].item() == pytest.approx(bound, abs=1e-4), name


# --- NVIDIA/Megatron-LM#3504: the float32 stream ---------------------------------------------------------------------


def raw_streams() -> dict[str, tuple[Junction, int, int]]:
    """Junctions that only add to a stream: the junction, how many streams it has, and the first that is raw."""
    return {
        "pre": (pre_norm(rms(16)), 1, 0),
        "deepnorm(base=pre)": (Junction(DeepNormJoin(None, 1.0, Drop()), PreNormRead(rms(16))), 1, 0),
        "siamese": (Junction(SiameseJoin(rms(16), 0.7, Drop()), SiameseRead(rms(16), rms(16))), 2, 1),
        "siamese_hybrid_pre": (Junction(SiameseJoin(None, 1.0, Drop()), SiameseRead(rms(16), None)), 2, 0),
        "residual": (Junction(ResiDualJoin(rms(16), 1.0, Drop()), ResiDualRead(None)), 2, 1),
    }


@pytest.mark.parametrize("name", raw_streams())
@pytest.mark.parametrize(("dtype", "after"), [(F32, 306.0), (BF16, 256.0)], ids=["fp32", "bf16"])
def test_small_updates_through_a_hundred_layers(dtype: torch.dtype, after: float, name: str) -> None:
    junction, n_streams, raw = raw_streams()[name]
    update = torch.full((1, 1, 16), 0.5, dtype=BF16)

    def run() -> State:
        state: State = (torch.full((1, 1, 16), 256.0, dtype=dtype),) * n_streams
        for _ in range(100):
            state, z = junction(state, update)
            assert {t.dtype for t in (*state, z)} == {dtype}
        return state

    fused, done = fused_calls(run)
    assert done == {"cpp junction": 100}
    assert all(torch.equal(s, torch.full((1, 1, 16), after, dtype=dtype)) for s in fused[raw:])
    set_backend(junction, "plain")
    plain, done = fused_calls(run)
    assert done == {}
    assert all(map(torch.equal, fused[raw:], plain[raw:]))
    torch.testing.assert_close(fused, plain)


# --- vllm-project/speculators#765 and vllm-project/vllm#29810: gains that do not move, gains in bfloat16 -------------


def after_steps(norm: RMSNorm, n: int) -> Tensor:
    """The gain after n steps of SGD at rate 1e-3 along a gradient of exactly 1."""
    assert norm.weight is not None
    dtype = norm.weight.dtype
    optimizer = torch.optim.SGD([norm.weight], lr=1e-3)
    row = torch.ones(1, 4)
    for _ in range(n):
        optimizer.zero_grad()
        (_, z), done = fused_calls(lambda: pre_norm(norm)((row,), torch.zeros(1, 4)))
        assert done == {"cpp junction": 1}
        z.sum().backward()
        assert norm.weight.grad is not None
        assert norm.weight.grad.dtype == dtype
        assert torch.equal(norm.weight.grad, torch.ones(4, dtype=dtype))
        optimizer.step()
    return norm.weight.detach()


def test_gains_move_in_float32_and_stand_still_in_bfloat16() -> None:
    moved = after_steps(rms(4), 100)
    torch.testing.assert_close(moved, torch.full((4,), 0.9))
    assert moved.bfloat16().tolist() == [0.8984375] * 4
    assert after_steps(rms(4).bfloat16(), 100).tolist() == [1.0] * 4
    zero_centered = RMSNorm(4, eps=0.0, gain="zero_centered").bfloat16()
    assert after_steps(zero_centered, 1).float().tolist() == pytest.approx([-0.0009995] * 4, abs=1e-7)


def test_a_zero_gain_moves() -> None:
    torch.testing.assert_close(after_steps(rms(4, gain=[0.0, 1.0, 0.0, -2.0]), 1), torch.tensor([0.0, 1, 0, -2]) - 1e-3)


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_float32_gains_have_float32_gradients_in_a_bfloat16_model(kind: tuple[str, int]) -> None:
    case: Case = case_of(*kind, (40, 32), BF16, BF16, F32)
    _, gradients = derive(case, incoming_of(case))
    n = 1 + len(case.state)
    assert {g.dtype for g in gradients[:n]} == {BF16}
    assert {g.dtype for g in gradients[n:]} == {F32}
    # A gradient that went through bfloat16 on its way would have no bits below its eighth.
    assert all((g != g.bfloat16().float()).any() for g in gradients[n:])


def test_one_is_added_to_a_gain_in_float32() -> None:
    norm = RMSNorm(8, eps=1e-6, gain="zero_centered").bfloat16()
    nn.init.constant_(norm.get_parameter("weight"), 15.8125)
    row = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.0, 1.0, 1.0, 0.0]], dtype=BF16)
    (_, z), done = fused_calls(lambda: pre_norm(norm)((row,), torch.zeros_like(row)))
    assert done == {"cpp junction": 1}
    assert z[0, 0].item() == 25.25


@pytest.mark.parametrize("which", ["weight", "bias", "c1"])
def test_gains_in_float64(which: str) -> None:
    """As an optimizer with float64 masters may leave them: used as they are, or left to the plain code."""
    case = case_of("siamese_hybrid_pre", 2, (5, 48), kind="layer", bias=True)
    for module in case.junction.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name == which:
                setattr(module, name, nn.Parameter(parameter.detach().double()))
    incoming = incoming_of(case)
    for ours, wanted in zip(derive(case, incoming), derive(plain_of(case), incoming), strict=True):
        torch.testing.assert_close(ours, wanted)
