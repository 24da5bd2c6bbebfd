"""The tiles of query rows of a prefill: a list that the device makes, so that planning does not wait for the device.

`load_lengths` and `store_tile` are device functions of other kernels that make lists, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.portable.tile import FEWEST_SEQUENCES
from kernels.attention.problem import PackedBatch, PagedBatch

TILE_FIELDS = tl.constexpr(6)
"""Fields of a tile: sequence (-1 for an unused entry), its first row, query start, query tokens, key start, keys."""


@triton.jit
def load_lengths(cu_seqlens_q, seq_lens, cu_seqlens_k, b, real, PAGED: tl.constexpr):
    """Load (query start, query tokens, key start, keys) of sequences, int32 each."""
    q_start = tl.load(cu_seqlens_q + b, mask=real, other=0)
    q_len = tl.load(cu_seqlens_q + b + 1, mask=real, other=0) - q_start
    if PAGED:
        k_start = tl.zeros_like(q_start)
        k_len = tl.load(seq_lens + b, mask=real, other=0)
    else:
        k_start = tl.load(cu_seqlens_k + b, mask=real, other=0)
        k_len = tl.load(cu_seqlens_k + b + 1, mask=real, other=0) - k_start
    return q_start, q_len, k_start, k_len


@triton.jit
def store_tile(tiles, place, seq, first_row, q_start, q_len, k_start, num_keys):
    """Write one tile's fields."""
    base = tiles + place * TILE_FIELDS
    tl.store(base, seq)
    tl.store(base + 1, first_row)
    tl.store(base + 2, q_start)
    tl.store(base + 3, q_len)
    tl.store(base + 4, k_start)
    tl.store(base + 5, num_keys)


@triton.jit(do_not_specialize=["num_seqs"])
def list_tiles(
    tiles, cu_seqlens_q, seq_lens, cu_seqlens_k, num_seqs,
    GROUP: tl.constexpr, PAGED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
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
        tiles, cu_seqlens_q, seq_lens, cu_seqlens_k, num_seqs,
        GROUP=group, PAGED=isinstance(batch, PagedBatch), BLOCK_M=block_m,
        BLOCK_B=max(FEWEST_SEQUENCES, triton.next_power_of_2(num_seqs)), num_warps=1,
    )  # fmt: skip
    return tiles, table
