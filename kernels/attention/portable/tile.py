"""The inner loop of the portable kernel: one tile of query rows over a range of keys.

Triton device functions, inlined into `attention`.

    rows      the query heads of one key-value head, packed token by token: row r is head r % G of
              token r // G, so that all heads of a group share one read of the keys
    keys      tokens first to last of one sequence; tile edges are multiples of BLOCK_N
    head dim  a power of two D1, or the sum of two, D1 + D2: 80 = 64 + 16, 96 = 64 + 32, 192 = 128 + 64,
              because tile sizes must be powers of two and padding 80 to 128 would waste a third

Scores are in units of log2, since the hardware's exponential has base 2: m is the running
maximum of score * log2(e), total the running sum of exp2(score - m).

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.attention.portable.float8 import rescale
from kernels.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.attention.problem import AttentionProblem

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
FEWEST_SEQUENCES = 64
"""Smallest number of sequences for which a step's work list is compiled; each larger power of two is compiled too."""
_LARGEST_INT32 = (1 << 31) - 1
_WIDEST_WINDOW = 1 << 30
"""Longer than any sequence; a position minus this fits in 32 bits, also for positions before the first key."""


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """Split a head dim into two powers of two, the second possibly 0.

    Raises:
        AssertionError: it is neither a power of two nor the sum of two, each at least 16.
    """
    first = 1 << (head_dim.bit_length() - 1)
    second = head_dim - first
    assert first >= 16, head_dim
    assert second == 0 or (second >= 16 and second.bit_count() == 1), head_dim
    return first, second


def check_head_stride(q: Tensor) -> None:
    """Check that the heads of a token lie within 2^31 elements; tokens may have any distance.

    The offset of a head is computed in 32 bits, since 64-bit offsets need registers that the largest tiles do not have.

    Raises:
        ShapeError: the last head is 2^31 elements or more after the first.
    """
    if (q.shape[1] - 1) * q.stride(1) > _LARGEST_INT32:
        raise ShapeError(
            f"the {q.shape[1]} heads of q lie {q.stride(1)} elements apart; the last may lie at most "
            f"{_LARGEST_INT32} behind the first"
        )


