"""The work items of a Hopper prefill: tiles of query rows, ordered so that the thread blocks end at the same time.

Thread blocks fetch items from a counter, two in advance. They end at the same time only if the last items are short,
whichever sequence and head these belong to. Tiles of one sequence and head read the same keys, so most of the list
keeps them together:

    most heads       head by head, sequence by sequence, latest tile first
    the last heads   in the same order, without the tiles that see the fewest keys
    at the end       those tiles of the last heads, longest first, the heads of a tile together
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.portable.tile import FEWEST_SEQUENCES
from kernels.attention.portable.tile_list import TILE_FIELDS, load_lengths, store_tile
from kernels.attention.problem import PackedBatch, PagedBatch

_STEPS = tl.constexpr(16)
"""Steps that the longest tile's keys are divided into, to find the tiles that are short."""
_SHORT_STEPS = tl.constexpr(12)
"""Most steps that a short tile sees. Tiles that see nearly as many keys as the longest stay in the main order, since
moving them to the end would read their keys again."""
_MOST_KEYS = 1 << 30
_LATE_PER_SM = 6
"""Fewest items per SM of the last heads."""
_SHORT_PER_SM = 8
"""Most short items per SM. In a model of the launch, 5 or more end within 2 % of each other."""


@triton.jit(do_not_specialize=["num_seqs", "num_entries", "wanted", "most_keys"])
def list_items(
    tiles, cu_seqlens_q, seq_lens, cu_seqlens_k, num_seqs, num_entries, wanted, most_keys,
    GROUP: tl.constexpr, PAGED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
):  # fmt: skip
    """List the tiles of a step twice; one program per entry of `tiles`, [2 * entries + 1, 6] int32.

        entries     the longest sequences first, each one's last tiles before its first
        entries     the same order without the short tiles; then the short tiles, longest first
        1           number of tiles of the second list that are not short

    At most `wanted` tiles are short, not counting tiles that see no key. A short tile sees at most three quarters of
    the keys that the longest tile sees. No tile visits more than `most_keys` keys.
    """
    entry = tl.program_id(0)
    b = tl.arange(0, BLOCK_B)
    real = b < num_seqs
    q_start, q_len, k_start, k_len = load_lengths(
        cu_seqlens_q, seq_lens, cu_seqlens_k, b, real, PAGED
    )
    count = (q_len * GROUP + BLOCK_M - 1) // BLOCK_M
    longest = tl.minimum(tl.max(tl.where(count > 0, k_len, 0), 0), most_keys)
    limit = longest * 0
    for step in range(1, _SHORT_STEPS + 1):
        keys = longest * step // _STEPS
        found = tl.sum(_tiles_below(keys, count, q_len, k_len, GROUP, CAUSAL, BLOCK_M), 0)
        limit = tl.where(found <= wanted, keys, limit)
    short = _tiles_below(limit, count, q_len, k_len, GROUP, CAUSAL, BLOCK_M)
    num_long = tl.sum(count - short, 0)

    seq = tl.sum((tl.cumsum(count, 0) <= entry).to(tl.int32), 0)
    mine = b == seq
    my_queries = tl.sum(tl.where(mine, q_len, 0), 0)
    my_keys = tl.sum(tl.where(mine, k_len, 0), 0)
    my_count = tl.sum(tl.where(mine, count, 0), 0)
    my_short = tl.sum(tl.where(mine, short, 0), 0)
    # Entries of a sequence are adjacent; this is the index of the tile among them.
    tile = entry - tl.sum(tl.where(b < seq, count, 0), 0)
    first = (k_len > my_keys) | ((k_len == my_keys) & (b < seq))
    place = tl.sum(tl.where(first, count, 0), 0) + my_count - 1 - tile
    late = tl.sum(tl.where(first, count - short, 0), 0) + my_count - 1 - tile
    if tile < my_short:
        seen = my_keys
        if CAUSAL:
            last = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, my_queries - 1)
            # This is below 0 if there are more queries than keys, which does not matter: it only orders tiles.
            seen = my_keys - my_queries + last + 1
        as_short = tl.where(b < seq, seen - 1, seen)
        shorter = _tiles_below(as_short, count, q_len, k_len, GROUP, CAUSAL, BLOCK_M)
        before = tl.where(mine, short - 1 - tile, short - tl.minimum(shorter, short))
        late = num_long + tl.sum(tl.where(real, before, 0), 0)
    if entry == 0:
        tl.store(tiles + 2 * num_entries * TILE_FIELDS, num_long)
    if seq >= num_seqs:
        tl.store(tiles + entry * TILE_FIELDS, -1)
        tl.store(tiles + (num_entries + entry) * TILE_FIELDS, -1)
    else:
        first_row = tile * BLOCK_M
        my_start = tl.sum(tl.where(mine, q_start, 0), 0)
        my_first = tl.sum(tl.where(mine, k_start, 0), 0)
        store_tile(tiles, place, seq, first_row, my_start, my_queries, my_first, my_keys)
        late += num_entries
        store_tile(tiles, late, seq, first_row, my_start, my_queries, my_first, my_keys)


