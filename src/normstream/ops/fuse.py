"""From the two halves of a junction, as they describe themselves, to one fused operation."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normstream.norms import LayerNorm, RMSNorm
from normstream.ops.backends import Backend, backend_for
from normstream.ops.form import DTYPE_CODES, Constants, Form, NormForm
from normstream.ops.registration import FusedJunction

_KINDS = {RMSNorm: 1, LayerNorm: 2}
# Two tensors, since torch.compile does not let an operation have one of them twice.
_SCALE, _READ_SCALE = (torch.ones((), dtype=torch.float64, device="cpu") for _ in range(2))


class JoinPart(NamedTuple):
    """What a join adds to the formula: ``x' = N_x(alpha x + scale N_out(o)), y' = y + second o``."""

    norm_out: nn.Module | None = None
    """N_out."""
    norm_x: nn.Module | None = None
    """N_x."""
    alpha: float = 1.0
    """Factor of the stream x."""
    scale: Tensor = _SCALE
    """Factor of the update that x receives, with two streams."""
    second: float | None = None
    """Factor of the update that y receives; None where there is no second stream."""
    starts: bool = False
    """Whether there are no streams yet."""
    drop: nn.Module | None = None
    """Dropout of the update; it comes after N_out, so with both there is no fused operation."""


class ReadPart(NamedTuple):
    """What a read adds: ``z = read_scale N_in(c x' + N_y(y'))``."""

    norm_in: nn.Module | None = None
    """N_in."""
    norm_y: nn.Module | None = None
    """N_y; None where y is not read."""
    c: Tensor | None = None
    """The vector c."""
    read_scale: Tensor = _READ_SCALE
    """Factor of z."""
    has_z: bool = True
    """False where z is x' itself."""


def fused(
    join: JoinPart, read: ReadPart, state: Sequence[Tensor], update: Tensor, backend: Backend
) -> tuple[tuple[Tensor, ...], Tensor] | None:
    """The state and z by one fused operation; None where there is no operation for this.

    There is none for float64, for other norms than ``RMSNorm`` and ``LayerNorm``, for streams of another shape than the
    update's, for sharded tensors and other subclasses, inside ``torch.func`` and forward-mode derivatives, on other
    devices than CPU and CUDA, and where the machine cannot build it. With ``auto``, one stream inside ``torch.compile``
    on a CPU is left to the compiler.

    Raises:
        ValueError: if ``backend`` names one that cannot be had.
    """
    form = _form(join, read, state, update)
    if form is None or (backend == "auto" and _left_to_the_compiler(form, update)):
        return None
    norms: tuple[Any, ...] = (join.norm_out, join.norm_x, read.norm_y, read.norm_in)
    width = next(norm.dim for norm in norms if norm is not None)
    if not backend_for(update.device.type, width, backend):
        return None
    if join.drop is not None and join.drop.active:
        if join.norm_out is not None:
            return None
        update = join.drop(update)
    constants = Constants(join.alpha, 1.0 if join.second is None else join.second, *(_eps(norm) for norm in norms))
    parameters = [parameter for norm in norms for parameter in _gain_and_bias(norm)]
    x, y = (*state, None, None)[:2]
    out = FusedJunction.apply(
        update, x, y, join.scale, read.read_scale, list(constants), form.encode(), *parameters, read.c
    )
    streams = out[: form.n_streams]
    return streams, out[-1] if form.has_z else streams[0]


def _form(join: JoinPart, read: ReadPart, state: Sequence[Tensor], update: Tensor) -> Form | None:
    """What is to be computed, or None where there is no operation for it."""
    n_streams = 1 if join.second is None else 2
    if update.device.type not in ("cpu", "cuda") or len(state) != (0 if join.starts else n_streams):
        return None
    stream_dtype = (state[0] if state else update).dtype
    alike = all(stream.shape == update.shape and stream.dtype == stream_dtype for stream in state)
    if not alike or _derived_otherwise() or not all(map(_is_plain, (update, *state))):
        return None
    norms = (join.norm_out, join.norm_x, read.norm_y, read.norm_in)
    if all(norm is None for norm in norms) or not all(_fits(norm, update.shape[-1]) for norm in norms):
        return None
    if read.c is not None and not _is_plain(read.c):
        return None
    z_dtype = stream_dtype
    if stream_dtype == torch.float32 and torch.is_autocast_enabled(update.device.type):
        z_dtype = torch.get_autocast_dtype(update.device.type)
    return Form(
        n_streams=n_streams,
        has_state=not join.starts,
        has_z=read.has_z,
        stream_dtype=DTYPE_CODES[stream_dtype],
        z_dtype=DTYPE_CODES[z_dtype],
        norm_out=_norm_form(join.norm_out, update.dtype),
        norm_x=_norm_form(join.norm_x, stream_dtype),
        norm_y=_norm_form(read.norm_y, stream_dtype),
        norm_in=_norm_form(read.norm_in, stream_dtype),
    )


def _left_to_the_compiler(form: Form, update: Tensor) -> bool:
    """On a CPU, ``torch.compile`` makes a junction of one stream as well, and together with what stands beside it."""
    return torch.compiler.is_compiling() and form.n_streams == 1 and update.device.type == "cpu"


def _fits(norm: Any, dim: int) -> bool:
    if norm is None:
        return True
    return type(norm) in _KINDS and norm.dim == dim and all(p is None or _is_plain(p) for p in (norm.weight, norm.bias))


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is torch's own kind, not sharded for instance, and of a dtype that the operation knows."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype in DTYPE_CODES


def _norm_form(norm: Any, input_dtype: torch.dtype) -> NormForm:
    """The conventions of a norm whose input has a dtype; see ``GainNorm.forward``."""
    if norm is None:
        return NormForm()
    kind, zero_centered = _KINDS[type(norm)], norm.gain == "zero_centered"
    if norm.gain == "none" or norm.cast == "after_gain":
        return NormForm(kind, zero_centered)
    gain_dtype = torch.float32 if zero_centered else norm.weight.dtype
    low = input_dtype if norm.cast == "before_gain" else gain_dtype
    return NormForm(kind, zero_centered, DTYPE_CODES[low], DTYPE_CODES[torch.promote_types(low, gain_dtype)])


def _gain_and_bias(norm: Any) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if norm is None else (norm.weight, norm.bias)


def _eps(norm: Any) -> float:
    return 0.0 if norm is None else norm.eps


def _derived_otherwise() -> bool:
    """Whether ``torch.func`` or forward mode takes a derivative, which needs torch's own operations."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
