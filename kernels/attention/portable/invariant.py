"""Attention whose result for a query has the same bits in every step, in Triton over the paged cache.

One compiled kernel computes prompts and decodes, and the order of its sums depends on nothing but positions:

    part      PART_TOKENS keys from a multiple of PART_TOKENS on, in tiles of BLOCK_N keys, all of them masked
    result    the parts of a query's keys, each divided by its own sum, merged one after the other from position 0 on

Keys that a query does not see leave its sums as they are, bit for bit, so it does not matter which other queries share
its tile, or where its window or its chunk begins. A program merges all parts of a tile in registers, or it computes
one part and the last program of the tile to finish merges them from memory. Both are the same operations, so which of
the two it is may depend on the batch.

Source: Dao et al., "Flash-Decoding", 2023; fixed parts as in He et al., "Defeating Nondeterminism in LLM Inference",
2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from kernels.attention.portable.part_list import RECORD_FIELDS, PartList
from kernels.attention.portable.tile import (
    attend,
    check_head_stride,
    load_rows,
    normalize,
    scale_arguments,
    store_rows,
    tile_constants,
    window_argument,
)
from kernels.attention.problem import PagedBatch

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.attention.problem import AttentionProblem, PackedBatch
    from kernels.attention.select import Selection

PART_TOKENS: Final = 512
_UNROLLED = tl.constexpr(8)
"""Parts that a merge loads at once."""


@triton.jit
def merge_part(acc1, acc2, m, total, part1, part2, lse):
    """Merge the next part, divided by its own sum, into the parts before it; a part with a sum of 0 changes nothing.

    The multiplications and additions to fuse are explicit, because the compiler's choice depends on the code around.
    """
    new_m = tl.maximum(m, lse)
    base = tl.where(new_m == -float("inf"), 0.0, new_m)
    fade = tl.exp2(m - base)
    weight = tl.exp2(lse - base)
    acc1 = tl.fma(acc1, tl.broadcast_to(fade[:, None], acc1.shape), part1 * weight[:, None])
    acc2 = tl.fma(acc2, tl.broadcast_to(fade[:, None], acc2.shape), part2 * weight[:, None])
    return acc1, acc2, new_m, tl.fma(total, fade, weight)


@triton.jit(do_not_specialize=["table_stride", "part_rows", "window"])
def invariant(
    q,
    k,
    v,
    k_scale,
    v_scale,
    out,
    records,
    arrivals,
    partial_out,
    partial_lse,
    block_table,
    table_stride,
    part_rows,
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
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FP8: tl.constexpr,
):
    """Compute attention of one row tile over all parts or one; program (key-value head, record).

    partial_out is [parts, KV_HEADS, part_rows, D] float32, partial_lse the same without D, in units of log2. Of a tile
    that is computed in parts, only the first `part_rows` rows may hold queries.
    """
    D: tl.constexpr = D1 + D2
    kv_head = tl.program_id(0)
    record = records + (tl.program_id(1) + 1) * RECORD_FIELDS
    seq = tl.load(record)
    if seq < 0:
        return
    first_row = tl.load(record + 1)
    q_start = tl.load(record + 2)
    q_len = tl.load(record + 3)
    num_keys = tl.load(record + 4)
    own_part = tl.load(record + 5)

    row = first_row + tl.arange(0, BLOCK_M)
    token = row // GROUP
    exists = token < q_len
    head = kv_head * GROUP + row % GROUP
    q_row = (q_start + token).to(tl.int64)
    q_tile = load_rows(q, q_row * q_stride + head * q_head_stride, exists, D1, D2, True)
    history = num_keys - q_len
    lowest = history + first_row // GROUP
    highest = history + tl.minimum((first_row + BLOCK_M - 1) // GROUP, q_len - 1)
    last_seen = tl.minimum(history + token, highest)

    begin = 0
    if WINDOW:
        begin = tl.maximum(lowest - window + 1, 0) // PART
    end = (highest + PART) // PART
    if own_part >= 0:
        begin = tl.maximum(begin, own_part)
        end = tl.minimum(end, own_part + 1)
    stride: tl.constexpr = KV_HEADS * D
    table = block_table + seq.to(tl.int64) * table_stride
    first_scale = kv_head * BLOCK_SIZE
    scales = (k_scale + first_scale, v_scale + first_scale, KV_HEADS * BLOCK_SIZE)
    acc1 = tl.zeros([BLOCK_M, D1], dtype=tl.float32)
    acc2 = tl.zeros([BLOCK_M, D2 if D2 > 0 else 1], dtype=tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for part in range(begin, end):
        part1, part2, part_m, part_total = attend(
            q_tile, k + kv_head * D, v + kv_head * D, scales, table,
            part * PART, tl.minimum((part + 1) * PART, highest + 1), num_keys, last_seen, lowest, highest,
            stride, stride, scale, window, softcap,
            True, True, WINDOW, SOFTCAP, True, BLOCK_SIZE, BLOCK_M, BLOCK_N, D1, D2, FP8,
        )  # fmt: skip
        part1, part2, lse = normalize(part1, part2, part_m, part_total)
        acc1, acc2, m, total = merge_part(acc1, acc2, m, total, part1, part2, lse)

    out_row = q_row * HEADS + head
    if own_part >= 0:
        # A single part was merged into nothing, which left it as it was: `acc` is its result and `m` its log-sum-exp.
        count = tl.load(record + 7)
        first = tl.load(record + 6).to(tl.int64)
        number = tl.load(record + 9)
        lines = ((first + number) * KV_HEADS + kv_head) * part_rows + tl.arange(0, BLOCK_M)
        store_rows(partial_out, lines * D, exists, acc1, acc2, D1, D2)
        tl.store(partial_lse + lines, m, mask=exists)
        # The stores of all threads of this program must precede its arrival.
        tl.debug_barrier()
        counter = arrivals + first * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") != count - 1:
            return
        tl.store(counter, 0)  # for the next layer
        acc1 = tl.zeros([BLOCK_M, D1], dtype=tl.float32)
        acc2 = tl.zeros([BLOCK_M, D2 if D2 > 0 else 1], dtype=tl.float32)
        m = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        for start in range(0, count, _UNROLLED):
            for i in tl.static_range(_UNROLLED):
                is_part = exists & (start + i < count)
                lines = ((first + start + i) * KV_HEADS + kv_head) * part_rows
                lines += tl.arange(0, BLOCK_M)
                # Other programs wrote these, so the loads must bypass the L1 cache.
                lse = tl.load(
                    partial_lse + lines, mask=is_part, other=-float("inf"), cache_modifier=".cg"
                )
                part1 = load_columns(partial_out, lines * D, is_part, 0, D1)
                part2 = acc2
                if D2 > 0:
                    part2 = load_columns(partial_out, lines * D, is_part, D1, D2)
                acc1, acc2, m, total = merge_part(acc1, acc2, m, total, part1, part2, lse)
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    acc1 = (acc1 * inverse[:, None]).to(out.dtype.element_ty)
    acc2 = (acc2 * inverse[:, None]).to(out.dtype.element_ty)
    store_rows(out, out_row * D, exists, acc1, acc2, D1, D2)


@triton.jit
def load_columns(base, offsets, mask, column, COLUMNS: tl.constexpr):
    """Load [rows, COLUMNS] at base + offsets + column, past the L1 cache."""
    columns = column + tl.arange(0, COLUMNS)
    at = base + offsets[:, None] + columns[None, :]
    return tl.load(at, mask=mask[:, None], other=0.0, cache_modifier=".cg")


class InvariantAttention:
    """Attention of one step on a GPU, of prompts or of decodes; shapes as in `kernels.prefill_attention`."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        assert isinstance(batch, PagedBatch), "the rows of the registry read a paged cache alone"
        assert problem.block_size is not None
        # The launch must not depend on the step, else neither would the order of the sums.
        launch = selection.launches[-1].launch
        assert PART_TOKENS % launch.block_n == 0
        heads = problem.num_kv_heads
        self._list = PartList(
            problem,
            batch,
            group=problem.group_size,
            block_m=launch.block_m,
            part_tokens=PART_TOKENS,
            counters=heads,
        )
        device = batch.seq_lens.device
        lines = (self._list.most_parts, heads, self._list.part_rows)
        self._partial_out = torch.empty((*lines, problem.head_dim), device=device)
        self._partial_lse = torch.empty(lines, device=device)
        self._grid = (heads, self._list.num_entries)
        self._table = batch.block_table
        self._problem = problem
        self._constants = {
            **tile_constants(problem, launch),
            "KV_HEADS": heads,
            "PART": PART_TOKENS,
            "WINDOW": problem.sliding_window is not None,
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
        assert lse is None, "the rows of the registry write no log-sum-exp"
        if q.shape[0] == 0:
            return
        check_head_stride(q)
        problem = self._problem
        invariant[self._grid](
            q,
            *kv.unbind(0),
            *scale_arguments(kv, kv_scale),
            out,
            self._list.records,
            self._list.arrivals,
            self._partial_out,
            self._partial_lse,
            self._table,
            self._table.stride(0),
            self._list.part_rows,
            q.stride(0),
            q.stride(1),
            problem.softmax_scale,
            window_argument(problem),
            problem.softcap or 0.0,
            **self._constants,
        )
