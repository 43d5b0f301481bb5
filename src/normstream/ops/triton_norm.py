"""Norms inside Triton kernels.

A tile is a few rows, whole, in float32: (ROWS, BLOCK), where BLOCK is the width rounded up to a power of two. Beyond
the width a tile is 0, at all times. A norm is given by its code, see ``form.NormForm``. An absent gain or bias is
None, and nothing is compiled for it.
"""

from typing import no_type_check

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, whose conversion to bfloat16 cuts off instead of rounding."""


# Triton reads the source of the functions below, hence no_type_check: the tests' type checks would wrap them.


@triton.jit
@no_type_check
def load(pointer, mask):
    """Numbers in float32, 0 where the mask is not set."""
    return tl.load(pointer, mask, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def save(pointer, values, mask):
    """Stores in the dtype of the pointer, rounded to nearest."""
    if INTERPRETED and pointer.dtype.scalar.element_ty == tl.bfloat16:
        values = rounded(values, 1)
    tl.store(pointer, values, mask)


@triton.jit
@no_type_check
def rounded(values, DTYPE):
    """Rounded to bfloat16 (1), to float16 (2) or not at all (0), as float32."""
    if DTYPE == 1:
        if INTERPRETED:
            bits = values.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            return tl.where(values == values, bits.to(tl.float32, bitcast=True), values)
        else:
            return values.to(tl.bfloat16).to(tl.float32)
    elif DTYPE == 2:
        return values.to(tl.float16).to(tl.float32)
    else:
        return values


@triton.jit
@no_type_check
def parameter(pointer, columns, NORM, DIM):
    """A gain or bias as a tile of one row; with a zero-centred ``NORM``, 1 added."""
    row = load(pointer + columns, columns < DIM)
    if NORM & 4:
        row += 1.0
    return row


@triton.jit
@no_type_check
def finished(n, gain, bias, NORM):
    """A norm's output from the normalized tile: gain, bias, and the roundings in between."""
    out = rounded(n, (NORM >> 3) & 3)
    if gain is not None:
        out *= gain
    out = rounded(out, NORM >> 5)
    if bias is not None:
        out += bias
    return out


@triton.jit
@no_type_check
def norm(h, gain, bias, eps, stats, inside, mask, NORM, DIM):
    """The norm of each row; leaves its statistics at ``stats``, a pointer for each row."""
    if (NORM & 3) == 2:
        mean = tl.sum(h, 1, keep_dims=True) / DIM
        tl.store(stats, mean, inside)
        stats += 1
        h = tl.where(mask, h - mean, 0.0)
    square = tl.sum(h * h, 1, keep_dims=True) / DIM + eps
    rstd = tl.rsqrt(tl.where(inside, square, 1.0))
    tl.store(stats, rstd, inside)
    return finished(h * rstd, gain, bias, NORM)


@triton.jit
@no_type_check
def normalized(h, stats, inside, mask, NORM):
    """The rows over their deviation, and 1 / deviation, by the statistics of the forward pass."""
    if (NORM & 3) == 2:
        h = tl.where(mask, h - tl.load(stats, inside, other=0.0), 0.0)
        stats += 1
    rstd = tl.load(stats, inside, other=0.0)
    return h * rstd, rstd


@triton.jit
@no_type_check
def pulled_back(grad, n, rstd, gain, d_gain, d_bias, mask, NORM, DIM):
    """The gradient of a norm's input from that of its output, and the sums for gain and bias with these rows added."""
    d_bias += grad
    d_gain += grad * rounded(n, (NORM >> 3) & 3)
    if gain is not None:
        grad *= gain
    slope = tl.sum(grad * n, 1, keep_dims=True) / DIM
    if (NORM & 3) == 2:
        grad = tl.where(mask, grad - tl.sum(grad, 1, keep_dims=True) / DIM, 0.0)
    return rstd * (grad - n * slope), d_gain, d_bias
