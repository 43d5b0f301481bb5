"""The kernel of a junction's forward pass, and one that makes z again.

A program takes one row (narrow ones: a few) from memory and back, once.
"""

from typing import no_type_check

import triton
import triton.language as tl

from normstream.ops.triton_norm import finished, load, norm, normalized, parameter, save


@triton.jit(do_not_specialize=["n_rows"])
@no_type_check
def forward(
    update,
    x,
    y,
    out_gain,
    out_bias,
    x_gain,
    x_bias,
    y_gain,
    y_bias,
    in_gain,
    in_bias,
    c,
    x_out,
    y_out,
    z,
    raw_x,
    stats,
    n_rows,
    scale,
    read_scale,
    alpha,
    second,
    eps_out,
    eps_x,
    eps_y,
    eps_in,
    OUT: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    IN: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The junction's forward pass; arguments as for ``triton_junction.junction``, None for what a form lacks."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = row < n_rows
    mask = inside & (columns < DIM)
    row = row.to(tl.int64)
    at = row * DIM + columns
    stats += row * ((OUT & 3) + (X & 3) + (Y & 3) + (IN & 3))

    u = load(update + at, mask)
    if x is not None:
        x_row = load(x + at, mask)
    if y is not None:
        y_row = load(y + at, mask)

    if OUT & 3:
        gain = parameter(out_gain, columns, OUT, DIM) if out_gain is not None else None
        bias = parameter(out_bias, columns, 0, DIM) if out_bias is not None else None
        u = norm(u, gain, bias, eps_out, stats, inside, mask, OUT, DIM)
        stats += OUT & 3
    x_new = scale * u
    if x is not None:
        x_new += alpha * x_row
    if y_out is not None:
        y_new = second * u
        if y is not None:
            y_new += y_row
        save(y_out + at, y_new, mask)

    if X & 3:
        save(raw_x + at, x_new, mask)
        gain = parameter(x_gain, columns, X, DIM) if x_gain is not None else None
        bias = parameter(x_bias, columns, 0, DIM) if x_bias is not None else None
        x_new = norm(x_new, gain, bias, eps_x, stats, inside, mask, X, DIM)
        stats += X & 3
    save(x_out + at, x_new, mask)

    if z is not None:
        w = x_new
        if Y & 3:
            if c is not None:
                w *= parameter(c, columns, 0, DIM)
            gain = parameter(y_gain, columns, Y, DIM) if y_gain is not None else None
            bias = parameter(y_bias, columns, 0, DIM) if y_bias is not None else None
            w += norm(y_new, gain, bias, eps_y, stats, inside, mask, Y, DIM)
            stats += Y & 3
        if IN & 3:
            gain = parameter(in_gain, columns, IN, DIM) if in_gain is not None else None
            bias = parameter(in_bias, columns, 0, DIM) if in_bias is not None else None
            w = norm(w, gain, bias, eps_in, stats, inside, mask, IN, DIM)
        save(z + at, read_scale * w, mask)


@triton.jit(do_not_specialize=["n_rows"])
@no_type_check
def rebuild(
    saved_x,
    saved_y,
    stats,
    x_gain,
    x_bias,
    y_gain,
    y_bias,
    in_gain,
    in_bias,
    c,
    z,
    n_rows,
    read_scale,
    OUT: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    IN: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """z once more, from what the forward pass saved."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = row < n_rows
    mask = inside & (columns < DIM)
    row = row.to(tl.int64)
    at = row * DIM + columns
    stats += row * ((OUT & 3) + (X & 3) + (Y & 3) + (IN & 3)) + (OUT & 3)

    w = load(saved_x + at, mask)
    if X & 3:
        gain = parameter(x_gain, columns, X, DIM) if x_gain is not None else None
        bias = parameter(x_bias, columns, 0, DIM) if x_bias is not None else None
        n, _ = normalized(w, stats, inside, mask, X)
        w = finished(n, gain, bias, X)
    if Y & 3:
        if c is not None:
            w *= parameter(c, columns, 0, DIM)
        gain = parameter(y_gain, columns, Y, DIM) if y_gain is not None else None
        bias = parameter(y_bias, columns, 0, DIM) if y_bias is not None else None
        n, _ = normalized(load(saved_y + at, mask), stats + (X & 3), inside, mask, Y)
        w += finished(n, gain, bias, Y)
    if IN & 3:
        gain = parameter(in_gain, columns, IN, DIM) if in_gain is not None else None
        bias = parameter(in_bias, columns, 0, DIM) if in_bias is not None else None
        n, _ = normalized(w, stats + (X & 3) + (Y & 3), inside, mask, IN)
        w = finished(n, gain, bias, IN)
    save(z + at, read_scale * w, mask)
