"""The fused junction as an operation of torch, ``torch.ops.normstream.junction``, with its derivative.

Registered by name, with shapes for tracing, so that ``torch.compile``, activation checkpointing and sharding treat it
as they treat torch's own; the derivative is an ``autograd.Function`` outside of it, which costs the host less than
registering one.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normstream.ops.backends import cpu_backend, module_of
from normstream.ops.form import DTYPES, Form, empty_gradients, empty_outputs

_LIBRARY = torch.library.Library("normstream", "DEF")
_NUMBERS = "Tensor?[] parameters, Tensor scale, Tensor read_scale, float[] constants, int[] form"
_LIBRARY.define(
    f"junction(Tensor update, Tensor? x, Tensor? y, {_NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "junction_backward(Tensor? dz, Tensor? dx_out, Tensor? dy_out, Tensor? update, Tensor saved_x, Tensor? saved_y, "
    f"Tensor stats, {_NUMBERS}, int update_dtype) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "junction_z(Tensor saved_x, Tensor? saved_y, Tensor stats, Tensor?[] parameters, Tensor read_scale, "
    "float[] constants, int[] form) -> Tensor"
)

calls: Counter[str] = Counter()
"""How often each backend ran what: ``calls["cpp junction"]``, ``calls["triton junction_backward"]`` and so on."""


class FusedJunction(torch.autograd.Function):
    """The operation and its derivative, for tensors of any shape ``(..., dim)``: x', y' and z, as far as there are any.

    Kept for the backward pass: h (or x' where it is not normed), y' if it is normed, the update if it is normed, and
    the statistics; never z. It can be derived once only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        update: Tensor,
        x: Tensor | None,
        y: Tensor | None,
        scale: Tensor,
        read_scale: Tensor,
        constants: list[float],
        code: list[int],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        form, shape = Form.decode(code), update.shape
        rows, parameters = _rows(update), tuple(None if p is None else p.contiguous() for p in parameters)
        x_out, y_out, z, raw_x, stats = torch.ops.normstream.junction(
            rows, _rows(x), _rows(y), parameters, scale, read_scale, constants, code
        )
        x_out, y_out, z = (_in_shape(t, shape) if t.ndim == 2 else None for t in (x_out, y_out, z))
        saved_x = raw_x if form.norm_x.kind else x_out
        saved_y = y_out if form.norm_y.kind else None
        saved_update = rows if form.norm_out.kind else None
        ctx.save_for_backward(saved_update, saved_x, saved_y, stats, scale, read_scale, *parameters)
        ctx.set_materialize_grads(False)
        ctx.constants, ctx.code, ctx.shape, ctx.update_dtype = constants, code, shape, update.dtype
        return tuple(t for t in (x_out, y_out, z) if t is not None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "a fused junction can be derived once only; for second derivatives take "
                "normstream.junctions.set_backend(model, 'plain')"
            )
        form, update_dtype = Form.decode(ctx.code), DTYPES.index(ctx.update_dtype)
        update, saved_x, saved_y, stats, scale, read_scale, *parameters = ctx.saved_tensors
        dx_out, *others = map(_rows, gradients)
        dy_out = others.pop(0) if form.n_streams == 2 else None
        dz = others.pop() if form.has_z else None
        d_update, d_x, d_y, d_parameters = torch.ops.normstream.junction_backward(
            *(dz, dx_out, dy_out, update, _rows(saved_x), _rows(saved_y), stats, parameters, scale, read_scale),
            *(ctx.constants, ctx.code, update_dtype),
        )
        to_x = _in_shape(d_x, ctx.shape) if form.has_state else None
        shared = form.shares_gradient(ctx.constants[0], update_dtype)
        rows = iter(d_parameters.unbind(0))
        return (
            to_x if shared else _in_shape(d_update, ctx.shape),
            to_x,
            _in_shape(d_y, ctx.shape) if form.has_state and form.n_streams == 2 else None,
            *(None, None, None, None),
            *(None if p is None else next(rows).to(p.dtype) for p in parameters),
        )

    @staticmethod
    def rebuild(ctx: Any) -> Tensor:
        """z once more, (rows, dim), from what is kept for the backward pass."""
        _, saved_x, saved_y, stats, _, read_scale, *parameters = ctx.saved_tensors
        return torch.ops.normstream.junction_z(
            *(_rows(saved_x), _rows(saved_y), stats, parameters, read_scale, ctx.constants, ctx.code)
        )


def _rows(tensor: Tensor | None) -> Any:
    """The tensor as (rows, dim), contiguous."""
    return None if tensor is None else tensor.reshape(-1, tensor.shape[-1]).contiguous()


def _in_shape(rows: Tensor, shape: torch.Size) -> Tensor:
    """(rows, dim) in another shape; no view, which could not be changed in place. Nobody uses ``rows`` afterwards."""
    return torch.ops.aten._unsafe_view(rows, shape)


def _run(device: str, operation: str, *arguments: Any) -> Any:
    backend = cpu_backend() if device == "CPU" else "triton"
    calls[f"{backend} {operation}"] += 1
    return getattr(module_of(backend), operation)(*arguments)


for _device in ("CPU", "CUDA"):
    for _operation in ("junction", "junction_z", "junction_backward"):
        _LIBRARY.impl(_operation, functools.partial(_run, _device, _operation), _device)


@torch.library.register_fake("normstream::junction", lib=_LIBRARY)
def _shapes(
    update: Tensor, x: Any, y: Any, parameters: Any, scale: Tensor, read_scale: Tensor, constants: Any, form: list[int]
) -> Any:
    return empty_outputs(update, Form.decode(form))


@torch.library.register_fake("normstream::junction_z", lib=_LIBRARY)
def _shape_of_z(
    saved_x: Tensor, saved_y: Any, stats: Any, parameters: Any, scale: Any, constants: Any, form: Any
) -> Tensor:
    return torch.empty_like(saved_x, dtype=DTYPES[Form.decode(form).z_dtype])


@torch.library.register_fake("normstream::junction_backward", lib=_LIBRARY)
def _shapes_backward(
    dz: Any,
    dx_out: Any,
    dy_out: Any,
    update: Any,
    saved_x: Tensor,
    saved_y: Any,
    stats: Tensor,
    parameters: Sequence[Tensor | None],
    scale: Tensor,
    read_scale: Tensor,
    constants: list[float],
    form: list[int],
    update_dtype: int,
) -> Any:
    return empty_gradients(saved_x, parameters, constants, Form.decode(form), update_dtype)
