"""The formula of ``normstream.ops.form`` once more, in float64 and plain autograd, and cases to compare it on."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normstream import placements
from normstream.junctions import Junction, State, set_backend
from normstream.norms import LayerNorm, NormConfig, RMSNorm
from normstream.ops import calls

Dtypes = tuple[torch.dtype | None, torch.dtype | None]

# Every placement, and the options that change which norms there are.
SPECS = (
    *placements.names(),
    "pre(embedding_norm=true)",
    "post(embedding_norm=true,final_norm=true)",
    "deepnorm(base=pre)",
    "deepnorm(alpha=2.8,final_norm=true)",
    "keel(alpha=3,first_block=none)",
    "mix_ln(alpha=0.5)",
    "swin_v2(extra_norm_every=1)",
    "residual(input_norm=true,scale=0.3)",
    "siamese(input_norm=false)",
    "siamese(depth_scale=paper,read_out=paper,embedding_norm=false,input_norm=false)",
    "siamese_hybrid_pre(embedding_norm=true,input_norm=false)",
    "siamese_hybrid_pre(first_block=pre)",
    "post:0,pre:1-",
)


def through(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Rounded to the dtype, if there is one, with the gradient of no rounding."""
    return values if dtype is None else values + (values.to(dtype).double() - values).detach()


def normed(norm: Any, h: Tensor, rounding: Dtypes = (None, None)) -> Tensor:
    """The norm of each row; the rounding is that of the normalized row and that of its product with the gain."""
    if norm is None:
        return h
    if isinstance(norm, LayerNorm):
        h = h - h.mean(-1, keepdim=True)
    n = through(h / (h.square().mean(-1, keepdim=True) + norm.eps).sqrt(), rounding[0])
    gain = 1.0 if norm.weight is None else 1 + norm.weight if norm.gain == "zero_centered" else norm.weight
    return through(n * gain, rounding[1]) + (0.0 if norm.bias is None else norm.bias)


def row_program(junction: Any, state: Sequence[Tensor], o: Tensor, rounding: Dtypes = (None, None)) -> list[Tensor]:
    """x', y' and z, as far as there are any, for a junction whose join and read describe themselves."""
    join, read = junction.join.part(), junction.read.part()
    two_streams = join.second is not None
    u = normed(join.norm_out, o, rounding)
    h = u * float(join.scale) if two_streams else u
    x = normed(join.norm_x, h + join.alpha * state[0] if state else h, rounding)
    outputs, w = [x], x
    if two_streams:
        outputs.append(join.second * u + (state[1] if state else 0.0))
    if read.norm_y is not None:
        w = x * (1.0 if read.c is None else read.c) + normed(read.norm_y, outputs[1], rounding)
    return [*outputs, float(read.read_scale) * normed(read.norm_in, w, rounding)] if read.has_z else outputs


def describes_itself(junction: Any) -> bool:
    """Whether join and read both say what they are part of, and there is a norm."""
    halves = junction.join, junction.read
    if any(not hasattr(half, "part") or half.part() is None for half in halves):
        return False
    return any(isinstance(module, RMSNorm | LayerNorm) for half in halves for module in half.children())


class Case(NamedTuple):
    """A junction and what it is given."""

    name: str
    junction: Junction
    state: State
    update: Tensor


def junctions_of(spec: str, dim: int, **norm: Any) -> list[Junction]:
    """A row for two blocks, with random parameters and an eps of its own, so large that it shows, for each norm."""
    row = placements.get(spec).junctions(dim, n_layers=2, norm=NormConfig(**norm))
    with torch.no_grad():
        for junction in row:
            for parameter in junction.parameters():
                parameter += 0.3 * torch.randn(parameter.shape)
            norms = [m for m in junction.modules() if isinstance(m, RMSNorm | LayerNorm)]
            for k, module in enumerate(norms):
                module.eps = 0.1 * (1 + k)
    return row


