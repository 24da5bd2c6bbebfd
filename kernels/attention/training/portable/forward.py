"""Forward of attention for training in Triton; see `training`."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.training.portable.tile import (
    LN_2,
    ScoreParams,
    drop,
    load_seqlen,
    load_slope,
    load_tile,
    score_keys,
    score_numbers,
    seen_keys,
    store_tile,
)


@triton.jit
def _add_tile(
    tile, k, v, k_stride, v_stride, at, acc, m, total, rows, params,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys, `at` on, to the online softmax of a tile of queries."""
    columns, _, scores, _ = score_keys(tile, k, k_stride, at, rows, params, MASKED, BLOCK_N)
    new = tl.maximum(m, tl.max(scores, 1))
    safe = new
    if MASKED:
        safe = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - safe[:, None])
    factor = tl.exp2(m - safe)
    total = total * factor + tl.sum(weights, 1)
    if params.DROPOUT:
        weights = drop(weights, rows[:, None], columns[None, :], params)
    value = load_tile(v, columns, v_stride, params.num_k, params.HEAD_DIM, params.BLOCK_D)
    acc = acc * factor[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=params.PRECISION)
    return acc, new, total


@triton.jit(do_not_specialize=["window", "seed", "threshold"])
def forward(
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, slopes, mask_starts, mask_columns,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    scale, softcap, window, seed, threshold, keep_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, MASK_Q: tl.constexpr, MASK_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the attention of one tile of queries; program (tile, head, sequence)."""
    first, head, sequence = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    start_q, num_q = load_seqlen(cu_seqlens_q, sequence)
    start_k, num_k = load_seqlen(cu_seqlens_k, sequence)
    if first >= num_q:
        return
    slope = load_slope(slopes, sequence, head, HEADS, ALIBI)
    params = ScoreParams(
        (num_q, num_k, head, sequence), score_numbers(scale, softcap, window, slope, seed, threshold, keep_scale),
        CAUSAL, WINDOW, SOFTCAP, ALIBI, DROPOUT, PRECISION, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    rows = first + tl.arange(0, BLOCK_M)
    q += start_q.to(tl.int64) * q_stride + head * q_head_stride
    k += start_k.to(tl.int64) * k_stride + (head // GROUP) * k_head_stride
    v += start_k.to(tl.int64) * v_stride + (head // GROUP) * v_head_stride
    tile = load_tile(q, rows, q_stride, num_q, HEAD_DIM, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    low, whole, high = seen_keys(first, params, BLOCK_M, BLOCK_N)
    if MASK_Q:
        begin = tl.load(mask_starts + first // MASK_Q)
        end = tl.load(mask_starts + first // MASK_Q + 1)
        for entry in range(begin, end):
            listed = tl.load(mask_columns + entry) * MASK_K
            for at in range(tl.maximum(listed, low), tl.minimum(listed + MASK_K, high), BLOCK_N):
                acc, m, total = _add_tile(
                    tile, k, v, k_stride, v_stride, at, acc, m, total, rows, params, True, BLOCK_N
                )
    else:
        for at in range(low, whole, BLOCK_N):
            acc, m, total = _add_tile(
                tile, k, v, k_stride, v_stride, at, acc, m, total, rows, params, False, BLOCK_N
            )
        for at in range(tl.maximum(low, whole), high, BLOCK_N):
            acc, m, total = _add_tile(
                tile, k, v, k_stride, v_stride, at, acc, m, total, rows, params, True, BLOCK_N
            )
    safe = tl.where(total == 0.0, 1.0, total)
    out += start_q.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM
    store_tile(out, rows, HEADS * HEAD_DIM, num_q, acc / safe[:, None], HEAD_DIM, BLOCK_D)
    log_sum = tl.where(total == 0.0, float("-inf"), (m + tl.log2(safe)) * LN_2)
    tl.store(lse + (start_q + rows).to(tl.int64) * HEADS + head, log_sum, mask=rows < num_q)
