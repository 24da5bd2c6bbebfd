"""Rounding of keys and values to float8_e4m3fn in Triton, with the bits of `kernels.fp8.quantize_kv_rows`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import current_target

from kernels.arch import FP8_INSTRUCTIONS
from kernels.fp8 import LARGEST_E4M3, SCALE_EXPONENT, SCALE_ROUNDING, SMALLEST_AMAX

_LARGEST = tl.constexpr(LARGEST_E4M3)
_SCALE_ROUNDING = tl.constexpr(SCALE_ROUNDING)
_SCALE_EXPONENT = tl.constexpr(SCALE_EXPONENT)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)


@triton.constexpr_function
def converts_e4m3():
    """Whether the GPU that a kernel is compiled for has an instruction that rounds to e4m3."""
    target = current_target()
    return target is not None and target.backend == "cuda" and target.arch in FP8_INSTRUCTIONS


@triton.jit
def to_e4m3(x):
    """Round numbers of at most 448 to e4m3, to the nearest, ties to even; return bytes. Infinity and NaN become NaN."""
    if converts_e4m3():
        # The instruction would turn infinity into 448.
        finite = tl.where(tl.abs(x) <= _LARGEST, x, float("nan"))
        rounded = finite.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        rounded = e4m3_bits(x)
    return rounded


@triton.jit
def e4m3_bits(x):
    """Round like `to_e4m3`, by integer arithmetic.

    Integer arithmetic makes every GPU and the interpreter round as PyTorch does; the compiler supports the conversion
    only from sm_89 on. Below 2^-6, e4m3 numbers are multiples of 2^-9, the spacing of float32 numbers above 2^14,
    so adding 2^14 rounds to such a multiple.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + ((size >> 20) & 1) - (120 << 23)) >> 20
    tiny = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    rounded = tl.where(size < (121 << 23), tiny, normal)
    rounded = tl.where(size >= 0x7F800000, 0x7F, tl.minimum(rounded, 0x7E))
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def scale_bits(largest):
    """Return the bits of the scale of rows with these largest magnitudes; see `kernels.fp8.quantize_kv_rows`."""
    bits = tl.maximum(largest, _SMALLEST_AMAX).to(tl.int32, bitcast=True)
    return ((bits + _SCALE_ROUNDING) & 0x7F800000) - (_SCALE_EXPONENT << 23)


@triton.jit
def powers_of_two(bits):
    """Return the powers of two with these bits, and their inverses."""
    inverse = 0x7F000000 - bits
    return bits.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def quantize(rows):
    """Quantize rows [heads, D]; return e4m3 bytes and the scales."""
    wide = rows.to(tl.float32)
    scale, inverse = powers_of_two(scale_bits(tl.max(tl.abs(wide), 1)))
    return to_e4m3(wide * inverse[:, None]), scale
