"""The kernels of a junction's backward pass: one for the rows, one that adds up the gradients of gains and biases.

A program takes every n-th row, n being the number of programs; what its rows add to the gradients of the parameters it
keeps in registers until the end.
"""

from typing import no_type_check

import triton
import triton.language as tl

from normstream.ops.triton_norm import finished, load, normalized, parameter, pulled_back, save


@triton.jit(do_not_specialize=["n_rows"])
@no_type_check
def backward(
    dz,
    dx_out,
    dy_out,
    update,
    saved_x,
    saved_y,
    stats,
    out_gain,
    out_bias,
    x_gain,
    x_bias,
    y_gain,
    y_bias,
    in_gain,
    in_bias,
    c,
    d_update,
    d_x,
    d_y,
    partials,
    n_rows,
    scale,
    read_scale,
    alpha,
    second,
    OUT: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    IN: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO: tl.constexpr,
    N_PARAMETERS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The junction's backward pass over all rows; what a program sums for parameters is left in ``partials``."""
    columns = tl.arange(0, BLOCK)[None, :]
    g_out = parameter(out_gain, columns, OUT, DIM) if out_gain is not None else None
    g_x = parameter(x_gain, columns, X, DIM) if x_gain is not None else None
    b_x = parameter(x_bias, columns, 0, DIM) if x_bias is not None else None
    g_y = parameter(y_gain, columns, Y, DIM) if y_gain is not None else None
    b_y = parameter(y_bias, columns, 0, DIM) if y_bias is not None else None
    g_in = parameter(in_gain, columns, IN, DIM) if in_gain is not None else None
    c_row = parameter(c, columns, 0, DIM) if c is not None else None
    zero = tl.zeros([ROWS, BLOCK], tl.float32)
    d_out_gain, d_out_bias, d_x_gain, d_x_bias = zero, zero, zero, zero
    d_y_gain, d_y_bias, d_in_gain, d_in_bias, d_c = zero, zero, zero, zero, zero

    for block in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS)[:, None]
        inside = row < n_rows
        mask = inside & (columns < DIM)
        row = row.to(tl.int64)
        at = row * DIM + columns
        of_out = stats + row * ((OUT & 3) + (X & 3) + (Y & 3) + (IN & 3))
        of_x = of_out + (OUT & 3)
        of_y = of_x + (X & 3)

        grad_x = load(dx_out + at, mask) if dx_out is not None else zero
        grad_y = load(dy_out + at, mask) if dy_out is not None else zero
        x_new = load(saved_x + at, mask)
        if X & 3:
            x_n, x_rstd = normalized(x_new, of_x, inside, mask, X)
            x_new = finished(x_n, g_x, b_x, X)

        if dz is not None:
            grad = read_scale * load(dz + at, mask)
            w = x_new
            if Y & 3:
                y_n, y_rstd = normalized(load(saved_y + at, mask), of_y, inside, mask, Y)
                if c is not None:
                    w *= c_row
                w += finished(y_n, g_y, b_y, Y)
            if IN & 3:
                n, rstd = normalized(w, of_y + (Y & 3), inside, mask, IN)
                grad, d_in_gain, d_in_bias = pulled_back(grad, n, rstd, g_in, d_in_gain, d_in_bias, mask, IN, DIM)
            if Y & 3:
                through, d_y_gain, d_y_bias = pulled_back(grad, y_n, y_rstd, g_y, d_y_gain, d_y_bias, mask, Y, DIM)
                grad_y += through
                if c is not None:
                    d_c += grad * x_new
                    grad *= c_row
            grad_x += grad

        if X & 3:
            grad_x, d_x_gain, d_x_bias = pulled_back(grad_x, x_n, x_rstd, g_x, d_x_gain, d_x_bias, mask, X, DIM)
        if d_x is not None:
            save(d_x + at, alpha * grad_x, mask)
        if d_y is not None:
            save(d_y + at, grad_y, mask)
        if d_update is not None:
            grad = scale * grad_x
            if TWO:
                grad += second * grad_y
            if OUT & 3:
                n, rstd = normalized(load(update + at, mask), of_out, inside, mask, OUT)
                grad, d_out_gain, d_out_bias = pulled_back(grad, n, rstd, g_out, d_out_gain, d_out_bias, mask, OUT, DIM)
            save(d_update + at, grad, mask)

    sums = partials + tl.program_id(0).to(tl.int64) * (N_PARAMETERS * DIM) + columns
    sums = leave(sums, out_gain, d_out_gain, columns, DIM)
    sums = leave(sums, out_bias, d_out_bias, columns, DIM)
    sums = leave(sums, x_gain, d_x_gain, columns, DIM)
    sums = leave(sums, x_bias, d_x_bias, columns, DIM)
    sums = leave(sums, y_gain, d_y_gain, columns, DIM)
    sums = leave(sums, y_bias, d_y_bias, columns, DIM)
    sums = leave(sums, in_gain, d_in_gain, columns, DIM)
    sums = leave(sums, in_bias, d_in_bias, columns, DIM)
    leave(sums, c, d_c, columns, DIM)


@triton.jit
@no_type_check
def leave(sums, parameter, gradient, columns, DIM):
    """Stores the gradient of a parameter if there is one; returns where the next gradient belongs."""
    if parameter is None:
        return sums
    else:
        tl.store(sums, tl.sum(gradient, 0, keep_dims=True), columns < DIM)
        return sums + DIM


@triton.jit(do_not_specialize=["n_programs"])
@no_type_check
def add_up(partials, totals, n_programs, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The column sums of the matrix (n_programs, n)."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, n_programs, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        total += load(partials + rows.to(tl.int64) * n + columns, (rows < n_programs) & (columns < n))
    tl.store(totals + columns, tl.sum(total, 0, keep_dims=True), columns < n)
