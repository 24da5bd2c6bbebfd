"""Backward of attention for training in Triton: gradients of keys and values, and of queries; see `training`."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.training.portable.tile import (
    LOG2_E,
    ScoreParams,
    drop,
    load_seqlen,
    load_slope,
    load_tile,
    score,
    score_keys,
    score_numbers,
    seeing_queries,
    seen_keys,
    store_tile,
)


@triton.jit(do_not_specialize=["num_rows"])
def delta(
    out, dout, dlse, result, num_rows, dout_stride, dout_head_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Compute rowsum(dO * O) - d lse; program (tile of rows, head)."""
    rows, head = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1)
    o = load_tile(out + head * HEAD_DIM, rows, HEADS * HEAD_DIM, num_rows, HEAD_DIM, BLOCK_D)
    do = load_tile(dout + head * dout_head_stride, rows, dout_stride, num_rows, HEAD_DIM, BLOCK_D)
    place, exists = rows.to(tl.int64) * HEADS + head, rows < num_rows
    sums = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(result + place, sums - tl.load(dlse + place, mask=exists, other=0.0), mask=exists)


@triton.jit
def _add_queries(
    key, value, q, do, q_stride, do_stride, lse, means, at, dk, dv, columns, params,
    HEADS: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Add a tile of queries, `at` on, to the gradients of a tile of keys; all matrices are [keys, queries]."""
    rows = at + tl.arange(0, BLOCK_M)
    query = load_tile(q, rows, q_stride, params.num_q, params.HEAD_DIM, params.BLOCK_D)
    products = tl.dot(key, tl.trans(query), input_precision=params.PRECISION)
    scores, tanh = score(products, rows[None, :], columns[:, None], params, MASKED)
    place = rows.to(tl.int64) * HEADS
    log_sum = tl.load(lse + place, mask=rows < params.num_q, other=0.0) * LOG2_E
    if MASKED:
        log_sum = tl.where(log_sum == float("-inf"), 0.0, log_sum)
    weights = tl.exp2(scores - log_sum[None, :])
    grad = load_tile(do, rows, do_stride, params.num_q, params.HEAD_DIM, params.BLOCK_D)
    dweights = tl.dot(value, tl.trans(grad), input_precision=params.PRECISION)
    dropped = weights
    if params.DROPOUT:
        dropped = drop(weights, rows[None, :], columns[:, None], params)
        dweights = drop(dweights, rows[None, :], columns[:, None], params)
    dv = tl.dot(dropped.to(grad.dtype), grad, dv, input_precision=params.PRECISION)
    mean = tl.load(means + place, mask=rows < params.num_q, other=0.0)
    dscores = weights * (dweights - mean[None, :])
    if params.SOFTCAP:
        dscores *= 1.0 - tanh * tanh
    dk = tl.dot(dscores.to(query.dtype), query, dk, input_precision=params.PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["window", "seed", "threshold"])
def backward_keys(
    q, k, v, dout, lse, means, dk, dv, cu_seqlens_q, cu_seqlens_k, slopes, mask_starts, mask_rows,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, do_stride, do_head_stride,
    scale, softcap, window, seed, threshold, keep_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, MASK_Q: tl.constexpr, MASK_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one tile of keys and values; program (tile, key-value head, sequence)."""
    first, kv_head, sequence = tl.program_id(0) * BLOCK_N, tl.program_id(1), tl.program_id(2)
    start_q, num_q = load_seqlen(cu_seqlens_q, sequence)
    start_k, num_k = load_seqlen(cu_seqlens_k, sequence)
    if first >= num_k:
        return
    columns = first + tl.arange(0, BLOCK_N)
    k += start_k.to(tl.int64) * k_stride + kv_head * k_head_stride
    v += start_k.to(tl.int64) * v_stride + kv_head * v_head_stride
    key = load_tile(k, columns, k_stride, num_k, HEAD_DIM, BLOCK_D)
    value = load_tile(v, columns, v_stride, num_k, HEAD_DIM, BLOCK_D)
    dkey = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dvalue = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        slope = load_slope(slopes, sequence, head, HEADS, ALIBI)
        params = ScoreParams(
            (num_q, num_k, head, sequence), score_numbers(scale, softcap, window, slope, seed, threshold, keep_scale),
            CAUSAL, WINDOW, SOFTCAP, ALIBI, DROPOUT, PRECISION, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        low, whole, whole_end, high = seeing_queries(first, params, BLOCK_M, BLOCK_N)
        q_head = q + start_q.to(tl.int64) * q_stride + head * q_head_stride
        do_head = dout + start_q.to(tl.int64) * do_stride + head * do_head_stride
        lse_head = lse + start_q.to(tl.int64) * HEADS + head
        means_head = means + start_q.to(tl.int64) * HEADS + head
        if MASK_Q:
            begin = tl.load(mask_starts + first // MASK_K)
            end = tl.load(mask_starts + first // MASK_K + 1)
            for entry in range(begin, end):
                listed = tl.load(mask_rows + entry) * MASK_Q
                for at in range(
                    tl.maximum(listed, low), tl.minimum(listed + MASK_Q, high), BLOCK_M
                ):
                    dkey, dvalue = _add_queries(
                        key, value, q_head, do_head, q_stride, do_stride, lse_head, means_head, at,
                        dkey, dvalue, columns, params, HEADS, True, BLOCK_M,
                    )  # fmt: skip
        else:
            for at in range(low, whole, BLOCK_M):
                dkey, dvalue = _add_queries(
                    key, value, q_head, do_head, q_stride, do_stride, lse_head, means_head, at,
                    dkey, dvalue, columns, params, HEADS, True, BLOCK_M,
                )  # fmt: skip
            for at in range(whole, whole_end, BLOCK_M):
                dkey, dvalue = _add_queries(
                    key, value, q_head, do_head, q_stride, do_stride, lse_head, means_head, at,
                    dkey, dvalue, columns, params, HEADS, False, BLOCK_M,
                )  # fmt: skip
            for at in range(whole_end, high, BLOCK_M):
                dkey, dvalue = _add_queries(
                    key, value, q_head, do_head, q_stride, do_stride, lse_head, means_head, at,
                    dkey, dvalue, columns, params, HEADS, True, BLOCK_M,
                )  # fmt: skip
    row: tl.constexpr = HEADS // GROUP * HEAD_DIM
    place = start_k.to(tl.int64) * row + kv_head * HEAD_DIM
    store_tile(dk + place, columns, row, num_k, dkey * scale, HEAD_DIM, BLOCK_D)
    store_tile(dv + place, columns, row, num_k, dvalue, HEAD_DIM, BLOCK_D)


@triton.jit
def _add_keys(
    tile, grad, k, v, k_stride, v_stride, at, dq, log_sum, mean, rows, params,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys, `at` on, to the gradient of a tile of queries."""
    columns, key, scores, tanh = score_keys(tile, k, k_stride, at, rows, params, MASKED, BLOCK_N)
    weights = tl.exp2(scores - log_sum[:, None])
    value = load_tile(v, columns, v_stride, params.num_k, params.HEAD_DIM, params.BLOCK_D)
    dweights = tl.dot(grad, tl.trans(value), input_precision=params.PRECISION)
    if params.DROPOUT:
        dweights = drop(dweights, rows[:, None], columns[None, :], params)
    dscores = weights * (dweights - mean[:, None])
    if params.SOFTCAP:
        dscores *= 1.0 - tanh * tanh
    return tl.dot(dscores.to(key.dtype), key, dq, input_precision=params.PRECISION)


@triton.jit(do_not_specialize=["window", "seed", "threshold"])
def backward_queries(
    q, k, v, dout, lse, means, dq, cu_seqlens_q, cu_seqlens_k, slopes, mask_starts, mask_columns,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride, do_stride, do_head_stride,
    scale, softcap, window, seed, threshold, keep_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, MASK_Q: tl.constexpr, MASK_K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one tile of queries; program (tile, head, sequence)."""
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
    k += start_k.to(tl.int64) * k_stride + (head // GROUP) * k_head_stride
    v += start_k.to(tl.int64) * v_stride + (head // GROUP) * v_head_stride
    q += start_q.to(tl.int64) * q_stride + head * q_head_stride
    dout += start_q.to(tl.int64) * do_stride + head * do_head_stride
    tile = load_tile(q, rows, q_stride, num_q, HEAD_DIM, BLOCK_D)
    grad = load_tile(dout, rows, do_stride, num_q, HEAD_DIM, BLOCK_D)
    place = (start_q + rows).to(tl.int64) * HEADS + head
    log_sum = tl.load(lse + place, mask=rows < num_q, other=0.0) * LOG2_E
    log_sum = tl.where(log_sum == float("-inf"), 0.0, log_sum)
    mean = tl.load(means + place, mask=rows < num_q, other=0.0)
    dquery = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    low, whole, high = seen_keys(first, params, BLOCK_M, BLOCK_N)
    if MASK_Q:
        begin = tl.load(mask_starts + first // MASK_Q)
        end = tl.load(mask_starts + first // MASK_Q + 1)
        for entry in range(begin, end):
            listed = tl.load(mask_columns + entry) * MASK_K
            for at in range(tl.maximum(listed, low), tl.minimum(listed + MASK_K, high), BLOCK_N):
                dquery = _add_keys(
                    tile, grad, k, v, k_stride, v_stride, at, dquery, log_sum, mean, rows, params, True, BLOCK_N
                )  # fmt: skip
    else:
        for at in range(low, whole, BLOCK_N):
            dquery = _add_keys(
                tile, grad, k, v, k_stride, v_stride, at, dquery, log_sum, mean, rows, params, False, BLOCK_N
            )  # fmt: skip
        for at in range(tl.maximum(low, whole), high, BLOCK_N):
            dquery = _add_keys(
                tile, grad, k, v, k_stride, v_stride, at, dquery, log_sum, mean, rows, params, True, BLOCK_N
            )  # fmt: skip
    row: tl.constexpr = HEADS * HEAD_DIM
    dq += start_q.to(tl.int64) * row + head * HEAD_DIM
    store_tile(dq, rows, row, num_q, dquery * scale, HEAD_DIM, BLOCK_D)
