"""The inner loop of the portable kernels over a float8_e4m3fn cache: like `tile`, with a scale for each key and value.

    scores     (q . k) * key's scale: the dot multiplies the unscaled cache elements, in float16
    weights    exp2(score - m) * value's scale / w, in float16; the sum of exponentials excludes the scales
    values     read as pairs of bytes and converted to float16 in registers

Float16 represents every e4m3 number exactly, and the hardware converts e4m3 to it; bfloat16 would take three
more instructions for two numbers. Float16 has a smaller range, so:

    q          is clamped to 65504
    weights    go up to 2^15 instead of 1, so that a weight of 2^-29 of the largest still has all
               11 bits; w, a power of two, is at least the largest scale of a value so far

A pair of bytes is two adjacent dimensions of one key. A tile of values that is loaded as 16-bit numbers can be
transposed for the tensor cores as it is read from shared memory, which is impossible with single bytes. The
even and the odd columns are then two matrix products with the same weights.

Source: scales outside the dot as in SageAttention, Zhang et al., 2024; larger weights as in Shah et al.,
"FlashAttention-3", 2024.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.portable.float8 import unpack_pairs
from kernels.attention.portable.tile import (
    cap_scores,
    hide_scores,
    keys_of_tile,
    load_blocks,
    load_part,
    offsets_in_blocks,
)

_LARGEST_FLOAT16 = tl.constexpr(65504.0)
_WEIGHT_BITS = tl.constexpr(15.0)
"""The largest weight is 2^15; the largest float16 is just below 2^16."""
_SMALLEST_SCALE = tl.constexpr(2.0**-120)
"""Initial w, a power of two; the scales that `write_kv` writes are larger."""


def takes_pairs(first: int, second: int) -> bool:
    """Whether to use `attend_pairs` for a head dim of first + second.

    Four warps divide the columns of one matrix product, eight each. With fewer than 32 columns they would compute the
    same columns, and converting the tile first is faster.
    """
    return min(first, second or first) >= 64


@triton.jit
def to_float16(q):
    """Convert queries to float16, clamped to its largest number."""
    q = q.to(tl.float32)
    return tl.minimum(tl.maximum(q, -_LARGEST_FLOAT16), _LARGEST_FLOAT16).to(tl.float16)


@triton.jit
def next_power_of_two(x):
    """Round positive normal numbers up to powers of two."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power_of_two(x):
    """Divide 1 by powers of two, exactly."""
    return (0x7F000000 - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def larger_of_both(a0, b0, a1, b1):
    """Reduce two tensors in one reduction, with a single synchronization of the warps."""
    return tl.maximum(a0, a1), tl.maximum(b0, b1)


@triton.jit
def weigh_values(p, pairs, acc, fade):
    """Multiply the even and the odd columns of a tile of values by the weights, and add them to the accumulators."""
    even, odd = unpack_pairs(pairs)
    acc_even, acc_odd = acc
    acc_even = tl.dot(p, even, acc_even * fade[:, None])
    acc_odd = tl.dot(p, odd, acc_odd * fade[:, None])
    return acc_even, acc_odd


@triton.jit
def interleave(acc, w):
    """Interleave the even and the odd columns, and multiply by the values' scale `w`."""
    even, odd = acc
    joined = tl.join(even, odd)
    return joined.reshape(joined.shape[0], 2 * joined.shape[1]) * w[:, None]


@triton.jit
def attend_pairs(
    q, k_base, v_base, scales, table, begin, end, num_keys, last_seen, lowest, stride, scale, window, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    """Compute attention to the keys from begin to end of one sequence, like `tile.attend` with ONE_LOOP.

    Args:
        q: as in `attend`, as are all arguments that are not listed here.
        v_base: pointer to value 0 of the head, in pairs of bytes.
        stride: elements between one key and the next, and between one value and the next.

    Returns:
        As for `attend`.
    """
    k_scales, v_scales, stride_scale = scales
    q1, q2 = q
    q1, q2 = to_float16(q1), to_float16(q2)
    half1: tl.constexpr = D1 // 2
    half2: tl.constexpr = D2 // 2 if D2 > 0 else 1
    acc1 = (tl.zeros([BLOCK_M, half1], tl.float32), tl.zeros([BLOCK_M, half1], tl.float32))
    acc2 = (tl.zeros([BLOCK_M, half2], tl.float32), tl.zeros([BLOCK_M, half2], tl.float32))
    m = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    w = tl.full([BLOCK_M], _SMALLEST_SCALE, dtype=tl.float32)
    columns = tl.arange(0, D1)[None, :]
    pairs = tl.arange(0, D1 // 2)[None, :]
    key = begin + tl.arange(0, BLOCK_N)
    block = load_blocks(table, key, num_keys, BLOCK_SIZE, True)
    for start in tl.range(begin, end, BLOCK_N):
        key, exists = keys_of_tile(start, num_keys, lowest, window, True, WINDOW, BLOCK_N)
        offset = offsets_in_blocks(key, BLOCK_SIZE, BLOCK_N)
        # The cache has fewer than 2^31 slots, but element offsets may exceed 32 bits.
        slot = (block * BLOCK_SIZE + offset).to(tl.int64)
        place = block.to(tl.int64) * stride_scale + offset
        # Block ids are loaded a tile ahead, since keys cannot be loaded before their address is known.
        block = load_blocks(table, key + BLOCK_N, num_keys, BLOCK_SIZE, True)
        k_scale = load_part(k_scales + place, exists, True)
        v_scale = load_part(v_scales + place, exists, True)
        rows = exists[:, None]
        keys = k_base + (slot * stride)[:, None]
        values = v_base + (slot * (stride // 2))[:, None]
        k1 = load_part(keys + columns, rows, True)
        scores = tl.dot(q1, k1.to(tl.float16).T)
        if D2 > 0:
            k2 = load_part(keys + D1 + tl.arange(0, D2)[None, :], rows, True)
            scores = tl.dot(q2, k2.to(tl.float16).T, scores)
        scores, factor = cap_scores(scores * k_scale[None, :], scale, softcap, SOFTCAP)
        scores = hide_scores(scores, key, exists, last_seen, window, CAUSAL, WINDOW)
        largest, largest_scale = tl.reduce(
            (scores, tl.broadcast_to(v_scale[None, :], scores.shape)), 1, larger_of_both
        )
        new_m = tl.maximum(m, largest * factor - _WEIGHT_BITS)
        # A row that has seen no key has the maximum -inf, and -inf - -inf is NaN.
        base = tl.where(new_m == -float("inf"), 0.0, new_m)
        p = tl.exp2(scores * factor - base[:, None])
        fade = tl.exp2(m - base)
        total = total * fade + tl.sum(p, 1)
        m = new_m
        new_w = tl.maximum(w, next_power_of_two(largest_scale))
        inverse = inverse_power_of_two(new_w)
        p = (p * (v_scale[None, :] * inverse[:, None])).to(tl.float16)
        fade = fade * (w * inverse)
        w = new_w
        acc1 = weigh_values(p, load_part(values + pairs, rows, True), acc1, fade)
        if D2 > 0:
            v2 = load_part(values + D1 // 2 + tl.arange(0, D2 // 2)[None, :], rows, True)
            acc2 = weigh_values(p, v2, acc2, fade)
    return interleave(acc1, w), interleave(acc2, w), m, total
