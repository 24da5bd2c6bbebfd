"""The columns of the row table as compile-time constants, and the logits of a row under its mask."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling import rows
from kernels.sampling.rows import SampleRow

SOURCE = tl.constexpr(SampleRow._fields.index("source"))
TARGET = tl.constexpr(SampleRow._fields.index("target"))
MASK = tl.constexpr(SampleRow._fields.index("mask"))
KIND = tl.constexpr(SampleRow._fields.index("kind"))
NOISE_LOW = tl.constexpr(SampleRow._fields.index("noise_low"))
NOISE_HIGH = tl.constexpr(SampleRow._fields.index("noise_high"))
INVERSE_TEMPERATURE = tl.constexpr(SampleRow._fields.index("inverse_temperature"))
TOP_K = tl.constexpr(SampleRow._fields.index("top_k"))
TOP_P = tl.constexpr(SampleRow._fields.index("top_p"))
MIN_P_DISTANCE = tl.constexpr(SampleRow._fields.index("min_p_distance"))
TYPICAL_P = tl.constexpr(SampleRow._fields.index("typical_p"))
REACH = tl.constexpr(SampleRow._fields.index("reach"))
LEAST = tl.constexpr(SampleRow._fields.index("least"))
COLUMNS = tl.constexpr(len(SampleRow._fields))
GREEDY = tl.constexpr(rows.GREEDY)
UNFILTERED = tl.constexpr(rows.UNFILTERED)
FILTERED = tl.constexpr(rows.FILTERED)
WEIGHT_SCALE = tl.constexpr(rows.WEIGHT_SCALE)
ENTROPY_SCALE = tl.constexpr(rows.ENTROPY_SCALE)


@triton.jit
def logits_of(logits, masks, entry, row_stride):
    """Find the logits and the mask of a row.

    Args:
        logits: [M, V], stride `row_stride`.
        masks: [K, ceil(V / 32)] int32.
        entry: address of the row's entry in the table.
        row_stride: elements.

    Returns:
        The address of the row's logits, `masks`, and `entry`.
    """
    source = tl.load(entry + SOURCE).to(tl.int64)
    return logits + source * row_stride, masks, entry


@triton.jit
def load_logits(row, ids, size):
    """Load logits of a row, minus infinity for ids from `size` on; `apply_mask` comes next."""
    return tl.load(row[0] + ids, mask=ids < size, other=-float("inf"))


@triton.jit
def apply_mask(row, values, first, size):
    """Return loaded logits as float32, minus infinity for tokens that the row's mask bans.

    NaN and plus infinity stay as they are where a token is banned, so that the row still fails.

    Args:
        row: from `logits_of`.
        values: from `load_logits`, of successive ids; a multiple of 32 of them.
        first: id of the first value, int32, a multiple of 32.
        size: logits of the row.
    """
    _, masks, entry = row
    values = values.to(tl.float32)
    # A branch, so that rows without a mask need only this load and a test. Each word is loaded once: with a load for
    # each id, threads would exchange the values, for rows without a mask too.
    index = tl.load(entry + MASK).to(tl.int32)
    if index >= 0:
        num_words = (size + 31) // 32
        word = first // 32 + tl.arange(0, values.numel // 32)
        words = tl.load(masks + index * num_words + word, mask=word < num_words, other=-1)
        allowed = (words[:, None] >> tl.arange(0, 32)[None, :]) & 1
        banned = tl.reshape(allowed, values.shape) == 0
        values = tl.where(banned & (values < float("inf")), -float("inf"), values)
    return values
