"""Decode attention in Triton: split over the keys of the paged cache, merged in the same launch.

Few rows and many keys: to keep every SM reading, the keys of a sequence are split over several
programs. Each writes its partial result; the last to finish merges them (`combine`). How a step is
split is decided once per step on the device, from the lengths there, so that neither planning nor a
captured graph needs to know them:

    split      programs of one (sequence, key-value head), neighbours in the launch
    chunk      key tiles of a split: ceil(tiles of all sequences / splits wanted), see kernels/splits.py

Source: Dao et al., "Flash-Decoding", 2023; the last block merging as in Osama et al., "Stream-K", 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.attention.combine import combine_columns
from kernels.attention.tile import (
    FEWEST_SEQUENCES,
    LN_2,
    attend,
    check_head_stride,
    load_rows,
    normalise,
    split_head_dim,
    store_rows,
    window_argument,
)
from kernels.plan import PagedBatch
from kernels.splits import BATCH_INVARIANT_SPLIT_TOKENS, split_bound, splits_wanted

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.plan import AttentionProblem, PackedBatch, Selection

_SPLIT_FIELDS = tl.constexpr(8)
"""A split: sequence (-1 for none), query start, query tokens, keys, first key, end, number, count."""
_MERGE_ELEMENTS = 8192
"""Partial results that a merge holds at once: 64 registers a thread at 4 warps."""


@triton.jit(do_not_specialize=["num_seqs", "wanted", "fixed", "window"])
def list_splits(
    splits,
    arrivals,
    cu_seqlens_q,
    seq_lens,
    num_seqs,
    wanted,
    fixed,
    window,
    NUM_ARRIVALS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """List the splits of a step; one program per entry of `splits`, [entries, 8] int32.

    `fixed` is the chunk in tiles, or 0 to aim at `wanted` splits; `kernels.splits` says the same on
    the host. Also sets `arrivals` to 0.
    """
    entry = tl.program_id(0)
    b = tl.arange(0, BLOCK_B)
    real = b < num_seqs
    q_start = tl.load(cu_seqlens_q + b, mask=real, other=0)
    q_len = tl.load(cu_seqlens_q + b + 1, mask=real, other=0) - q_start
    k_len = tl.load(seq_lens + b, mask=real, other=0)
    first = tl.zeros_like(k_len)
    if WINDOW:
        first = tl.maximum(k_len - q_len - window + 1, 0) // BLOCK_N
    tiles = (k_len + BLOCK_N - 1) // BLOCK_N - first
    chunk = fixed
    if fixed == 0:
        chunk = tl.maximum((tl.sum(tiles, 0) + wanted - 1) // wanted, 1)
    count = tl.where(real, tl.maximum((tiles + chunk - 1) // chunk, 1), 0)
    seq = tl.sum((tl.cumsum(count, 0) <= entry).to(tl.int32), 0)
    base = splits + entry * _SPLIT_FIELDS
    if seq >= num_seqs:
        tl.store(base, -1)
    else:
        mine = b == seq
        number = entry - tl.sum(tl.where(b < seq, count, 0), 0)
        my_first = tl.sum(tl.where(mine, first, 0), 0)
        my_tiles = tl.sum(tl.where(mine, tiles, 0), 0)
        my_count = tl.sum(tl.where(mine, count, 0), 0)
        my_keys = tl.sum(tl.where(mine, k_len, 0), 0)
        begin = my_first + number * my_tiles // my_count
        end = my_first + (number + 1) * my_tiles // my_count
        tl.store(base, seq)
        tl.store(base + 1, tl.sum(tl.where(mine, q_start, 0), 0))
        tl.store(base + 2, tl.sum(tl.where(mine, q_len, 0), 0))
        tl.store(base + 3, my_keys)
        tl.store(base + 4, begin * BLOCK_N)
        tl.store(base + 5, tl.minimum(end * BLOCK_N, my_keys))
        tl.store(base + 6, number)
        tl.store(base + 7, my_count)
        if number == 0:
            counter = tl.arange(0, triton.next_power_of_2(NUM_ARRIVALS))
            tl.store(arrivals + seq * NUM_ARRIVALS + counter, 0, mask=counter < NUM_ARRIVALS)


@triton.jit(do_not_specialize=["table_stride", "window"])
def decode(
    q,
    k,
    v,
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
):
    """Attend one tile of rows to one split; program (split, key-value head, row tile).

    Heads are neighbours in the launch: they read neighbouring bytes of the same blocks.
    """
    TILES: tl.constexpr = KV_HEADS * ROW_TILES
    D: tl.constexpr = D1 + D2
    program = tl.program_id(0)
    tile = program % TILES
    kv_head = tile // ROW_TILES
    record = splits + program // TILES * _SPLIT_FIELDS
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
    acc1, acc2, m, total = attend(
        q_tile,
        k + kv_head * D,
        v + kv_head * D,
        block_table + seq.to(tl.int64) * table_stride,
        begin, end, num_keys, last_seen, lowest, highest,
        stride, stride, scale, window, softcap,
        True, True, WINDOW, SOFTCAP, True, BLOCK_SIZE, BLOCK_M, BLOCK_N, D1, D2,
    )  # fmt: skip
    acc1, acc2, log_sum = normalise(acc1, acc2, m, total)
    out_row = q_row * HEADS + head
    if count == 1:
        store_rows(
            out, out_row * D, exists,
            acc1.to(out.dtype.element_ty), acc2.to(out.dtype.element_ty), D1, D2,
        )  # fmt: skip
        if LSE:
            tl.store(lse + out_row, log_sum * LN_2, mask=exists)
        return

    # Rows that exist are fewer than MERGE_ROWS, which is smaller than a tile where heads are few.
    line = program.to(tl.int64) * MERGE_ROWS + tl.arange(0, BLOCK_M)
    store_rows(partial_out, line * D, exists, acc1, acc2, D1, D2)
    tl.store(partial_lse + line, log_sum, mask=exists)
    # All of this program's stores, by all of its threads, come before its arrival is counted.
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
    """One step's decode attention on a GPU; shapes as in the door's `decode_attention`."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        assert isinstance(batch, PagedBatch), "a decode's problem has a block size"
        assert problem.block_size is not None
        launch = selection.launch_for(batch.max_seqlen_k)
        device = batch.seq_lens.device
        rows = problem.max_query_tokens * problem.group_size
        row_tiles = -(-rows // launch.block_m)
        tiles = problem.num_kv_heads * row_tiles
        wanted = splits_wanted(selection.arch.num_sms, launch.programs_per_sm, tiles)
        fixed = BATCH_INVARIANT_SPLIT_TOKENS // launch.block_n if problem.batch_invariant else 0
        most = split_bound(batch.num_seqs, batch.max_seqlen_k, launch.block_n, wanted, fixed)
        self._splits = torch.empty((most, _SPLIT_FIELDS.value), dtype=torch.int32, device=device)
        self._arrivals = torch.empty((batch.num_seqs, tiles), dtype=torch.int32, device=device)
        list_splits[(most,)](
            self._splits,
            self._arrivals,
            batch.cu_seqlens_q,
            batch.seq_lens,
            batch.num_seqs,
            wanted,
            fixed,
            window_argument(problem),
            NUM_ARRIVALS=tiles,
            BLOCK_N=launch.block_n,
            WINDOW=problem.sliding_window is not None,
            BLOCK_B=max(FEWEST_SEQUENCES, triton.next_power_of_2(batch.num_seqs)),
            num_warps=1,
        )
        merge_rows = min(launch.block_m, triton.next_power_of_2(rows))
        lines = (most * tiles, merge_rows)
        self._partial_out = torch.empty((*lines, problem.head_dim), device=device)
        self._partial_lse = torch.empty(lines, device=device)
        self._table = batch.block_table
        self._grid = (most * tiles,)
        d1, d2 = split_head_dim(problem.head_dim)
        self._problem = problem
        self._constants = {
            "HEADS": problem.num_heads,
            "KV_HEADS": problem.num_kv_heads,
            "GROUP": problem.group_size,
            "D1": d1,
            "D2": d2,
            "BLOCK_SIZE": problem.block_size,
            "BLOCK_M": launch.block_m,
            "BLOCK_N": launch.block_n,
            "ROW_TILES": row_tiles,
            "MERGE_ROWS": merge_rows,
            "MERGE_PARTS": max(1, min(16, _MERGE_ELEMENTS // (merge_rows * d1))),
            "WINDOW": problem.sliding_window is not None,
            "SOFTCAP": problem.softcap is not None,
            "LSE": problem.lse,
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
        }

    def __call__(self, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Write the attention of `q` over `kv` to `out`."""
        check_head_stride(q)
        problem = self._problem
        keys, values = kv.unbind(0)
        decode[self._grid](
            q,
            keys,
            values,
            out,
            out if lse is None else lse,
            self._splits,
            self._arrivals,
            self._partial_out,
            self._partial_lse,
            self._table,
            self._table.stride(0),
            q.stride(0),
            q.stride(1),
            problem.softmax_scale,
            window_argument(problem),
            problem.softcap or 0.0,
            **self._constants,
        )
