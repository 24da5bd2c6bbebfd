"""The splits of a decode: a list that the device makes, and the buffers of their partial results.

The list is made once per step from the lengths on the device, so that neither planning nor a captured
CUDA graph depends on the lengths:

    split      a range of a sequence's keys; its programs, one per (key-value head, row tile), are adjacent
    chunk      key tiles of a split: ceil(tiles of all sequences / splits wanted), see kernels/attention/splits.py
    order      sequences with the longest splits first, so that the launch ends with short splits

Each program writes its partial result. The last program of a (sequence, key-value head, row tile) to
finish merges them.

Source: Dao et al., "Flash-Decoding", 2023; the last block merging as in Osama et al., "Stream-K", 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.attention.portable.tile import FEWEST_SEQUENCES, window_argument
from kernels.attention.splits import splits_wanted

if TYPE_CHECKING:
    from kernels.attention.problem import AttentionProblem, PagedBatch
    from kernels.attention.select import Selection

SPLIT_FIELDS = tl.constexpr(8)
"""Fields of a split: sequence (-1 for an unused entry), query start, query tokens, keys of the sequence, first key,
end key, number of the split within its sequence, splits of the sequence."""


@triton.jit(do_not_specialize=["num_seqs", "wanted", "window"])
def list_splits(
    splits, arrivals, cu_seqlens_q, seq_lens, num_seqs, wanted, window,
    NUM_ARRIVALS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """List the splits of a step; one program per entry of `splits`, [entries, 8] int32.

    Program `entry` computes split number `entry` in the order of the sequences, and writes it to its position in the
    order of the launch. It also resets `arrivals` to 0.
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
    chunk = tl.maximum((tl.sum(tiles, 0) + wanted - 1) // wanted, 1)
    count = tl.where(real, tl.maximum((tiles + chunk - 1) // chunk, 1), 0)
    seq = tl.sum((tl.cumsum(count, 0) <= entry).to(tl.int32), 0)
    if seq >= num_seqs:
        tl.store(splits + entry * SPLIT_FIELDS, -1)
    else:
        mine = b == seq
        number = entry - tl.sum(tl.where(b < seq, count, 0), 0)
        longest = (tiles + count - 1) // tl.maximum(count, 1)
        my_longest = tl.sum(tl.where(mine, longest, 0), 0)
        before = (longest > my_longest) | ((longest == my_longest) & (b < seq))
        base = splits + (tl.sum(tl.where(before, count, 0), 0) + number) * SPLIT_FIELDS
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


class SplitList:
    """The splits of one step's decode.

    Attributes:
        splits: [entries, 8] int32, made on the device.
        arrivals: [B, tiles] int32, the number of programs of a tile that have finished; 0 between launches.
        partial_out: [entries * tiles, merge_rows, D] float32.
        partial_lse: [entries * tiles, merge_rows] float32, units of log2.
        row_tiles: tiles of query rows of a key-value head.
        merge_rows: most rows of a tile that hold a query, rounded up to a power of two.
        num_programs: thread blocks of a launch.
    """

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch, selection: Selection, num_rows: int
    ) -> None:
        """List the splits of a step.

        Args:
            problem: gives heads and window.
            batch: gives the lengths.
            selection: gives the tile sizes.
            num_rows: most query rows of a sequence for one key-value head.
        """
        launch = selection.launch_for(batch.max_seqlen_k, batch.num_seqs)
        device = batch.seq_lens.device
        self.row_tiles = -(-num_rows // launch.block_m)
        tiles = problem.num_kv_heads * self.row_tiles
        wanted = splits_wanted(selection.arch.num_sms, launch.programs_per_sm, tiles)
        most = batch.num_seqs + wanted
        self.splits = torch.empty((most, SPLIT_FIELDS.value), dtype=torch.int32, device=device)
        self.arrivals = torch.empty((batch.num_seqs, tiles), dtype=torch.int32, device=device)
        list_splits[(most,)](
            self.splits, self.arrivals, batch.cu_seqlens_q, batch.seq_lens, batch.num_seqs, wanted,
            window_argument(problem),
            NUM_ARRIVALS=tiles, BLOCK_N=launch.block_n, WINDOW=problem.sliding_window is not None,
            BLOCK_B=max(FEWEST_SEQUENCES, triton.next_power_of_2(batch.num_seqs)), num_warps=1,
        )  # fmt: skip
        self.num_programs = most * tiles
        self.merge_rows = min(launch.block_m, triton.next_power_of_2(num_rows))
        lines = (self.num_programs, self.merge_rows)
        self.partial_out = torch.empty((*lines, problem.head_dim), device=device)
        self.partial_lse = torch.empty(lines, device=device)
