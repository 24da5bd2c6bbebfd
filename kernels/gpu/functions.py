"""Device functions that the fused kernels share: prefetching, norms, rotations, gates and ranking keys."""

from __future__ import annotations

import triton
import triton.language as tl

LINE_BYTES = tl.constexpr(128)
"""Bytes that the second-level cache fetches at once."""
LOWEST_KEY = tl.constexpr(-(2**63))
MINUS_INFINITY = tl.constexpr(-0x7F800001)
"""The `ranking_bits` of minus infinity."""


@triton.jit
def prefetch(addresses):
    """Prefetch the cache lines of some addresses to the second-level cache, without using registers for the data."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [addresses.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fetch_lines(first, second, lines_1, lines_2, start, COUNT: tl.constexpr):
    """Prefetch COUNT lines of two tensors, from line `start` of both together, to the second-level cache.

    A program whose lines all lie past the end fetches nothing: many programs that fetch the same line would wait for
    each other.
    """
    if start < lines_1 + lines_2:
        line = tl.minimum(start + tl.arange(0, COUNT), lines_1 + lines_2 - 1)
        base = tl.where(line < lines_1, first.to(tl.int64), second.to(tl.int64))
        prefetch(base + tl.where(line < lines_1, line, line - lines_1).to(tl.int64) * LINE_BYTES)


@triton.jit
def load_halves(address, exists, D: tl.constexpr):
    """Load the two halves of vectors of D elements; 0 where they do not exist."""
    first = tl.load(address, mask=exists, other=0.0)
    return first, tl.load(address + D // 2, mask=exists, other=0.0)


@triton.jit
def normalize_halves(first, second, gain_1, gain_2, eps, D: tl.constexpr, dtype: tl.constexpr):
    """Normalize heads, given in halves, over D; float32 values that are rounded to `dtype`.

    PyTorch rounds after the projection, the norm and the rotation, and a cached key is used by many steps.
    """
    squares = tl.sum(first * first + second * second, 1)[:, None]
    scale = 1.0 / tl.sqrt(squares / D + eps)
    first = (first * scale * gain_1).to(dtype)
    second = (second * scale * gain_2).to(dtype)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def rotate_halves(first, second, cosine, sine):
    """Rotate heads, given in halves, by the angles of their token."""
    return first * cosine - second * sine, second * cosine + first * sine


@triton.jit
def silu(x):
    """Multiply float32 by its sigmoid."""
    # `exp2` is one instruction; `exp` adds others for results so small that they do not change the sum.
    return x / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def fast_silu(x):
    """Do what `silu` does, in five instructions rather than fourteen; results of less than about 2^-119 are 0.

    Triton's interpreter, which runs no assembly, takes `silu` in its place.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
        " rcp.approx.ftz.f32 t, t; mul.f32 $0, $1, t; }",
        "=f,f",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def product(x, y):
    """Multiply float32 and round: the compiler may not make the product part of a fused addition.

    Which product of a sum it fuses differs from kernel to kernel. Triton's interpreter multiplies.
    """
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def ranking_bits(values):
    """Return int32 values with the order of float32 values; NaN is the largest.

    Zeros of both signs are equal, as in `torch.argmax`.
    """
    values = tl.where(values == 0.0, 0.0, values)
    bits = values.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(values != values, 0x7FFFFFFF, bits)


@triton.jit
def ranked_value(bits):
    """Return the float32 values of `ranking_bits`."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def exponentials(bits, largest):
    """Return exp(value - largest value) of float32 values given by their `ranking_bits`; 0 from minus infinity down.

    Args:
        bits: int32.
        largest: int32, at least all of `bits`; of a shape that broadcasts.
    """
    distances = ranked_value(bits) - ranked_value(largest)
    return tl.where(bits > MINUS_INFINITY, tl.exp(distances), 0.0)


@triton.jit
def log_of_total(total):
    """Return the logarithm of a sum of `exponentials` that includes the largest; 0 where the largest is not finite."""
    return tl.log(tl.maximum(total, 1.0))


@triton.jit
def ranked_bits(key):
    """Return the `ranking_bits` in a key."""
    return (key >> 32).to(tl.int32)


@triton.jit
def ranking_keys(values, ids):
    """Return int64 keys that order by value, as `ranking_bits` does; of equal values the smaller id is larger.

    Args:
        values: float32.
        ids: int32, at least 0, of a shape that broadcasts.
    """
    return (ranking_bits(values).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def ranked_id(key):
    """Return the id in a key, int64."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def ranked_is_finite(key):
    """Whether a key's value is finite: its bits lie between those of the infinities."""
    bits = key >> 32
    return (bits < 0x7F800000) & (bits > -0x7F800001)