def case_of(
    spec: str,
    place: int,
    shape: tuple[int, ...] = (5, 31),
    dtype: torch.dtype = torch.float32,
    stream_dtype: torch.dtype = torch.float32,
    gain_dtype: torch.dtype = torch.float32,
    **norm: Any,
) -> Case:
    """The junction at one place of a placement's row, with random streams and update."""
    junction = junctions_of(spec, shape[-1], **norm)[place].to(gain_dtype)
    n_streams = len(placements.get(spec).streams) if place else 0
    return given(f"{spec}[{place}]", junction, n_streams, shape, dtype, stream_dtype)


def given(
    name: str,
    junction: Junction,
    n_streams: int,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    stream_dtype: torch.dtype = torch.float32,
) -> Case:
    """The junction with random streams and a random update; the first one's update is what the streams start from."""
    state = tuple(torch.randn(shape).to(stream_dtype) for _ in range(n_streams))
    return Case(name, junction, state, torch.randn(shape).to(dtype if state else stream_dtype))


def plain_of(case: Case) -> Case:
    """The same with the join's and the read's own code."""
    junction = copy.deepcopy(case.junction)
    set_backend(junction, "plain")
    return case._replace(junction=junction)


def in_float64(case: Case) -> Case:
    return case._replace(
        junction=copy.deepcopy(case.junction).double(),
        state=tuple(stream.double() for stream in case.state),
        update=case.update.double(),
    )


def outputs_of(junction: nn.Module, state: State, update: Tensor) -> list[Tensor]:
    """The streams, and z unless it is the stream x."""
    streams, z = junction(state, update)
    return [*streams] if z is streams[0] else [*streams, z]


def derive(
    case: Case, incoming: Sequence[Tensor | None], function: Callable[..., list[Tensor]] = outputs_of
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs, and the gradients of update, streams and parameters, 0 where there is none."""
    given = [t.detach().requires_grad_() for t in (case.update, *case.state)]
    outputs = function(case.junction, tuple(given[1:]), given[0])
    pairs = [(t, d.to(t.dtype)) for t, d in zip(outputs, incoming, strict=True) if d is not None and t.requires_grad]
    leaves = [*given, *(p for p in case.junction.parameters() if p.requires_grad)]
    found = torch.autograd.grad(
        [t for t, _ in pairs], leaves, [d for _, d in pairs], allow_unused=True, materialize_grads=True
    )
    return [t.detach() for t in outputs], list(found)


def error(actual: Tensor, exact: Tensor) -> float:
    """Relative, in the norm of the whole tensor; one whose entries are below 0.1 counts as if they were 0.1."""
    least = 0.1 * exact.numel() ** 0.5
    return float((actual.double() - exact).norm() / exact.norm().clamp(min=least)) if exact.numel() else 0.0


def errors(
    case: Case, incoming: Sequence[Tensor | None], rounding: Dtypes = (None, None)
) -> tuple[list[float], list[float]]:
    """Of every output and gradient, against float64: the fused operation's, and those of the plain code.

    Fails where something else than the fused operation ran, or where a shape or dtype is not the plain code's.
    """
    exact, exact_gradients = derive(in_float64(case), incoming, lambda j, s, o: row_program(j, s, o, rounding))
    before = calls.copy()
    fused, fused_gradients = derive(case, incoming)
    assert calls - before == {"cpp junction": 1, "cpp junction_backward": 1}, case.name
    plain, plain_gradients = derive(plain_of(case), incoming)
    assert [t.shape for t in (*fused, *fused_gradients)] == [t.shape for t in (*plain, *plain_gradients)]
    assert [t.dtype for t in (*fused, *fused_gradients)] == [t.dtype for t in (*plain, *plain_gradients)]
    wanted = [*exact, *exact_gradients]
    return (
        [error(t, w) for t, w in zip((*fused, *fused_gradients), wanted, strict=True)],
        [error(t, w) for t, w in zip((*plain, *plain_gradients), wanted, strict=True)],
    )


def incoming_of(case: Case) -> list[Tensor]:
    """Random gradients for the outputs."""
    with torch.no_grad():
        return [torch.randn(t.shape).to(t.dtype) for t in outputs_of(plain_of(case).junction, case.state, case.update)]


def run_counted(run: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and how often the fused operation ran forward."""
    before = calls["cpp junction"]
    result = run()
    return result, calls["cpp junction"] - before
