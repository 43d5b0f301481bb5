"""Outputs and gradients of the fused operation against its formula in float64, and next to the plain code's."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from row_program import (
    SPECS,
    Case,
    case_of,
    derive,
    describes_itself,
    error,
    errors,
    given,
    in_float64,
    incoming_of,
    junctions_of,
    outputs_of,
    plain_of,
    row_program,
)
from torch import Tensor

from normstream import placements
from normstream.ops import calls

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
EXACT = 2e-6

# One of each kind of junction: first, inner and last ones, every slot alone and in each company that a placement has.
KINDS = [
    ("pre", 1),
    ("layernorm_scaling", 3),
    ("peri", 0),
    ("post", 1),
    ("deepnorm(alpha=2.8,final_norm=true)", 4),
    ("keel(alpha=3,first_block=none)", 1),
    ("peri", 1),
    ("olmo2", 1),
    ("swin_v2(extra_norm_every=1)", 2),
    ("swin_v2(extra_norm_every=1)", 4),
    ("residual(scale=0.3)", 1),
    ("residual(input_norm=true,scale=0.3)", 1),
    ("siamese", 0),
    ("siamese", 2),
    ("siamese(input_norm=false)", 1),
    ("siamese_hybrid_pre", 0),
    ("siamese_hybrid_pre", 1),
    ("siamese_hybrid_pre", 2),
]
ids = "{0[0]}[{0[1]}]".format


@pytest.mark.parametrize("spec", SPECS)
def test_every_junction_of_every_placement(spec: str) -> None:
    """The plain code, in float64, is the formula; the fused operation is it up to rounding."""
    n_streams = len(placements.get(spec).streams)
    for place, junction in enumerate(junctions_of(spec, 31)):
        case = given(f"{spec}[{place}]", junction, n_streams if place else 0, (5, 31))
        if not describes_itself(junction):
            continue
        incoming = incoming_of(case)
        exact = in_float64(plain_of(case))
        for ours, formula in zip(derive(exact, incoming), derive(exact, incoming, row_program), strict=True):
            torch.testing.assert_close(ours, formula, rtol=1e-12, atol=1e-12)
        assert max(errors(case, incoming)[0]) <= EXACT, case.name


NORMS = [
    *({"kind": "rms", "gain": gain} for gain in ("plain", "zero_centered", "none")),
    *({"kind": "layer", "gain": g, "bias": b} for g in ("plain", "zero_centered", "none") for b in (True, False)),
]


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: " ".join(map(str, norm.values())))
def test_every_norm(norm: dict[str, Any]) -> None:
    for spec, place in KINDS:
        if "swin" in spec and norm["gain"] == "none":  # its gains start at 0, so it has some
            continue
        case = case_of(spec, place, **norm)
        assert max(errors(case, incoming_of(case))[0]) <= EXACT, case.name


@pytest.mark.parametrize("dim", [1, 3, 31, 96, 127, 1000, 4097])
def test_every_width_and_number_of_rows(dim: int) -> None:
    for rows, kind in itertools.product((0, 1, 5, 200 if dim < 4097 else 70), ("rms", "layer")):
        for spec, place in (("pre", 1), ("peri", 1), ("siamese", 2), ("siamese_hybrid_pre", 2)):
            case = case_of(spec, place, (rows, dim), kind=kind, bias=kind == "layer")
            fused, plain = errors(case, incoming_of(case))
            bound = EXACT if dim > 1 else max(EXACT, 1.5 * max(plain))  # one number hardly has a derivative
            assert max(fused) <= bound, (case.name, rows, kind)


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_a_gradient_that_does_not_arrive_is_zero(kind: tuple[str, int]) -> None:
    case = case_of(*kind)
    incoming = incoming_of(case)
    for there in itertools.product((True, False), repeat=len(incoming)):
        if any(there):
            some = [d if is_there else None for d, is_there in zip(incoming, there, strict=True)]
            assert max(errors(case, some)[0]) <= EXACT, there


# --- low precision --------------------------------------------------------------------------------------------------

PRECISIONS = {
    "bf16 update, fp32 stream": (BF16, F32, F32),
    "fp16 update, fp32 stream": (F16, F32, F32),
    "bf16, fp32 gains": (BF16, BF16, F32),
    "bf16": (BF16, BF16, BF16),
    "fp16": (F16, F16, F16),
    "fp32, bf16 gains": (F32, F32, BF16),
}


@pytest.mark.parametrize("kind", KINDS, ids=ids)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_low_precision_is_no_worse_than_the_plain_code(precision: str, kind: tuple[str, int]) -> None:
    case = case_of(*kind, (16, 1000), *PRECISIONS[precision])
    for fused, plain in zip(*errors(case, incoming_of(case)), strict=True):
        assert fused <= 1.1 * plain + EXACT


@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_autocast_reads_in_its_own_dtype(kind: tuple[str, int]) -> None:
    """z is rounded once, as a matrix after it would do; the streams stay in float32."""
    case = case_of(*kind, (64, 96), BF16)
    with torch.no_grad():
        exact = row_program(*in_float64(case)[1:])
    with torch.autocast("cpu", BF16), torch.no_grad():
        fused = outputs_of(case.junction, case.state, case.update)
    has_z = len(fused) > len(case.state or placements.get(kind[0]).streams)
    assert [t.dtype for t in fused] == [F32] * (len(fused) - has_z) + [BF16] * has_z
    for ours, wanted in zip(fused, exact, strict=True):
        rounded = wanted.to(ours.dtype)
        assert error(ours, wanted) <= error(rounded, wanted) * 1.01 + EXACT

    incoming = [torch.randn(t.shape).to(t.dtype) for t in fused]
    _, exact_gradients = derive(in_float64(case), incoming, row_program)
    with torch.autocast("cpu", BF16):
        _, gradients = derive(case, incoming)
    bounds = [4e-3, *[EXACT] * (len(gradients) - 1)]  # the update's gradient is in bfloat16, as the update is
    for ours, wanted, bound in zip(gradients, exact_gradients, bounds, strict=True):
        assert error(ours, wanted) <= (bound if case.state else EXACT)


def roundings(cast: str, dtype: torch.dtype, gain_dtype: torch.dtype) -> tuple[Any, Any]:
    """Of the normalized row and of its product with the gain, as torch has them; None for float32: no rounding."""
    low = dtype if cast == "before_gain" else gain_dtype
    product = F32 if {low, gain_dtype} in ({BF16, F16}, {F32, BF16}, {F32, F16}) else low
    return low if low != F32 else None, product if product != F32 else None


@pytest.mark.parametrize("gain_dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("cast", ["before_gain", "gain_dtype"])
def test_casts(cast: str, dtype: torch.dtype, gain_dtype: torch.dtype) -> None:
    """In float32 the formula with its roundings, 1e-3 of a number; in lower precision no worse than the plain code."""
    for norm in ({"kind": "rms"}, {"kind": "layer", "bias": True}, {"kind": "rms", "gain": "zero_centered"}):
        kept = F32 if norm.get("gain") == "zero_centered" else gain_dtype  # 1 + w is in float32
        for kind in (("pre", 1), ("post", 1), ("siamese", 2), ("keel(alpha=3,first_block=none)", 1)):
            case = case_of(*kind, (64, 96), dtype, dtype, gain_dtype, cast=cast, **norm)
            rounding = roundings(cast, dtype, kept)
            incoming = incoming_of(case)
            fused, plain = errors(case, incoming, rounding)
            for k, (ours, theirs) in enumerate(zip(fused, plain, strict=True)):
                assert ours <= 1.1 * theirs + 2e-4, (case.name, norm, k)
                assert ours <= 2e-4 or dtype != F32 or k >= len(incoming), (case.name, norm, k)


@pytest.mark.parametrize("gain_dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("cast", ["after_gain", "before_gain", "gain_dtype"])
def test_casts_are_those_of_the_norm(cast: str, gain_dtype: torch.dtype) -> None:
    """Bit for bit but for ties: nothing is added to a bfloat16 stream, whose norm is then the norm of itself."""
    for norm in ({"kind": "rms"}, {"kind": "layer", "bias": True}, {"kind": "layer", "gain": "zero_centered"}):
        case = case_of("pre", 1, (64, 96), BF16, BF16, gain_dtype, cast=cast, **norm)
        z = case.junction(case.state, torch.zeros_like(case.update))[1]
        plain: Any = case.junction.read.norm
        assert (z == plain(case.state[0])).float().mean() > 0.998
        if gain_dtype == F32:  # the gradient of a gain has the normalized row as it was multiplied, rounded or not
            incoming = torch.randn(z.shape).to(BF16)
            gradients = [torch.autograd.grad(y, plain.weight, incoming)[0] for y in (z, plain(case.state[0]))]
            assert error(gradients[0], gradients[1].double()) <= 2e-4


# --- threads and large tensors --------------------------------------------------------------------------------------


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def everything(case: Case, incoming: list[Tensor]) -> list[Tensor]:
    outputs, gradients = derive(case, incoming)
    return [*outputs, *gradients]


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("kind", [("pre", 1), ("peri", 1), ("siamese", 2), ("siamese_hybrid_pre", 2)], ids=ids)
def test_the_same_bits_with_any_number_of_threads(kind: tuple[str, int]) -> None:
    case = case_of(*kind, (300, 257))
    incoming = incoming_of(case)
    runs = []
    for n in (1, 2, 4):
        torch.set_num_threads(n)
        runs.append(everything(case, incoming))
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))
    assert max(errors(case, incoming)[0]) <= EXACT


@pytest.mark.parametrize(("kind", "dtype"), [(("siamese", 2), F32), (("siamese", 2), BF16), (("peri", 1), F32)])
def test_large_outputs_are_written_past_the_cache(kind: tuple[str, int], dtype: torch.dtype) -> None:
    """From 8 MiB on the rows go another way to memory, but are the same."""
    rows = 2200 if dtype == F32 else 4400
    case = case_of(*kind, (rows, 1000), dtype, dtype, dtype)
    incoming = [torch.randn(rows, 1000).to(dtype) for _ in range(len(case.state) + 1)]
    whole, whole_gradients = derive(case, incoming)
    for half in (slice(0, rows // 2), slice(rows // 2, rows)):
        part = case._replace(state=tuple(s[half] for s in case.state), update=case.update[half])
        outputs, gradients = derive(part, [d[half] for d in incoming])
        assert all(torch.equal(a[half], b) for a, b in zip(whole, outputs, strict=True))
        n = 1 + len(case.state)
        assert all(torch.equal(a[half], b) for a, b in zip(whole_gradients[:n], gradients[:n], strict=True))


@pytest.mark.parametrize("offset", [1, 3, 7])
def test_memory_that_begins_anywhere(offset: int) -> None:
    """Tensors that are part of a larger one begin at any multiple of their element's size."""
    for dtype in (F32, BF16):
        case = case_of("siamese", 2, (6, 48), dtype, dtype)
        moved = [torch.cat((t.new_zeros(offset), t.flatten()))[offset:].view(6, 48) for t in (case.update, *case.state)]
        shifted = case._replace(update=moved[0], state=tuple(moved[1:]))
        incoming = incoming_of(case)
        assert all(map(torch.equal, everything(case, incoming), everything(shifted, incoming)))


def test_one_junction_counts_as_one_call_each_way() -> None:
    case = case_of("siamese", 2)
    before = calls.copy()
    derive(case, incoming_of(case))
    assert calls - before == {"cpp junction": 1, "cpp junction_backward": 1}
