"""The fused junction on a CPU: ``junction.cpp``, compiled when it is first needed and kept in the user's cache folder.

The library has a plain C interface, so that a wheel stays pure Python and one build serves every version of torch.
"""

import ctypes
import functools
import struct
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normstream.ops.build import library
from normstream.ops.form import DTYPE_CODES, DTYPES, Form, empty_gradients, empty_outputs

ELEMENTS_FOR_THREADS = 32_768
"""Below this many elements other threads cost more than they save."""
BYTES_PAST_CACHE = 8 << 20
"""From this size on an output is written past the cache, since it would be evicted before it is read."""
N_POINTERS = 42
"""Addresses, dtypes and the number of blocks at the end of the C structure."""
ROWS_PER_BLOCK = 64
MOST_BLOCKS = 256
"""Gradients of gains are summed in blocks of at least so many rows, in at most so many blocks."""


def junction(
    update: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    parameters: Sequence[Tensor | None],
    scale: Tensor,
    read_scale: Tensor,
    constants: Sequence[float],
    form: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The forward pass of ``normstream.ops.form``: x', y', z, the row h where x' is normed, and the statistics."""
    what = Form.decode(form)
    x_out, y_out, z, raw_x, stats = outputs = empty_outputs(update, what)
    pointers = [*_pointers(update, x, y, *parameters, x_out, y_out, z, raw_x), stats.data_ptr()]
    numbers = _numbers(what, constants, scale, read_scale)
    _call(_library().normstream_junction, what, update.shape, pointers, numbers)
    return outputs


def junction_backward(
    dz: Tensor | None,
    dx_out: Tensor | None,
    dy_out: Tensor | None,
    update: Tensor | None,
    saved_x: Tensor,
    saved_y: Tensor | None,
    stats: Tensor,
    parameters: Sequence[Tensor | None],
    scale: Tensor,
    read_scale: Tensor,
    constants: Sequence[float],
    form: Sequence[int],
    update_dtype: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward pass: gradients of the update, of the streams, and of all parameters, (n, dim) in float32."""
    what, (rows, dim) = Form.decode(form), saved_x.shape
    gradients = empty_gradients(saved_x, parameters, constants, what, update_dtype)
    d_update, d_x, d_y, d_parameters = gradients
    n_blocks = max(1, min(MOST_BLOCKS, rows // ROWS_PER_BLOCK))
    partials = d_parameters.new_empty(n_blocks * len(d_parameters) * _library().normstream_stride(dim))
    pointers = [
        *_pointers(update, None, saved_y, *parameters, dx_out, dy_out, dz, saved_x),
        stats.data_ptr(),
        *_pointers(d_update, d_x, d_y),
        *(d_parameters.data_ptr(), partials.data_ptr(), n_blocks),
    ]
    numbers = _numbers(what, constants, scale, read_scale)
    _call(_library().normstream_junction_backward, what, saved_x.shape, pointers, numbers)
    return gradients


def junction_z(
    saved_x: Tensor,
    saved_y: Tensor | None,
    stats: Tensor,
    parameters: Sequence[Tensor | None],
    read_scale: Tensor,
    constants: Sequence[float],
    form: Sequence[int],
) -> Tensor:
    """z once more, from what the forward pass saved."""
    what = Form.decode(form)
    z = torch.empty_like(saved_x, dtype=DTYPES[what.z_dtype])
    pointers = [*_pointers(None, None, saved_y, *parameters, None, None, z, saved_x), stats.data_ptr()]
    numbers = _numbers(what, constants, read_scale, read_scale)
    _call(_library().normstream_junction_z, what, saved_x.shape, pointers, numbers)
    return z


def _call(function: Any, form: Form, shape: Sequence[int], pointers: list[int], numbers: bytes) -> None:
    rows, dim = shape
    threads = torch.get_num_threads() if rows * dim >= ELEMENTS_FOR_THREADS else 1  # another size would cost a new team
    past_cache = rows * dim * DTYPES[form.stream_dtype].itemsize >= BYTES_PAST_CACHE
    head = struct.pack("4q", rows, dim, threads, past_cache)
    absent = [0] * (N_POINTERS - len(pointers))
    function(head + _described(form) + struct.pack(f"{N_POINTERS}q", *pointers, *absent), numbers)


@functools.cache
def _described(form: Form) -> bytes:
    """The form as the C structure has it."""
    conventions = [value for column in zip(*form.norms, strict=True) for value in column]
    return struct.pack("19q", form.n_streams, form.has_state, form.has_z, *conventions)


def _pointers(*tensors: Tensor | None) -> list[int]:
    """Address and dtype of each tensor, twice 0 for none."""
    absent = (0, 0)
    pairs = [absent if t is None or t.shape == (0,) else (t.data_ptr(), DTYPE_CODES[t.dtype]) for t in tensors]
    return [number for pair in pairs for number in pair]


def _numbers(form: Form, constants: Sequence[float], scale: Tensor, read_scale: Tensor) -> bytes:
    return struct.pack("8d", *constants, scale.item() if form.n_streams == 2 else 1.0, read_scale.item())


@functools.cache
def available() -> bool:
    """Whether the library is there or could be built; says once, as a warning, why not."""
    if (reason := why_missing()) is not None:
        warnings.warn(f"junctions run unfused on the CPU, which is slower: {reason}", stacklevel=2)
    return reason is None


def why_missing() -> str | None:
    """Why the library is not there and cannot be built; None if it is."""
    try:
        _library()
    except OSError as error:
        return str(error)
    return None


@functools.cache
def _library() -> ctypes.CDLL:
    """The compiled library."""
    with library() as path:
        loaded = ctypes.CDLL(str(path))
    for name in ("junction", "junction_z", "junction_backward"):
        function = getattr(loaded, f"normstream_{name}")
        function.argtypes, function.restype = (ctypes.c_char_p, ctypes.c_char_p), None
    loaded.normstream_stride.argtypes, loaded.normstream_stride.restype = (ctypes.c_int64,), ctypes.c_int64
    return loaded
