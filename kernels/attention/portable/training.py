"""Attention for training in Triton, forward and backward, for every GPU with tensor cores.

    forward     a program for (tile of queries, head, sequence)
    delta       rowsum(dO * O), which all weights of a row have in common in the backward
    backward    dK, dV: a program for (tile of keys, key-value head, sequence), over all queries of its group's heads
                dQ: a program for (tile of queries, head, sequence)

The weights are computed again from the log-sum-exps. No sum crosses programs, so there are no atomic additions, and
every run has the same bits.

Source: Dao, "FlashAttention-2", 2023, algorithms 1 and 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl

from kernels.arch import detect
from kernels.attention.portable.training_launch import TrainingLaunch, training_launches
from kernels.attention.portable.training_tile import (
    LN_2,
    LOG2_E,
    bias_and_mask,
    cap,
    kept,
    load_tile,
    seeing_queries,
    seen_keys,
    store_tile,
)
from kernels.attention.pytorch.philox import drop_below

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.attention.training import TrainingBatch, TrainingProblem


@triton.jit
def _forward_tile(
    q, k, v, k_stride, v_stride, first, acc, m, total, rows, num_q, num_k, head, sequence,
    scale, softcap, window, slope, seed, threshold, keep_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys, `first` on, to the online softmax of a tile of queries."""
    columns = first + tl.arange(0, BLOCK_N)
    key = load_tile(k, columns, k_stride, num_k, HEAD_DIM, BLOCK_D)
    products = tl.dot(q, tl.trans(key), input_precision=PRECISION)
    scores, _ = cap(products, scale, softcap, SOFTCAP)
    scores = bias_and_mask(
        scores, rows[:, None], columns[None, :], num_q, num_k, window, slope,
        CAUSAL, WINDOW, ALIBI, MASKED,
    )  # fmt: skip
    new = tl.maximum(m, tl.max(scores, 1))
    safe = new
    if MASKED:
        safe = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - safe[:, None])
    factor = tl.exp2(m - safe)
    total = total * factor + tl.sum(weights, 1)
    if DROPOUT:
        keep = kept(seed, rows[:, None], columns[None, :], head, sequence, threshold)
        weights = tl.where(keep, weights * keep_scale, 0.0)
    value = load_tile(v, columns, v_stride, num_k, HEAD_DIM, BLOCK_D)
    acc = acc * factor[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=PRECISION)
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
    start_q, start_k = tl.load(cu_seqlens_q + sequence), tl.load(cu_seqlens_k + sequence)
    num_q = tl.load(cu_seqlens_q + sequence + 1) - start_q
    num_k = tl.load(cu_seqlens_k + sequence + 1) - start_k
    if first >= num_q:
        return
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + head)
    rows = first + tl.arange(0, BLOCK_M)
    q += start_q.to(tl.int64) * q_stride + head * q_head_stride
    k += start_k.to(tl.int64) * k_stride + (head // GROUP) * k_head_stride
    v += start_k.to(tl.int64) * v_stride + (head // GROUP) * v_head_stride
    tile = load_tile(q, rows, q_stride, num_q, HEAD_DIM, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    low, high = seen_keys(first, BLOCK_M, num_q, num_k, window, CAUSAL, WINDOW)
    if MASK_Q:
        begin = tl.load(mask_starts + first // MASK_Q)
        end = tl.load(mask_starts + first // MASK_Q + 1)
        for entry in range(begin, end):
            listed = tl.load(mask_columns + entry) * MASK_K
            for at in range(
                tl.maximum(listed, low // BLOCK_N * BLOCK_N),
                tl.minimum(listed + MASK_K, high),
                BLOCK_N,
            ):
                acc, m, total = _forward_tile(
                    tile, k, v, k_stride, v_stride, at, acc, m, total, rows, num_q, num_k, head, sequence,
                    scale, softcap, window, slope, seed, threshold, keep_scale,
                    CAUSAL, WINDOW, SOFTCAP, ALIBI, DROPOUT, True, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_N,
                )  # fmt: skip
    else:
        low = low // BLOCK_N * BLOCK_N
        # Tiles that all queries see whole: none with a window, since most of its tiles are at an edge.
        whole = num_k // BLOCK_N * BLOCK_N
        if CAUSAL:
            whole = tl.minimum(whole, tl.maximum(0, first + 1 + num_k - num_q) // BLOCK_N * BLOCK_N)
        if WINDOW:
            whole = low
        for at in range(low, whole, BLOCK_N):
            acc, m, total = _forward_tile(
                tile, k, v, k_stride, v_stride, at, acc, m, total, rows, num_q, num_k, head, sequence,
                scale, softcap, window, slope, seed, threshold, keep_scale,
                CAUSAL, WINDOW, SOFTCAP, ALIBI, DROPOUT, False, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        for at in range(tl.maximum(low, whole), high, BLOCK_N):
            acc, m, total = _forward_tile(
                tile, k, v, k_stride, v_stride, at, acc, m, total, rows, num_q, num_k, head, sequence,
                scale, softcap, window, slope, seed, threshold, keep_scale,
                CAUSAL, WINDOW, SOFTCAP, ALIBI, DROPOUT, True, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
    safe = tl.where(total == 0.0, 1.0, total)
    out += start_q.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM
    store_tile(out, rows, HEADS * HEAD_DIM, num_q, acc / safe[:, None], HEAD_DIM, BLOCK_D)
    log_sum = tl.where(total == 0.0, float("-inf"), (m + tl.log2(safe)) * LN_2)
    tl.store(lse + (start_q + rows).to(tl.int64) * HEADS + head, log_sum, mask=rows < num_q)


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
def _key_tile(
    k, v, q, do, q_stride, do_stride, lse, means, at, dk, dv, columns, num_q, num_k, head, sequence,
    scale, softcap, window, slope, seed, threshold, keep_scale,
    HEADS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Add a tile of queries, `at` on, to the gradients of a tile of keys; all matrices are [keys, queries]."""
    rows = at + tl.arange(0, BLOCK_M)
    query = load_tile(q, rows, q_stride, num_q, HEAD_DIM, BLOCK_D)
    products = tl.dot(k, tl.trans(query), input_precision=PRECISION)
    scores, tanh = cap(products, scale, softcap, SOFTCAP)
    scores = bias_and_mask(
        scores, rows[None, :], columns[:, None], num_q, num_k, window, slope,
        CAUSAL, WINDOW, ALIBI, MASKED,
    )  # fmt: skip
    place = rows.to(tl.int64) * HEADS
    log_sum = tl.load(lse + place, mask=rows < num_q, other=0.0) * LOG2_E
    if MASKED:
        log_sum = tl.where(log_sum == float("-inf"), 0.0, log_sum)
    weights = tl.exp2(scores - log_sum[None, :])
    grad = load_tile(do, rows, do_stride, num_q, HEAD_DIM, BLOCK_D)
    dweights = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
    dropped = weights
    if DROPOUT:
        keep = kept(seed, rows[None, :], columns[:, None], head, sequence, threshold)
        dropped = tl.where(keep, weights * keep_scale, 0.0)
        dweights = tl.where(keep, dweights * keep_scale, 0.0)
    dv = tl.dot(dropped.to(grad.dtype), grad, dv, input_precision=PRECISION)
    mean = tl.load(means + place, mask=rows < num_q, other=0.0)
    dscores = weights * (dweights - mean[None, :])
    if SOFTCAP:
        dscores *= 1.0 - tanh * tanh
    dk = tl.dot(dscores.to(query.dtype), query, dk, input_precision=PRECISION)
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
    start_q, start_k = tl.load(cu_seqlens_q + sequence), tl.load(cu_seqlens_k + sequence)
    num_q = tl.load(cu_seqlens_q + sequence + 1) - start_q
    num_k = tl.load(cu_seqlens_k + sequence + 1) - start_k
    if first >= num_k:
        return
    columns = first + tl.arange(0, BLOCK_N)
    k += start_k.to(tl.int64) * k_stride + kv_head * k_head_stride
    v += start_k.to(tl.int64) * v_stride + kv_head * v_head_stride
    key = load_tile(k, columns, k_stride, num_k, HEAD_DIM, BLOCK_D)
    value = load_tile(v, columns, v_stride, num_k, HEAD_DIM, BLOCK_D)
    dkey = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dvalue = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    low, high = seeing_queries(first, BLOCK_N, num_q, num_k, window, CAUSAL, WINDOW)
    low = low // BLOCK_M * BLOCK_M
    # Tiles that see all keys of this one, from `whole` on, up to the tile that the sequence does not fill.
    whole = low
    last_whole = num_q // BLOCK_M * BLOCK_M
    if CAUSAL:
        reach = tl.maximum(0, first + BLOCK_N - 1 - (num_k - num_q))
        whole = tl.maximum(low, (reach + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    if WINDOW:
        whole = high
    if first + BLOCK_N > num_k:
        whole = high
    whole = tl.minimum(whole, high)
    last_whole = tl.maximum(whole, tl.minimum(last_whole, high))
    for member in range(GROUP):
        head = kv_head * GROUP + member
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + head)
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
                    dkey, dvalue = _key_tile(
                        key, value, q_head, do_head, q_stride, do_stride, lse_head, means_head, at, dkey, dvalue,
                        columns, num_q, num_k, head, sequence,
                        scale, softcap, window, slope, seed, threshold, keep_scale, HEADS,
                        CAUSAL, WINDOW, SOFTCAP, ALIBI, DROPOUT, True, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_M,
                    )  # fmt: skip
        else:
            for at in range(low, whole, BLOCK_M):
                dkey, dvalue = _key_tile(
                    key, value, q_head, do_head, q_stride, do_stride, lse_head, means_head, at, dkey, dvalue,
                    columns, num_q, num_k, head, sequence,
                    scale, softcap, window, slope, seed, threshold, keep_scale, HEADS,
                    CAUSAL, WINDOW, SOFTCAP, ALIBI, DROPOUT, True, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_M,
                )  # fmt: skip
            for at in range(whole, last_whole, BLOCK_M):
                dkey, dvalue = _key_tile(
                    key, value, q_head, do_head, q_stride, do_stride, lse_head, means_head, at, dkey, dvalue,
                    columns, num_q, num_k, head, sequence,
                    scale, softcap, window, slope, seed, threshold, keep_scale, HEADS,
                    CAUSAL, WINDOW, SOFTCAP, ALIBI, DROPOUT, False, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_M,
                )  # fmt: skip
            for at in range(last_whole, high, BLOCK_M):
                dkey, dvalue = _key_tile(
                    key, value, q_head, do_head, q_stride, do_stride, lse_head, means_head, at, dkey, dvalue,
                    columns, num_q, num_k, head, sequence,
                    scale, softcap, window, slope, seed, threshold, keep_scale, HEADS,
                    CAUSAL, WINDOW, SOFTCAP, ALIBI, DROPOUT, True, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_M,
                )  # fmt: skip
    row: tl.constexpr = HEADS // GROUP * HEAD_DIM
    place = start_k.to(tl.int64) * row + kv_head * HEAD_DIM
    store_tile(dk + place, columns, row, num_k, dkey * scale, HEAD_DIM, BLOCK_D)
    store_tile(dv + place, columns, row, num_k, dvalue, HEAD_DIM, BLOCK_D)


@triton.jit
def _query_tile(
    q, do, k, v, k_stride, v_stride, at, dq, log_sum, mean, rows, num_q, num_k, head, sequence,
    scale, softcap, window, slope, seed, threshold, keep_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys, `at` on, to the gradient of a tile of queries."""
    columns = at + tl.arange(0, BLOCK_N)
    key = load_tile(k, columns, k_stride, num_k, HEAD_DIM, BLOCK_D)
    products = tl.dot(q, tl.trans(key), input_precision=PRECISION)
    scores, tanh = cap(products, scale, softcap, SOFTCAP)
    scores = bias_and_mask(
        scores, rows[:, None], columns[None, :], num_q, num_k, window, slope,
        CAUSAL, WINDOW, ALIBI, MASKED,
    )  # fmt: skip
    weights = tl.exp2(scores - log_sum[:, None])
    value = load_tile(v, columns, v_stride, num_k, HEAD_DIM, BLOCK_D)
    dweights = tl.dot(do, tl.trans(value), input_precision=PRECISION)
    if DROPOUT:
        keep = kept(seed, rows[:, None], columns[None, :], head, sequence, threshold)
        dweights = tl.where(keep, dweights * keep_scale, 0.0)
    dscores = weights * (dweights - mean[:, None])
    if SOFTCAP:
        dscores *= 1.0 - tanh * tanh
    return tl.dot(dscores.to(key.dtype), key, dq, input_precision=PRECISION)


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
    start_q, start_k = tl.load(cu_seqlens_q + sequence), tl.load(cu_seqlens_k + sequence)
    num_q = tl.load(cu_seqlens_q + sequence + 1) - start_q
    num_k = tl.load(cu_seqlens_k + sequence + 1) - start_k
    if first >= num_q:
        return
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + head)
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
    low, high = seen_keys(first, BLOCK_M, num_q, num_k, window, CAUSAL, WINDOW)
    if MASK_Q:
        begin = tl.load(mask_starts + first // MASK_Q)
        end = tl.load(mask_starts + first // MASK_Q + 1)
        for entry in range(begin, end):
            listed = tl.load(mask_columns + entry) * MASK_K
            for at in range(
                tl.maximum(listed, low // BLOCK_N * BLOCK_N),
                tl.minimum(listed + MASK_K, high),
                BLOCK_N,
            ):
                dquery = _query_tile(
                    tile, grad, k, v, k_stride, v_stride, at, dquery, log_sum, mean, rows, num_q, num_k, head,
                    sequence, scale, softcap, window, slope, seed, threshold, keep_scale,
                    CAUSAL, WINDOW, SOFTCAP, ALIBI, DROPOUT, True, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_N,
                )  # fmt: skip
    else:
        low = low // BLOCK_N * BLOCK_N
        whole = num_k // BLOCK_N * BLOCK_N
        if CAUSAL:
            whole = tl.minimum(whole, tl.maximum(0, first + 1 + num_k - num_q) // BLOCK_N * BLOCK_N)
        if WINDOW:
            whole = low
        for at in range(low, whole, BLOCK_N):
            dquery = _query_tile(
                tile, grad, k, v, k_stride, v_stride, at, dquery, log_sum, mean, rows, num_q, num_k, head,
                sequence, scale, softcap, window, slope, seed, threshold, keep_scale,
                CAUSAL, WINDOW, SOFTCAP, ALIBI, DROPOUT, False, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        for at in range(tl.maximum(low, whole), high, BLOCK_N):
            dquery = _query_tile(
                tile, grad, k, v, k_stride, v_stride, at, dquery, log_sum, mean, rows, num_q, num_k, head,
                sequence, scale, softcap, window, slope, seed, threshold, keep_scale,
                CAUSAL, WINDOW, SOFTCAP, ALIBI, DROPOUT, True, PRECISION, HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
    row: tl.constexpr = HEADS * HEAD_DIM
    dq += start_q.to(tl.int64) * row + head * HEAD_DIM
    store_tile(dq, rows, row, num_q, dquery * scale, HEAD_DIM, BLOCK_D)


_DELTA_ROWS: Final = 64


class PortableTraining:
    """See `kernels.attention.training.TrainingKernel`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, batch: TrainingBatch, problem: TrainingProblem
    ) -> tuple[Tensor, Tensor]:
        """See `TrainingKernel.forward`."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        launch = _launches(q, problem)[0]
        grid = (-(-problem.max_seqlen_q // launch.block_m), q.shape[1], len(batch.cu_seqlens_q) - 1)
        if all(grid):
            forward[grid](
                q, k, v, out, lse, *_batch_arguments(batch, by_key=False), *_strides(q, k, v),
                *_numbers(problem), **_constants(q, k, batch, problem, launch),
            )  # fmt: skip
        return out, lse

    def backward(
        self,
        grads: tuple[Tensor, Tensor],
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        batch: TrainingBatch,
        problem: TrainingProblem,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `TrainingKernel.backward`."""
        (dout, dlse), (q, k, v, out, lse) = grads, saved
        dq, dk, dv = (torch.empty(it.shape, dtype=it.dtype, device=it.device) for it in (q, k, v))
        means = torch.empty_like(lse)
        count, heads, size = q.shape
        _, keys, queries = _launches(q, problem)
        if count:
            delta[(-(-count // _DELTA_ROWS), heads)](
                out, dout, dlse, means, count, dout.stride(0), dout.stride(1),
                HEADS=heads, HEAD_DIM=size, BLOCK_D=_padded(size), BLOCK_M=_DELTA_ROWS,
            )  # fmt: skip
        num_seqs = len(batch.cu_seqlens_q) - 1
        strides = _strides(q, k, v, dout)
        for kernel, launch, results, tiles in (
            (backward_keys, keys, (dk, dv), -(-problem.max_seqlen_k // keys.block_n)),
            (backward_queries, queries, (dq,), -(-problem.max_seqlen_q // queries.block_m)),
        ):
            by_key = kernel is backward_keys
            grid = (tiles, k.shape[1] if by_key else heads, num_seqs)
            if all(grid):
                kernel[grid](
                    q, k, v, dout, lse, means, *results, *_batch_arguments(batch, by_key=by_key), *strides,
                    *_numbers(problem), **_constants(q, k, batch, problem, launch),
                )  # fmt: skip
        return dq, dk, dv


PORTABLE: Final = PortableTraining()


def _launches(q: Tensor, problem: TrainingProblem) -> tuple[TrainingLaunch, ...]:
    """Return the launches of the forward, of dK and dV, and of dQ; their tiles divide those of the block mask."""
    launches = training_launches(detect(q.device), q.shape[-1], q.dtype)
    return tuple(launch.within(problem.mask_tile) for launch in launches)


def _padded(size: int) -> int:
    return max(16, int(triton.next_power_of_2(size)))


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for it in tensors for stride in it.stride()[:2])


def _batch_arguments(batch: TrainingBatch, *, by_key: bool) -> tuple[Tensor, ...]:
    slopes = batch.cu_seqlens_q if batch.alibi_slopes is None else batch.alibi_slopes
    mask = (batch.cu_seqlens_q, batch.cu_seqlens_q)
    if batch.mask is not None:
        mask = batch.mask[2:] if by_key else batch.mask[:2]
    return (batch.cu_seqlens_q, batch.cu_seqlens_k, slopes, *mask)


def _numbers(problem: TrainingProblem) -> tuple[float, ...]:
    """Return scale, softcap, window, and the seed, threshold and factor of the dropout."""
    return (
        problem.softmax_scale,
        problem.softcap or 0.0,
        problem.sliding_window or 0,
        problem.dropout_seed,
        drop_below(problem.dropout_p),
        1 / (1 - problem.dropout_p),
    )


def _constants(
    q: Tensor, k: Tensor, batch: TrainingBatch, problem: TrainingProblem, launch: TrainingLaunch
) -> dict[str, Any]:
    heads, size = q.shape[1:]
    mask_q, mask_k = problem.mask_tile if batch.mask is not None else (0, 0)
    return {
        "HEADS": heads,
        "GROUP": heads // k.shape[1],
        "HEAD_DIM": size,
        "BLOCK_D": _padded(size),
        "CAUSAL": problem.causal,
        "WINDOW": problem.sliding_window is not None,
        "SOFTCAP": problem.softcap is not None,
        "ALIBI": batch.alibi_slopes is not None,
        "DROPOUT": problem.dropout_p > 0,
        "MASK_Q": mask_q,
        "MASK_K": mask_k,
        # TF32 would lose half the digits of float32.
        "PRECISION": "ieee" if q.dtype is torch.float32 else None,
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }
