"""Triton device functions that convert float8_e4m3fn to the dtypes in which the portable kernels multiply."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unpack_pairs(pairs):
    """Convert 16-bit pairs of e4m3 bytes to two float16 tensors: the low bytes and the high bytes.

    Four numbers take one permutation and two conversions; the code that the compiler generates takes three times as
    many instructions.
    """
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
        }
        """,
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def times(number, factor):
    """Multiply two numbers."""
    return number * factor


@triton.jit
def rescale(tile, scale, dtype: tl.constexpr):
    """Multiply the rows of a float8 tile by their scales."""
    # `map_elementwise` keeps the compiler from moving the arithmetic after the exchange through shared memory, where
    # every warp would convert the whole tile: 2672 instructions instead of 760 for a tile of 64 keys on sm_89.
    wide = tile.to(tl.float16).to(tl.float32)
    return tl.map_elementwise(times, wide, scale[:, None]).to(dtype)
