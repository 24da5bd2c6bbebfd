"""Prefill attention in Triton: tiles of packed query heads over paged or packed keys and values.

One program computes attention of one tile of query rows of one key-value head to all keys that the rows see. It reads
its tile from a list that the device makes once per step, so that planning does not wait for the device.

Source: Dao, "FlashAttention-2", 2023 for the loop; packing the query heads that share a key-value head
into one tile as in Shah et al., "FlashAttention-3", 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.attention.portable.tile import (
    FEWEST_SEQUENCES,
    LN_2,
    attend,
    check_head_stride,
    load_rows,
    normalize,
    scale_arguments,
    store_rows,
    tile_constants,
    window_argument,
)
from kernels.attention.portable.tile_list import TILE_FIELDS, load_lengths, store_tile
from kernels.attention.problem import PagedBatch

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.attention.problem import AttentionProblem, PackedBatch
    from kernels.attention.select import Selection


@triton.jit(do_not_specialize=["num_seqs"])
def list_tiles(
    tiles,
    cu_seqlens_q,
    seq_lens,
    cu_seqlens_k,
    num_seqs,
    GROUP: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """List the tiles of a step; one program per entry of `tiles`, [entries, 6] int32.

    The longest sequences come first, and the last tiles of a sequence before its first ones, since they see
    the most keys: the launch ends with short tiles.
    """
    entry = tl.program_id(0)
    b = tl.arange(0, BLOCK_B)
    real = b < num_seqs
    q_start, q_len, k_start, k_len = load_lengths(
        cu_seqlens_q, seq_lens, cu_seqlens_k, b, real, PAGED
    )
    count = (q_len * GROUP + BLOCK_M - 1) // BLOCK_M
    seq = tl.sum((tl.cumsum(count, 0) <= entry).to(tl.int32), 0)
    mine = b == seq
    num_keys = tl.sum(tl.where(mine, k_len, 0), 0)
    # Entries of a sequence are adjacent; this is the index of the tile among them.
    tile = entry - tl.sum(tl.where(b < seq, count, 0), 0)
    before = (k_len > num_keys) | ((k_len == num_keys) & (b < seq))
    place = tl.sum(tl.where(before, count, 0), 0)
    place += tl.sum(tl.where(mine, count, 0), 0) - 1 - tile
    if seq >= num_seqs:
        tl.store(tiles + entry * TILE_FIELDS, -1)
    else:
        my_start = tl.sum(tl.where(mine, q_start, 0), 0)
        my_queries = tl.sum(tl.where(mine, q_len, 0), 0)
        my_first = tl.sum(tl.where(mine, k_start, 0), 0)
        store_tile(tiles, place, seq, tile * BLOCK_M, my_start, my_queries, my_first, num_keys)


@triton.jit(do_not_specialize=["table_stride", "window"])
def prefill(
    q,
    k,
    v,
    k_scale,
    v_scale,
    out,
    lse,
    tiles,
    block_table,
    table_stride,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    scale,
    window,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LSE: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    FP8: tl.constexpr,
):
    """Compute attention of one row tile; program (tile, key-value head). Shapes as in `kernels.prefill_attention`."""
    record = tiles + tl.program_id(0) * TILE_FIELDS
    seq = tl.load(record)
    if seq < 0:
        return
    first_row = tl.load(record + 1)
    q_start = tl.load(record + 2)
    q_len = tl.load(record + 3)
    k_start = tl.load(record + 4)
    num_keys = tl.load(record + 5)
    kv_head = tl.program_id(1)

    row = first_row + tl.arange(0, BLOCK_M)
    token = row // GROUP
    exists = token < q_len
    head = kv_head * GROUP + row % GROUP
    q_row = (q_start + token).to(tl.int64)
    q_tile = load_rows(q, q_row * q_stride + head * q_head_stride, exists, D1, D2, True)

    history = num_keys - q_len
    last_token = tl.minimum((first_row + BLOCK_M - 1) // GROUP, q_len - 1)
    lowest = history + first_row // GROUP
    highest = history + last_token
    # Rows past the sequence's end use the causal limit of its last token, so that they need no extra mask.
    last_seen = tl.minimum(history + token, highest)
    # If there are more queries than keys, the first queries see no key.
    end = tl.maximum(tl.minimum(highest + 1, num_keys), 0) if CAUSAL else num_keys
    begin = 0
    if WINDOW:
        begin = tl.maximum(lowest - window + 1, 0) // BLOCK_N * BLOCK_N
    first_scale = kv_head * BLOCK_SIZE
    acc1, acc2, m, total = attend(
        q_tile,
        k + k_start.to(tl.int64) * k_stride + kv_head.to(tl.int64) * k_head_stride,
        v + k_start.to(tl.int64) * v_stride + kv_head.to(tl.int64) * v_head_stride,
        (k_scale + first_scale, v_scale + first_scale, HEADS // GROUP * BLOCK_SIZE),
        block_table + seq.to(tl.int64) * table_stride,
        begin, end, num_keys, last_seen, lowest, highest,
        k_stride, v_stride, scale, window, softcap,
        PAGED, CAUSAL, WINDOW, SOFTCAP, ONE_LOOP, BLOCK_SIZE, BLOCK_M, BLOCK_N, D1, D2, FP8,
    )  # fmt: skip
    acc1, acc2, log_sum = normalize(acc1, acc2, m, total)
    out_row = q_row * HEADS + head
    store_rows(
        out, out_row * (D1 + D2), exists,
        acc1.to(out.dtype.element_ty), acc2.to(out.dtype.element_ty), D1, D2,
    )  # fmt: skip
    if LSE:
        tl.store(lse + out_row, log_sum * LN_2, mask=exists)


def plan_tiles(batch: PagedBatch | PackedBatch, group: int, block_m: int) -> tuple[Tensor, Tensor]:
    """List the tiles of a step on its device.

    Args:
        batch: gives the lengths.
        group: rows per query token.
        block_m: query rows of a tile.

    Returns:
        The tiles as in `list_tiles`, and the block table; for packed keys a dummy tensor that is never read.
    """
    num_seqs = batch.num_seqs
    # Each sequence may end with a partial tile.
    most = batch.num_tokens * group // block_m + num_seqs
    cu_seqlens_q = batch.cu_seqlens_q
    tiles = torch.empty((most, TILE_FIELDS.value), dtype=torch.int32, device=cu_seqlens_q.device)
    if isinstance(batch, PagedBatch):
        table, seq_lens, cu_seqlens_k = batch.block_table, batch.seq_lens, cu_seqlens_q
    else:
        table, seq_lens, cu_seqlens_k = tiles, cu_seqlens_q, batch.cu_seqlens_k
    list_tiles[(most,)](
        tiles,
        cu_seqlens_q,
        seq_lens,
        cu_seqlens_k,
        num_seqs,
        GROUP=group,
        PAGED=isinstance(batch, PagedBatch),
        BLOCK_M=block_m,
        BLOCK_B=max(FEWEST_SEQUENCES, triton.next_power_of_2(num_seqs)),
        num_warps=1,
    )
    return tiles, table


class PortablePrefill:
    """Prefill attention of one step on a GPU; shapes as in `kernels.prefill_attention`."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> None:
        launch = selection.launch_for(batch.max_seqlen_k, batch.num_seqs)
        group = problem.group_size
        self._tiles, self._table = plan_tiles(batch, group, launch.block_m)
        paged = isinstance(batch, PagedBatch)
        self._grid = (self._tiles.shape[0], problem.num_kv_heads)
        self._problem = problem
        self._constants = {
            **tile_constants(problem, launch),
            "PAGED": paged,
            "CAUSAL": problem.causal,
            "WINDOW": problem.sliding_window is not None,
            "LSE": problem.lse,
            "ONE_LOOP": launch.one_loop,
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
        if q.shape[0] == 0:
            return
        check_head_stride(q)
        problem = self._problem
        token_stride, head_stride = kv.stride()[-3:-1]
        if problem.block_size is not None:
            # A dimension of size 1, as for blocks of one token, may have any stride.
            token_stride = problem.num_kv_heads * problem.head_dim
            head_stride = problem.head_dim
        keys, values = kv.unbind(0)
        prefill[self._grid](
            q,
            keys,
            values,
            *scale_arguments(kv, kv_scale),
            out,
            out if lse is None else lse,
            self._tiles,
            self._table,
            self._table.stride(0),
            q.stride(0),
            q.stride(1),
            token_stride,
            head_stride,
            token_stride,
            head_stride,
            problem.softmax_scale,
            window_argument(problem),
            problem.softcap or 0.0,
            **self._constants,
        )
