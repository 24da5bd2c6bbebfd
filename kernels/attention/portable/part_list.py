"""Parts of a step's keys for batch-invariant attention: a list of work that the device makes from the lengths.

A part has keys from a multiple of a fixed number on, so its sums depend on positions alone. A sequence whose queries
are a single tile has an entry for each of its parts; other sequences have one for each tile, which visits all parts.
Which of the two it is may depend on the batch, since both merge the parts with the same operations in the same order.

The list is made once per step, so that neither planning nor a captured CUDA graph depends on the lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from kernels.attention.portable.tile import FEWEST_SEQUENCES, window_argument
from kernels.attention.portable.tile_list import load_lengths

if TYPE_CHECKING:
    from kernels.attention.problem import AttentionProblem, PagedBatch

MOST_PART_ROWS: Final = 4096
"""Rows of a key-value head, of all parts of a step that have entries of their own; bounds the memory for their
results."""
RECORD_FIELDS = tl.constexpr(10)
"""Fields of a record: sequence (-1 for an unused entry), first row, query start, query tokens, keys, its part (-1 for
all parts), index of the sequence's first part among those of the step, parts that have entries, rows of a part's result
in memory, number of its part among those that have entries."""


@triton.jit(do_not_specialize=["num_seqs", "most_parts", "part_rows", "window"])
def list_parts(
    records, arrivals, cu_seqlens_q, seq_lens, num_seqs, most_parts, part_rows, window,
    GROUP: tl.constexpr, COUNTERS: tl.constexpr, BLOCK_M: tl.constexpr, PART: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """List the tiles and parts of a step; one program per entry of `records`, [entries + 1, 10] int32.

    The first field of the first record is the number of used entries. These come next, those with the most keys before
    others; the rest are unused. The parts of a sequence have entries of their own if its queries are a single tile,
    until `most_parts` are used up; parts before the window of all of its queries have none. The last tiles of a
    sequence come before its first ones, since they see the most keys. Resets `arrivals`, [parts, COUNTERS] int32, to 0
    at each sequence's first part.
    """
    entry = tl.program_id(0)
    b = tl.arange(0, BLOCK_B)
    real = b < num_seqs
    q_start, q_len, _, k_len = load_lengths(cu_seqlens_q, seq_lens, cu_seqlens_q, b, real, True)
    tiles = (q_len * GROUP + BLOCK_M - 1) // BLOCK_M
    end = (k_len + PART - 1) // PART
    parts = end
    if WINDOW:
        parts = end - tl.maximum(k_len - q_len - window + 1, 0) // PART
    parts = tl.where((tiles == 1) & (parts > 1), parts, 0)
    splits = (parts > 0) & (tl.cumsum(parts, 0) <= most_parts)
    count = tl.where(splits, parts, tiles)
    keys = tl.where(splits, tl.minimum(k_len, PART), k_len)
    if entry == 0:
        tl.store(records, tl.sum(count, 0))
    records += RECORD_FIELDS
    seq = tl.sum((tl.cumsum(count, 0) <= entry).to(tl.int32), 0)
    if seq >= num_seqs:
        tl.store(records + entry * RECORD_FIELDS, -1)
    else:
        mine = b == seq
        my_count = tl.sum(tl.where(mine, count, 0), 0)
        my_keys = tl.sum(tl.where(mine, keys, 0), 0)
        is_part = tl.sum(tl.where(mine & splits, 1, 0), 0) > 0
        first = tl.sum(tl.where((b < seq) & splits, parts, 0), 0)
        number = entry - tl.sum(tl.where(b < seq, count, 0), 0)
        before = (keys > my_keys) | ((keys == my_keys) & (b < seq))
        record = records + (tl.sum(tl.where(before, count, 0), 0) + number) * RECORD_FIELDS
        part = tl.sum(tl.where(mine, end, 0), 0) - my_count + number
        tl.store(record, seq)
        tl.store(record + 1, tl.where(is_part, 0, (my_count - 1 - number) * BLOCK_M))
        tl.store(record + 2, tl.sum(tl.where(mine, q_start, 0), 0))
        tl.store(record + 3, tl.sum(tl.where(mine, q_len, 0), 0))
        tl.store(record + 4, tl.sum(tl.where(mine, k_len, 0), 0))
        tl.store(record + 5, tl.where(is_part, part, -1))
        tl.store(record + 6, first)
        tl.store(record + 7, my_count)
        tl.store(record + 8, part_rows)
        tl.store(record + 9, number)
        if is_part & (number == 0):
            counter = tl.arange(0, BLOCK_C)
            tl.store(arrivals + first * COUNTERS + counter, 0, mask=counter < COUNTERS)


class PartList:
    """The listed work of one step, and the counters of its finished parts.

    Attributes:
        records: [num_entries + 1, 10] int32, see `list_parts`.
        num_entries: entries, including unused ones.
        arrivals: [most_parts, counters] int32, 0 at the first part of each sequence that has entries for its parts.
        most_parts: parts of all sequences that may have entries of their own.
        part_rows: most rows of a tile of such a sequence.
        visits_parts: whether a tile may have to visit several parts.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        batch: PagedBatch,
        *,
        group: int,
        block_m: int,
        part_tokens: int,
        counters: int,
        shares: int = 1,
    ) -> None:
        """List the work of a step.

        Args:
            problem: for its window.
            batch: for its lengths.
            group: rows of a query token.
            block_m: rows of a tile.
            part_tokens: keys of a part.
            counters: counters of a sequence, one for each of the programs that merge its parts.
            shares: tiles of a query token for each key-value head; a tile has some of its query heads.
        """
        num_seqs = batch.num_seqs
        rows = batch.max_seqlen_q * group
        self.part_rows = min(block_m, rows)
        self.most_parts, self.visits_parts = 0, False
        if batch.max_seqlen_k > part_tokens:
            parts = num_seqs * -(-batch.max_seqlen_k // part_tokens)
            self.most_parts = min(MOST_PART_ROWS // (self.part_rows * shares), parts)
            self.visits_parts = rows > block_m or self.most_parts < parts
        # Each sequence may end with a partial tile.
        self.num_entries = batch.num_tokens * group // block_m + num_seqs + self.most_parts
        device = batch.seq_lens.device
        shape = self.num_entries + 1, RECORD_FIELDS.value
        self.records = torch.empty(shape, dtype=torch.int32, device=device)
        self.arrivals = torch.empty((self.most_parts, counters), dtype=torch.int32, device=device)
        list_parts[(self.num_entries,)](
            self.records, self.arrivals, batch.cu_seqlens_q, batch.seq_lens, num_seqs, self.most_parts,
            self.part_rows, window_argument(problem),
            GROUP=group, COUNTERS=counters, BLOCK_M=block_m, PART=part_tokens,
            WINDOW=problem.sliding_window is not None,
            BLOCK_B=max(FEWEST_SEQUENCES, triton.next_power_of_2(num_seqs)),
            BLOCK_C=triton.next_power_of_2(counters), num_warps=1,
        )  # fmt: skip
