"""Decode attention in Triton over the paged cache: split-KV, merged in the same launch.

A decode has few rows and many keys. The keys of a sequence are split over several programs (`split_list`), so that
every SM has keys to read. Each program writes its partial result; the last to finish merges them (`combine`).

Source: Dao et al., "Flash-Decoding", 2023; the last block merging as in Osama et al., "Stream-K", 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.portable.combine import combine_columns
from kernels.attention.portable.split_list import SPLIT_FIELDS, SplitList
from kernels.attention.portable.tile import (
    LN_2,
    attend,
    check_head_stride,
    load_rows,
    normalize,
    scale_arguments,
    split_head_dim,
    store_rows,
    tile_constants,
    window_argument,
)
from kernels.attention.portable.tile_fp8 import attend_pairs, takes_pairs
from kernels.attention.problem import PagedBatch
from kernels.gpu.dependent_launch import dependent_launch, may_depend

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.attention.problem import AttentionProblem, PackedBatch
    from kernels.attention.select import Selection

_MERGE_ELEMENTS = 8192
"""Elements of partial results that a merge holds at once: 64 registers per thread with 4 warps."""


@triton.jit(do_not_specialize=["table_stride", "window"])
def decode(
    q,
    k,
    v,
    k_scale,
    v_scale,
    out,
    lse,
    splits,
    arrivals,
    partial_out,
    partial_lse,
    block_table,
    table_stride,
    q_stride,
    q_head_stride,
    scale,
    window,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_TILES: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LSE: tl.constexpr,
    FP8: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute attention of one row tile over one split; program (split, key-value head, row tile).

    The heads of a split are adjacent programs, since they read adjacent bytes of the same blocks.
    """
    TILES: tl.constexpr = KV_HEADS * ROW_TILES
    D: tl.constexpr = D1 + D2
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    tile = program % TILES
    kv_head = tile // ROW_TILES
    record = splits + program // TILES * SPLIT_FIELDS
    seq = tl.load(record)
    if seq < 0:
        return
    q_start = tl.load(record + 1)
    q_len = tl.load(record + 2)
    num_keys = tl.load(record + 3)
    begin = tl.load(record + 4)
    end = tl.load(record + 5)
    number = tl.load(record + 6)
    count = tl.load(record + 7)

    first_row = tile % ROW_TILES * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    token = row // GROUP
    exists = token < q_len
    head = kv_head * GROUP + row % GROUP
    q_row = (q_start + token).to(tl.int64)
    q_tile = load_rows(q, q_row * q_stride + head * q_head_stride, exists, D1, D2, True)

    history = num_keys - q_len
    last_seen = history + tl.minimum(token, q_len - 1)
    lowest = history + tl.minimum(first_row // GROUP, q_len - 1)
    highest = history + tl.minimum((first_row + BLOCK_M - 1) // GROUP, q_len - 1)
    stride: tl.constexpr = KV_HEADS * D
    table = block_table + seq.to(tl.int64) * table_stride
    first_scale = kv_head * BLOCK_SIZE
    scales = (k_scale + first_scale, v_scale + first_scale, KV_HEADS * BLOCK_SIZE)
    if PAIRS:
        acc1, acc2, m, total = attend_pairs(
            q_tile, k + kv_head * D, v + kv_head * (D // 2), scales, table,
            begin, end, num_keys, last_seen, lowest,
            stride, scale, window, softcap,
            True, WINDOW, SOFTCAP, BLOCK_SIZE, BLOCK_M, BLOCK_N, D1, D2,
        )  # fmt: skip
    else:
        acc1, acc2, m, total = attend(
            q_tile, k + kv_head * D, v + kv_head * D, scales, table,
            begin, end, num_keys, last_seen, lowest, highest,
            stride, stride, scale, window, softcap,
            True, True, WINDOW, SOFTCAP, True, BLOCK_SIZE, BLOCK_M, BLOCK_N, D1, D2, FP8,
        )  # fmt: skip
    acc1, acc2, log_sum = normalize(acc1, acc2, m, total)
    out_row = q_row * HEADS + head
    if count == 1:
        store_rows(
            out, out_row * D, exists,
            acc1.to(out.dtype.element_ty), acc2.to(out.dtype.element_ty), D1, D2,
        )  # fmt: skip
        if LSE:
            tl.store(lse + out_row, log_sum * LN_2, mask=exists)
        return

    # At most MERGE_ROWS rows exist; with few heads that is less than a tile.
    line = program.to(tl.int64) * MERGE_ROWS + tl.arange(0, BLOCK_M)
    store_rows(partial_out, line * D, exists, acc1, acc2, D1, D2)
    tl.store(partial_lse + line, log_sum, mask=exists)
    # The stores of all threads of this program must precede its arrival.
    tl.debug_barrier()
    counter = arrivals + seq * TILES + tile
    if tl.atomic_add(counter, 1, sem="acq_rel") != count - 1:
        return
    tl.store(counter, 0)  # for the next layer

    merged = first_row + tl.arange(0, MERGE_ROWS)
    token = merged // GROUP
    exists = token < q_len
    out_row = (q_start + token).to(tl.int64) * HEADS + kv_head * GROUP + merged % GROUP
    first_part = program - number * TILES
    result, log_sum = combine_columns(
        partial_out, partial_lse, first_part, count, TILES, 0,
        MERGE_ROWS, D1, D, MERGE_PARTS,
    )  # fmt: skip
    columns = tl.arange(0, D1)
    tl.store(
        out + out_row[:, None] * D + columns[None, :],
        result.to(out.dtype.element_ty),
        mask=exists[:, None],
    )
    if LSE:
        tl.store(lse + out_row, log_sum * LN_2, mask=exists)
    if D2 > 0:
        result, log_sum = combine_columns(
            partial_out, partial_lse, first_part, count, TILES, D1,
            MERGE_ROWS, D2, D, MERGE_PARTS,
        )  # fmt: skip
        columns = D1 + tl.arange(0, D2)
        tl.store(
            out + out_row[:, None] * D + columns[None, :],
            result.to(out.dtype.element_ty),
            mask=exists[:, None],
        )


class PortableDecode:
    """Decode attention of one step on a GPU; shapes as in `kernels.decode_attention`."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        assert isinstance(batch, PagedBatch), "a decode's problem has a block size"
        assert problem.block_size is not None
        launch = selection.launch_for(batch.max_seqlen_k, batch.num_seqs)
        rows = problem.max_query_tokens * problem.group_size
        self._list = SplitList(problem, batch, selection, rows)
        self._table = batch.block_table
        d1, d2 = split_head_dim(problem.head_dim)
        self._problem = problem
        self._constants = {
            **tile_constants(problem, launch),
            "KV_HEADS": problem.num_kv_heads,
            "ROW_TILES": self._list.row_tiles,
            "MERGE_ROWS": self._list.merge_rows,
            "MERGE_PARTS": max(1, min(16, _MERGE_ELEMENTS // (self._list.merge_rows * d1))),
            "WINDOW": problem.sliding_window is not None,
            "LSE": problem.lse,
            "PAIRS": problem.kv_dtype is not None and takes_pairs(d1, d2),
            **dependent_launch(may_depend(selection.arch, batch.seq_lens.device)),
        }

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Write the attention of `q` over `kv` to `out`."""
        check_head_stride(q)
        problem = self._problem
        keys, values = kv.unbind(0)
        decode[(self._list.num_programs,)](
            q,
            keys,
            values.view(torch.int16) if self._constants["PAIRS"] else values,
            *scale_arguments(kv, kv_scale),
            out,
            out if lse is None else lse,
            self._list.splits,
            self._list.arrivals,
            self._list.partial_out,
            self._list.partial_lse,
            self._table,
            self._table.stride(0),
            q.stride(0),
            q.stride(1),
            problem.softmax_scale,
            window_argument(problem),
            problem.softcap or 0.0,
            **self._constants,
        )
