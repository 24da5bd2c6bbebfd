"""How many parts a batch is split into: the keys of a decode, and the sequences whose keys are copied to a buffer.

A decode's keys are split (split-KV) so that thread blocks fill the GPU:

    wanted = programs the GPU holds at once / programs that one split takes
    chunk  = ceil(tiles of all sequences / wanted), in tiles of keys
    splits of a sequence = ceil(its tiles / chunk), at least 1; its tiles divided evenly among them
    order of the launch = the sequences with the longest splits first

A long sequence thus gets more splits than a short one. The total never exceeds wanted + B, whatever the lengths, so
a launch of that many fits every step of B sequences, and a captured CUDA graph can be replayed as the lengths grow.
If a batch has more splits than the GPU holds at once, the shortest start last, because a long split that started
late would run alone at the end.

The device lists the splits (`kernels/attention/portable/split_list.py`).

Source: our own; a chunk size common to all sequences is from FlashInfer's decode plan (Ye et al., 2025).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kernels.attention.problem import AttentionProblem, PagedBatch

MOST_BYTES: Final = 128 << 20
"""Size of the buffer of copied keys and values, unless those of one sequence take more."""


def splits_wanted(num_sms: int, programs_per_sm: int, programs_per_split: int) -> int:
    """Return the number of splits that fill a GPU.

    Args:
        num_sms: SMs of the GPU.
        programs_per_sm: thread blocks that an SM holds at once.
        programs_per_split: thread blocks of one split, one for each tile of query rows.
    """
    return max(1, num_sms * programs_per_sm // programs_per_split)


def prefix_parts(num_keys: int, block_n: int, wanted: int) -> int:
    """Return the number of parts that the keys shared by all sequences are split into.

    Args:
        num_keys: shared tokens, at least 1.
        block_n: keys of a tile.
        wanted: from `splits_wanted`; a split's programs are the tiles of all rows of the batch.
    """
    return min(wanted, -(-num_keys // block_n))


def sequences_of_part(problem: AttentionProblem, max_seqlen_k: int, item_bytes: int) -> int:
    """Return how many sequences' keys and values are copied to the buffer together, at least 1.

    Args:
        problem: for the heads and the head dim.
        max_seqlen_k: most keys of a sequence.
        item_bytes: bytes of a copied number.
    """
    token_bytes = 2 * problem.num_kv_heads * problem.head_dim * item_bytes
    return max(1, MOST_BYTES // (max(1, max_seqlen_k) * token_bytes))


def split_sequences(
    problem: AttentionProblem, batch: PagedBatch, item_bytes: int
) -> list[PagedBatch]:
    """Split a batch into parts of `sequences_of_part` sequences; for the arguments see there."""
    count = sequences_of_part(problem, batch.max_seqlen_k, item_bytes)
    return [
        dataclasses.replace(
            batch,
            cu_seqlens_q=batch.cu_seqlens_q[first : first + count + 1],
            seq_lens=batch.seq_lens[first : first + count],
            block_table=batch.block_table[first : first + count],
        )
        for first in range(0, batch.num_seqs, count)
    ]
