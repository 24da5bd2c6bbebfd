"""Exponentials of the Blackwell softmax: a polynomial for part of them, and a running maximum that lags behind.

The special function unit of an SM computes 16 exponentials per cycle. Those of a tile of scores thus take as long as
the tile's products with 128 columns, so part of them is computed with multiply-adds.

`tests/kernels/attention/blackwell_model.py` computes the same in PyTorch.

Source: Zadouri et al., "FlashAttention-4", 2026, for both ideas; the polynomial and its range reduction are our own.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LAG = gl.constexpr(8.0)
"""Rows are rescaled when their maximum has grown by more than this, in units of log2: weights stay below 2^8."""
LOWEST_EXPONENT = gl.constexpr(-127.0)
"""Smaller arguments of the polynomial count as this one, whose result is exactly 0."""
ROUNDING = gl.constexpr(12582912.0)
"""1.5 * 2^23: float32 numbers near it are the integers, so adding it rounds, and the low bits are the integer."""
LINEAR = gl.constexpr(0.69328294)
QUADRATIC = gl.constexpr(0.24221112)
CUBIC = gl.constexpr(0.05500898)
"""Coefficients of the polynomial for 2^f, f from -0.5 to 0.5, that is 1 at 0 and has the smallest relative error."""


@gluon.jit
def polynomial_exp2(x):
    """Return 2^x for float32 `x` of at most 127, with a relative error of at most 1.1e-4 from -126 on.

    The argument is rounded with an addition, since the instructions that round or convert run on the special function
    unit too. The integer is added to the exponent's bits. Of a NaN it makes a NaN or a huge number.
    """
    x = gl.maximum(x, LOWEST_EXPONENT, propagate_nan=tl.PropagateNan.ALL)
    shifted = x + ROUNDING
    fraction = x - (shifted - ROUNDING)
    y = gl.fma(fraction, CUBIC, QUADRATIC)
    y = gl.fma(y, fraction, LINEAR)
    y = gl.fma(y, fraction, 1.0)
    bits = y.to(gl.int32, bitcast=True) + (shifted.to(gl.int32, bitcast=True) << 23)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def exponentials(x, c):
    """Return 2^x of a tile [ROWS, BLOCK_N]: the last quarter of the columns by polynomial, the others by the hardware.

    With a quarter, neither the special function unit nor the issue of instructions takes as long as the products with
    128 columns, by count.
    """
    first, second = halves(x)
    third, fourth = halves(second)
    e = joined(gl.exp2(first), joined(gl.exp2(third), polynomial_exp2(fourth)))
    return gl.convert_layout(e, c.S_LAYOUT, assert_trivial=True)


@gluon.jit
def halves(x):
    """Split a tile into its first and its last columns."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def joined(first, last):
    """Join the tiles of `halves`."""
    last = gl.convert_layout(last, first.type.layout, assert_trivial=True)
    return gl.join(first, last).permute((0, 2, 1)).reshape([first.shape[0], 2 * first.shape[1]])


@gluon.jit
def largest_of_rows(s, c):
    """Return the largest score of each row, computed in eight chains."""
    x = gl.max(gl.max(s.reshape([s.shape[0], c.BLOCK_N // 8, 8]), 1), 1)
    return gl.convert_layout(x, gl.SliceLayout(1, c.S_LAYOUT), assert_trivial=True)


@gluon.jit
def sums_of_rows(e, c):
    """Return the sum of each row, computed in eight chains."""
    x = gl.sum(gl.sum(e.reshape([e.shape[0], c.BLOCK_N // 8, 8]), 1), 1)
    return gl.convert_layout(x, gl.SliceLayout(1, c.S_LAYOUT), assert_trivial=True)


@gluon.jit
def lagging_maximum(m, largest):
    """Return the rows' new maxima, which stay as they are while they are exceeded by at most `LAG`.

    A row that has seen no key has the maximum -inf; the first key replaces it.
    """
    return gl.where(largest - m > LAG, largest, m)
