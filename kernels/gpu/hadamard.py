"""The rotation of `kernels.hadamard` in Triton, on heads that are given in halves."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.hadamard import SIGN_BIT, SIGN_FACTOR

_SIGN_FACTOR = tl.constexpr(SIGN_FACTOR)
_SIGN_BIT = tl.constexpr(SIGN_BIT)
_FEWEST_ROWS = tl.constexpr(16)
"""Rows from which tensor cores multiply; fewer rows are added and subtracted element by element."""


@triton.jit
def signs(element):
    """Return 1.0 or -1.0 for elements of a head."""
    return 1.0 - 2.0 * ((element * _SIGN_FACTOR >> _SIGN_BIT) & 1).to(tl.float32)


@triton.jit
def small_matrix(HALF: tl.constexpr, MIXED: tl.constexpr, dtype: tl.constexpr):
    """Return the Hadamard matrices of a half's blocks, [HALF, HALF], without signs and without a scale."""
    row = tl.arange(0, HALF)[:, None]
    column = tl.arange(0, HALF)[None, :]
    odd = row & column & (MIXED - 1)
    odd ^= odd >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    elements = tl.where((odd & 1) == 1, -1.0, 1.0)
    return tl.where(row // MIXED == column // MIXED, elements, 0.0).to(dtype)


@triton.jit
def mix(x, MIXED: tl.constexpr):
    """Multiply rows [R, HALF] by their blocks' Hadamard matrices, by sums and differences."""
    element = tl.broadcast_to(tl.arange(0, x.shape[1])[None, :], x.shape)
    for i in tl.static_range(7):
        if 1 << i < MIXED:
            other = tl.gather(x, element ^ (1 << i), 1)
            x = tl.where(((element >> i) & 1) == 1, other - x, other + x)
    return x


@triton.jit
def hadamard_transform(first, second, D: tl.constexpr, dtype: tl.constexpr):
    """Multiply heads by `kernels.hadamard.hadamard_matrix`.

    Args:
        first: [R, HALF] `dtype`, the first halves; zeros from D / 2 on.
        second: the second halves.
        D: head dim.
        dtype: of the operands of tensor cores, which add in float32.

    Returns:
        Both halves, float32.
    """
    HALF: tl.constexpr = first.shape[1]
    MIXED: tl.constexpr = (D // 2) & -(D // 2)
    element = tl.arange(0, HALF)[None, :]
    first = first.to(tl.float32) * signs(element)
    second = second.to(tl.float32) * signs(element + D // 2)
    if first.shape[0] >= _FEWEST_ROWS and HALF >= _FEWEST_ROWS:
        matrix = small_matrix(HALF, MIXED, dtype)
        # Products with 1 and -1 are exact, so only their sums are rounded.
        first = tl.dot(first.to(dtype), matrix, input_precision="ieee")
        second = tl.dot(second.to(dtype), matrix, input_precision="ieee")
    else:
        first, second = mix(first, MIXED), mix(second, MIXED)
    scale: tl.constexpr = (2 * MIXED) ** -0.5
    return (first + second) * scale, (first - second) * scale
