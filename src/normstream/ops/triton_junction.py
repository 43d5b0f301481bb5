"""The fused junction in Triton: one kernel forward, two backward. The equations are in ``normstream.ops.form``.

Triton comes with torch for CUDA. With TRITON_INTERPRET=1 in the environment before Triton is imported, the same kernels
run on a CPU, slowly, for tests.

In the backward pass as many programs as the GPU holds at once share the rows out among themselves in a fixed way, and
what each has summed for the parameters is added in a fixed order: two runs on one GPU give the same bits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from normstream.ops.form import DTYPES, MOST_COLUMNS_IN_TRITON, Form, empty_gradients, empty_outputs
from normstream.ops.triton_backward import add_up, backward
from normstream.ops.triton_forward import forward, rebuild

MOST_WARPS = 16
"""Of a program: then each thread may have 128 of a multiprocessor's 65536 registers, which is what wide rows need."""

PROGRAMS_INTERPRETED = 4
"""How many programs share the rows where there is no GPU."""

SUM_ROWS, SUM_COLUMNS = 128, 32
"""Size of the tiles in which the programs' sums are added."""


class Tile(NamedTuple):
    """Size of a kernel's programs."""

    rows: int
    block: int
    warps: int


def tile(dim: int) -> Tile:
    """One row a program from width 513 on, several rows if they are narrower; eight numbers a thread up to width 4096.

    >>> tile(1000), tile(31)
    (Tile(rows=1, block=1024, warps=4), Tile(rows=16, block=32, warps=4))
    """
    if dim > MOST_COLUMNS_IN_TRITON:
        raise ValueError(f"Triton junctions have at most {MOST_COLUMNS_IN_TRITON} columns, got {dim}; take plain")
    block = triton.next_power_of_2(dim)
    return Tile(max(1, min(16, 1024 // block)), block, max(4, min(MOST_WARPS, block // 256)))


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
    """The forward pass of ``normstream.ops.form``: x', y', z, the row h where x' is normed, and the statistics.

    Raises ValueError for more than 16384 columns.
    """
    what = Form.decode(form)
    rows, dim = update.shape
    size = tile(dim)
    x_out, y_out, z, raw_x, stats = outputs = empty_outputs(update, what)
    if rows == 0:
        return outputs
    _launch(
        forward,
        triton.cdiv(rows, size.rows),
        update,
        *(update, x if what.has_state else None, y if what.has_state and what.n_streams == 2 else None),
        *parameters,
        *(t if t.ndim == 2 else None for t in (x_out, y_out, z, raw_x)),
        *(stats, rows, *_factors(what, scale, read_scale), *constants),
        *(*form[-4:], dim, size.rows, size.block),
        warps=size.warps,
    )
    return outputs


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
    rows, dim = saved_x.shape
    size = tile(dim)
    z = torch.empty_like(saved_x, dtype=DTYPES[Form.decode(form).z_dtype])
    if rows == 0:
        return z
    _launch(
        rebuild,
        triton.cdiv(rows, size.rows),
        saved_x,
        *(saved_x, saved_y, stats, *parameters[2:], z, rows, read_scale.item()),
        *(*form[-4:], dim, size.rows, size.block),
        warps=size.warps,
    )
    return z


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
    """The backward pass: gradients of the update, of the streams, and of all parameters, (n, dim) in float32.

    A gradient that is None is 0. Raises ValueError for more than 16384 columns.
    """
    what = Form.decode(form)
    rows, dim = saved_x.shape
    size = tile(dim)
    d_update, d_x, d_y, d_parameters = gradients = empty_gradients(saved_x, parameters, constants, what, update_dtype)
    if rows == 0:
        d_parameters.zero_()
        return gradients
    n_parameters = len(d_parameters)
    read = (
        *(dz if what.has_z else None, dx_out, dy_out if what.n_streams == 2 else None),
        *(update if what.norm_out.kind else None, saved_x, saved_y if what.norm_y.kind else None),
    )
    programs, stages = _plan(what, size, read, saved_x)
    partials = saved_x.new_empty((programs, n_parameters, dim), dtype=torch.float32)
    _launch(
        backward,
        programs,
        saved_x,
        *(*read, stats, *parameters, *(d if d.ndim == 2 else None for d in (d_update, d_x, d_y))),
        *(partials, rows, *_factors(what, scale, read_scale), *constants[:2]),
        *(*form[-4:], dim, size.rows, size.block, what.n_streams == 2, n_parameters, stages),
        warps=size.warps,
    )
    if n_parameters:
        n = n_parameters * dim
        tiles = triton.cdiv(n, SUM_COLUMNS)
        _launch(add_up, tiles, saved_x, partials, d_parameters, programs, n, SUM_ROWS, SUM_COLUMNS)
    return gradients


def _factors(form: Form, scale: Tensor, read_scale: Tensor) -> tuple[float, float]:
    """Of the update in x and of z; one stream adds the update as it is."""
    return scale.item() if form.n_streams == 2 else 1.0, read_scale.item()


def _plan(form: Form, size: Tile, read: Sequence[Tensor | None], saved_x: Tensor) -> tuple[int, int]:
    """How many programs share the rows, and how many rows each holds at once.

    As many programs as the registers of the GPU hold: with one norm twice as many as with several. If there is room in
    shared memory, a program fetches its next rows while it works on these.
    """
    n_blocks = triton.cdiv(len(saved_x), size.rows)
    if not saved_x.is_cuda:
        return min(PROGRAMS_INTERPRETED, n_blocks), 1
    gpu = torch.cuda.get_device_properties(saved_x.device)
    columns = 8192 if sum(norm.kind > 0 for norm in form.norms) == 1 else 4096
    programs = gpu.multi_processor_count * max(1, min(columns // 1024, columns // size.block))
    bytes_each = sum(t.element_size() for t in read if t is not None) + 4  # 4: room to rearrange a row
    fits = size.rows * size.block * bytes_each + 1024 <= gpu.shared_memory_per_block_optin
    return min(programs, n_blocks), 2 if fits else 1


def _launch(kernel: Any, programs: int, on: Tensor, *arguments: Any, warps: int = 4) -> None:
    """Starts a kernel, as so many programs of so many warps, where the tensor ``on`` is."""
    with torch.cuda.device_of(on):
        kernel[(programs,)](*arguments, **options(warps))


def options(warps: int) -> dict[str, Any]:
    """What Triton is told besides the arguments; left to itself it may give wide rows too few registers."""
    return {"num_warps": warps, "maxnreg": 128 if warps == MOST_WARPS else None, "enable_fp_fusion": True}