@triton.jit
def _tiles_below(
    keys, count, q_len, k_len, GROUP: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return how many tiles of each sequence see at most `keys` keys; if causal, they are its first tiles."""
    below = tl.zeros_like(count)
    if CAUSAL:
        tokens = tl.minimum(tl.maximum(keys - (k_len - q_len), 0), q_len)
        below = tokens * GROUP // BLOCK_M
    return tl.where(k_len <= keys, count, below)


@dataclass(frozen=True, slots=True)
class Items:
    """The items of a step: tiles times the groups of query heads that share them.

    Attributes:
        tiles: [2 * entries + 1, 6] int32, as `list_items` writes them.
        table: the batch's block table; for packed keys a dummy tensor that is never read.
        num_entries: entries of each list, including unused ones.
        late_heads: heads of the second list.
    """

    tiles: Tensor
    table: Tensor
    num_entries: int
    late_heads: int


def plan_items(
    batch: PagedBatch | PackedBatch,
    group: int,
    block_m: int,
    *,
    num_heads: int,
    num_sms: int,
    causal: bool,
    window: int | None,
) -> Items:
    """List the tiles of a step on its device.

    Args:
        batch: for its lengths.
        group: rows that a query token takes.
        block_m: query rows of a tile.
        num_heads: groups of query heads that share tiles.
        num_sms: thread blocks that take items.
        causal: whether a token sees no later tokens.
        window: most keys that a token sees; None for no limit.
    """
    num_seqs = batch.num_seqs
    # Each sequence may end with a partial tile.
    most = batch.num_tokens * group // block_m + num_seqs
    late_heads = min(num_heads, -(-_LATE_PER_SM * num_sms // max(most, 1)))
    cu_seqlens_q = batch.cu_seqlens_q
    device = cu_seqlens_q.device
    tiles = torch.empty((2 * most + 1, TILE_FIELDS.value), dtype=torch.int32, device=device)
    if isinstance(batch, PagedBatch):
        table, seq_lens, cu_seqlens_k = batch.block_table, batch.seq_lens, cu_seqlens_q
    else:
        table, seq_lens, cu_seqlens_k = tiles, cu_seqlens_q, batch.cu_seqlens_k
    list_items[(most,)](
        tiles, cu_seqlens_q, seq_lens, cu_seqlens_k, num_seqs, most,
        -(-_SHORT_PER_SM * num_sms // late_heads), window or _MOST_KEYS,
        GROUP=group, PAGED=isinstance(batch, PagedBatch), CAUSAL=causal, BLOCK_M=block_m,
        BLOCK_B=max(FEWEST_SEQUENCES, triton.next_power_of_2(num_seqs)), num_warps=1,
    )  # fmt: skip
    return Items(tiles, table, most, late_heads)
