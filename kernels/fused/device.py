"""Device functions that the fused kernels share: waiting for the kernel before, gates, and keys to rank by.

Know values and addresses, not whose they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

LINE_BYTES = tl.constexpr(128)
"""What the second-level cache fetches at once."""
LOWEST_KEY = tl.constexpr(-(2**63))


@triton.jit
def prefetch(addresses):
    """Have the second-level cache fetch the lines of some addresses; needs no register to arrive in."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [addresses.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def silu(x):
    """Multiply float32 by its sigmoid."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def ranking_keys(values, ids):
    """Return int64 keys that order by value, then by smaller id; what is not a number is the largest.

    Zeros of both signs are equal, as they are to `torch.argmax`.

    Args:
        values: float32.
        ids: int32, at least 0, of a shape that broadcasts.
    """
    values = tl.where(values == 0.0, 0.0, values)
    bits = values.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(values != values, 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def ranked_id(key):
    """Return the id in a key, int64."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def ranked_is_finite(key):
    """Say whether a key's value is a finite number: between the infinities' bits."""
    bits = key >> 32
    return (bits < 0x7F800000) & (bits > -0x7F800001)
