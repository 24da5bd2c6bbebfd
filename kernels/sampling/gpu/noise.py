"""Gumbel noise by token id (`kernels.sampling.noise`)."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling import noise
from kernels.sampling.gpu.row_table import NOISE_HIGH, NOISE_LOW

ID_STEP = tl.constexpr(noise.ID_STEP)
FIRST_FACTOR = tl.constexpr(noise.FIRST_FACTOR)
SECOND_FACTOR = tl.constexpr(noise.SECOND_FACTOR)
LARGEST_FRACTION = tl.constexpr(noise.LARGEST_FRACTION)


@triton.jit
def load_noise_key(entry):
    """Return the key of a row's noise, two uint32, from the address of the row's entry in the table."""
    low = tl.load(entry + NOISE_LOW).to(tl.int64).to(tl.uint32)
    return low, tl.load(entry + NOISE_HIGH).to(tl.int64).to(tl.uint32)


@triton.jit
def wrapping_product(x, factor: tl.constexpr):
    """Return the lower 32 bits of a product; a debug build reports products of `*` that need more."""
    return tl.mul(x, factor, sanitize_overflow=False)


@triton.jit
def gumbel_noise(key, ids):
    """Return the noise, float32, of tokens.

    Args:
        key: from `load_noise_key`.
        ids: int32 or int64, >= 0.
    """
    low, high = key
    x = wrapping_product(ids.to(tl.uint32), ID_STEP)
    x = tl.add(x, low, sanitize_overflow=False)
    x = wrapping_product(x ^ (x >> 16), FIRST_FACTOR)
    x = wrapping_product(x ^ (x >> 15) ^ high, SECOND_FACTOR)
    x = x ^ (x >> 16)
    v = tl.minimum((x.to(tl.float32) + 0.5) * 2.0**-32, LARGEST_FRACTION)
    # 1 - v loses the bits of a small v, and the device's logarithm is inaccurate near 1: there the series of
    # -log(1 - v) = 2 atanh(v / (2 - v)), whose first term left out is below 2^-25 of the sum.
    s = v / (2.0 - v)
    square = s * s
    series = 2.0 * s * (1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7))))
    exponential = tl.where(v < 0.25, series, 0.0 - tl.log(1.0 - v))
    return 0.0 - tl.log(exponential)