def scale_arguments(kv: Tensor, kv_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the kernels' arguments for the scales of keys and values; dummy tensors if there are no scales."""
    keys, values = (kv if kv_scale is None else kv_scale).unbind(0)
    return keys, values


def window_argument(problem: AttentionProblem) -> int:
    """Return the kernels' window argument; 0 for none."""
    return min(problem.sliding_window or 0, _WIDEST_WINDOW)


@triton.jit
def load_part(pointers, mask, MASK: tl.constexpr):
    """Load a tile; if MASK, rows outside `mask` become 0 and are not read."""
    if MASK:
        tile = tl.load(pointers, mask=mask, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_rows(base, offsets, mask, D1: tl.constexpr, D2: tl.constexpr, MASK: tl.constexpr):
    """Load [rows, D1] and [rows, D2] at base + offsets; the second repeats the first if D2 is 0."""
    columns = tl.arange(0, D1)
    first = load_part(base + offsets[:, None] + columns[None, :], mask[:, None], MASK)
    second = first
    if D2 > 0:
        columns = D1 + tl.arange(0, D2)
        second = load_part(base + offsets[:, None] + columns[None, :], mask[:, None], MASK)
    return first, second


@triton.jit
def store_rows(base, offsets, mask, first, second, D1: tl.constexpr, D2: tl.constexpr):
    """Store [rows, D1] and, unless D2 is 0, [rows, D2] at base + offsets."""
    tl.store(base + offsets[:, None] + tl.arange(0, D1)[None, :], first, mask=mask[:, None])
    if D2 > 0:
        columns = D1 + tl.arange(0, D2)
        tl.store(base + offsets[:, None] + columns[None, :], second, mask=mask[:, None])


@triton.jit
def tanh(x):
    """Compute the hyperbolic tangent with the base-2 exponential; exactly -1 and 1 for large magnitudes."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)


@triton.jit
def load_blocks(table, key, num_keys, BLOCK_SIZE: tl.constexpr, PAGED: tl.constexpr):
    """Load the block id of each key; entries past the sequence's end are not read."""
    if PAGED:
        block = tl.load(table + key // BLOCK_SIZE, mask=key < num_keys, other=0)
    else:
        block = tl.zeros_like(key)
    return block


@triton.jit
def keys_of_tile(
    start, num_keys, lowest, window, MASK: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the indices of the keys of the tile at `start`, and the mask of those that may be read."""
    key = start + tl.arange(0, BLOCK_N)
    exists = key < num_keys
    if WINDOW and MASK:
        # The blocks of keys before every row's window may have been freed, so they are not read.
        exists = exists & (key > lowest - window)
    return key, exists


@triton.jit
def offsets_in_blocks(key, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return each key's offset in its block; it is the same for all tiles if BLOCK_SIZE divides BLOCK_N."""
    offset = key % BLOCK_SIZE
    if BLOCK_N % BLOCK_SIZE == 0:
        offset = tl.arange(0, BLOCK_N) % BLOCK_SIZE
    return offset


@triton.jit
def cap_scores(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Apply the softcap, if there is one; also return the factor that converts the scores to units of log2."""
    if SOFTCAP:
        scores = tanh(scores * (scale / softcap)) * (softcap * LOG2_E)
        factor = 1.0
    else:
        factor = scale * LOG2_E
    return scores, factor


@triton.jit
def hide_scores(scores, key, exists, last_seen, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Set the scores of keys that a row does not see to -inf."""
    seen = exists[None, :]
    if CAUSAL:
        seen = seen & (key[None, :] <= last_seen[:, None])
    if WINDOW:
        seen = seen & (key[None, :] > last_seen[:, None] - window)
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def dequantize(
    tiles, scales, stride, block, key, exists,
    dtype: tl.constexpr, MASK: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    D2: tl.constexpr,
):  # fmt: skip
    """Multiply both parts of a float8 tile by the scales of its keys, which are stored by block, then by token."""
    first, second = tiles
    place = block.to(tl.int64) * stride + offsets_in_blocks(key, BLOCK_SIZE, BLOCK_N)
    scale = load_part(scales + place, exists, MASK)
    first = rescale(first, scale, dtype)
    if D2 > 0:
        second = rescale(second, scale, dtype)
    return first, second


@triton.jit
def attend_tiles(
    state, q, k_base, v_base, scales, table, begin, end, num_keys, last_seen, lowest, stride_k, stride_v, scale, window,
    softcap,
    MASK: tl.constexpr, PAGED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Process the key tiles from begin to end; without MASK, every row must see every key in them."""
    acc1, acc2, m, total = state
    q1, q2 = q
    key = begin + tl.arange(0, BLOCK_N)
    block = load_blocks(table, key, num_keys, BLOCK_SIZE, PAGED)
    for start in tl.range(begin, end, BLOCK_N):
        key, exists = keys_of_tile(start, num_keys, lowest, window, MASK, WINDOW, BLOCK_N)
        # The cache has fewer than 2^31 slots, but element offsets may exceed 32 bits.
        slot = key
        if PAGED:
            slot = block * BLOCK_SIZE + offsets_in_blocks(key, BLOCK_SIZE, BLOCK_N)
        slot = slot.to(tl.int64)
        here = block
        # Block ids are loaded a tile ahead, since keys cannot be loaded before their address is known.
        block = load_blocks(table, key + BLOCK_N, num_keys, BLOCK_SIZE, PAGED)
        k1, k2 = load_rows(k_base, slot * stride_k, exists, D1, D2, MASK)
        if FP8:
            k1, k2 = dequantize(
                (k1, k2), scales[0], scales[2], here, key, exists,
                q1.dtype, MASK, BLOCK_SIZE, BLOCK_N, D2,
            )  # fmt: skip
        scores = tl.dot(q1, k1.T, input_precision="ieee")
        if D2 > 0:
            scores = tl.dot(q2, k2.T, scores, input_precision="ieee")
        scores, factor = cap_scores(scores, scale, softcap, SOFTCAP)
        if MASK:
            scores = hide_scores(scores, key, exists, last_seen, window, CAUSAL, WINDOW)
        new_m = tl.maximum(m, tl.max(scores, 1) * factor)
        # A row that has seen no key has the maximum -inf, and -inf - -inf is NaN.
        base = tl.where(new_m == -float("inf"), 0.0, new_m) if MASK else new_m
        p = tl.exp2(scores * factor - base[:, None])
        fade = tl.exp2(m - base)
        total = total * fade + tl.sum(p, 1)
        m = new_m
        # Masked values are loaded as 0, since their weight is 0 but 0 * NaN is NaN.
        v1, v2 = load_rows(v_base, slot * stride_v, exists, D1, D2, MASK)
        if FP8:
            v1, v2 = dequantize(
                (v1, v2), scales[1], scales[2], here, key, exists,
                q1.dtype, MASK, BLOCK_SIZE, BLOCK_N, D2,
            )  # fmt: skip
        p = p.to(v1.dtype)
        acc1 = tl.dot(p, v1, acc1 * fade[:, None], input_precision="ieee")
        if D2 > 0:
            acc2 = tl.dot(p, v2, acc2 * fade[:, None], input_precision="ieee")
    return acc1, acc2, m, total


@triton.jit
def attend(
    q, k_base, v_base, scales, table, begin, end, num_keys, last_seen, lowest, highest, stride_k, stride_v, scale,
    window, softcap,
    PAGED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ONE_LOOP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Compute attention to the keys from begin to end of one sequence, masking only the tiles that need it.

    With ONE_LOOP all tiles are masked, which takes more arithmetic but avoids the wait for memory at the start of a
    second loop.

        begin      clear              full                end
          | window's  | seen by all rows | the causal edge, |
          | lower edge|    no masks      | the last tile    |

    Args:
        q: ([BLOCK_M, D1], [BLOCK_M, D2]); the first part twice if D2 is 0.
        k_base: pointer to key 0 of the head: of the cache if PAGED, else of the sequence.
        v_base: pointer to value 0, as `k_base`.
        scales: if FP8, pointers to the scales of the head's keys and values in block 0, and the stride in elements
            between the scales of two blocks.
        table: pointer to the sequence's block ids.
        begin: first key, a multiple of BLOCK_N.
        end: one past the last key that any row sees.
        num_keys: keys of the sequence.
        last_seen: [BLOCK_M] last key that each row sees.
        lowest: smallest of `last_seen`.
        highest: largest of `last_seen`.
        stride_k: elements between one key and the next.
        stride_v: elements between one value and the next.
        scale: softmax scale.
        window: keys that a row sees, its own included.
        softcap: cap of the scores.

    Returns:
        (acc1 [BLOCK_M, D1], acc2 [BLOCK_M, D2], m [BLOCK_M], total [BLOCK_M]), not yet divided by total.
    """
    acc1 = tl.zeros([BLOCK_M, D1], dtype=tl.float32)
    acc2 = tl.zeros([BLOCK_M, D2 if D2 > 0 else 1], dtype=tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    state = (acc1, acc2, m, total)
    if ONE_LOOP:
        return attend_tiles(
            state, q, k_base, v_base, scales, table, begin, end, num_keys, last_seen, lowest,
            stride_k, stride_v, scale, window, softcap,
            True, PAGED, CAUSAL, WINDOW, SOFTCAP, BLOCK_SIZE, BLOCK_N, D1, D2, FP8,
        )  # fmt: skip
    seen_by_all = tl.minimum(lowest + 1, num_keys) if CAUSAL else num_keys
    full = tl.minimum(seen_by_all, end) // BLOCK_N * BLOCK_N
    clear = begin
    if WINDOW:
        clear = tl.maximum(highest - window + 1, begin)
        clear = tl.minimum((clear + BLOCK_N - 1) // BLOCK_N * BLOCK_N, end)
        state = attend_tiles(
            state, q, k_base, v_base, scales, table, begin, clear, num_keys, last_seen, lowest,
            stride_k, stride_v, scale, window, softcap,
            True, PAGED, CAUSAL, WINDOW, SOFTCAP, BLOCK_SIZE, BLOCK_N, D1, D2, FP8,
        )  # fmt: skip
    full = tl.maximum(full, clear)
    state = attend_tiles(
        state, q, k_base, v_base, scales, table, clear, full, num_keys, last_seen, lowest,
        stride_k, stride_v, scale, window, softcap,
        False, PAGED, CAUSAL, WINDOW, SOFTCAP, BLOCK_SIZE, BLOCK_N, D1, D2, FP8,
    )  # fmt: skip
    return attend_tiles(
        state, q, k_base, v_base, scales, table, full, end, num_keys, last_seen, lowest,
        stride_k, stride_v, scale, window, softcap,
        True, PAGED, CAUSAL, WINDOW, SOFTCAP, BLOCK_SIZE, BLOCK_N, D1, D2, FP8,
    )  # fmt: skip


@triton.jit
def normalize(acc1, acc2, m, total):
    """Divide by the sums; rows that saw no key become 0 with a log-sum-exp of -inf.

    Returns:
        The two parts of the output and the log-sum-exp in units of log2.
    """
    saw_nothing = total == 0.0
    total = tl.where(saw_nothing, 1.0, total)
    inverse = tl.where(saw_nothing, 0.0, 1.0 / total)
    lse = tl.where(saw_nothing, -float("inf"), m + tl.log2(total))
    return acc1 * inverse[:, None], acc2 * inverse[:, None], lse
