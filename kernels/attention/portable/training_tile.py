"""What the forward and the two backward kernels of attention for training share: positions, scores, masks, dropout.

Triton device functions. All three kernels compute a tile's scores by the same functions, so they agree on what a query
sees and on which weights are dropped. Scores are in units of log2.

    pos_q, pos_k    indices of the tile's queries and keys in their sequence, one of them a column, the other a row
    offset          n - m: query i has the position of key i + offset
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(base, rows, row_stride, num_rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows of a head, [len(rows), BLOCK_D]; rows and columns beyond the tensor are 0."""
    columns = tl.arange(0, BLOCK_D)
    places = base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    mask = rows[:, None] < num_rows
    if HEAD_DIM < BLOCK_D:
        mask = mask & (columns[None, :] < HEAD_DIM)
    return tl.load(places, mask=mask, other=0.0)


@triton.jit
def store_tile(
    base, rows, row_stride, num_rows, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store rows of a head, in the dtype of the tensor."""
    columns = tl.arange(0, BLOCK_D)
    places = base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    mask = rows[:, None] < num_rows
    if HEAD_DIM < BLOCK_D:
        mask = mask & (columns[None, :] < HEAD_DIM)
    tl.store(places, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def cap(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Scale products and cap them; returns scores, and tanh for the derivative (the scores without a softcap)."""
    if SOFTCAP:
        # tanh by the exponential, which Triton has everywhere.
        power = tl.exp2(products * (scale * 2.0 * LOG2_E / softcap))
        tanh = 1.0 - 2.0 / (power + 1.0)
        return tanh * (softcap * LOG2_E), tanh
    scores = products * (scale * LOG2_E)
    return scores, scores


@triton.jit
def bias_and_mask(
    scores, pos_q, pos_k, num_q, num_k, window, slope,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Subtract ALiBi's distances, and set scores of keys that a query does not see to -inf.

    Args:
        MASKED: whether the tile has such keys.
    """
    distance = pos_q + (num_k - num_q) - pos_k
    if ALIBI:
        scores -= slope * LOG2_E * tl.abs(distance).to(tl.float32)
    if MASKED:
        seen = (pos_k < num_k) & (pos_q < num_q)
        if CAUSAL:
            seen = seen & (distance >= 0)
        if WINDOW:
            seen = seen & (distance < window)
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def kept(seed, pos_q, pos_k, head, sequence, threshold):
    """Whether dropout keeps each weight of a tile; see `kernels.attention.pytorch.philox`."""
    zero = (pos_q + pos_k) * 0
    bits, _, _, _ = tl.philox(
        seed,
        (zero + pos_k).to(tl.uint32),
        (zero + pos_q).to(tl.uint32),
        (zero + head).to(tl.uint32),
        (zero + sequence).to(tl.uint32),
    )
    return bits.to(tl.uint32, bitcast=True).to(tl.int64) >= threshold


@triton.jit
def seen_keys(first, count, num_q, num_k, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the range of keys of which queries first to first + count - 1 see some."""
    low, high = 0, num_k
    if CAUSAL:
        high = tl.minimum(num_k, tl.maximum(0, tl.minimum(first + count, num_q) + num_k - num_q))
    if WINDOW:
        low = tl.maximum(0, first + num_k - num_q - window + 1)
    return low, high


@triton.jit
def seeing_queries(first, count, num_q, num_k, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the range of queries that see some of the keys first to first + count - 1."""
    low, high = 0, num_q
    if CAUSAL:
        low = tl.maximum(0, first - (num_k - num_q))
    if WINDOW:
        last = tl.minimum(first + count, num_k) - 1
        high = tl.minimum(num_q, tl.maximum(0, last + window - (num_k - num_q)))
    return low, high
