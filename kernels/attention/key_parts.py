"""Parts of a step for kernels that copy keys and values to a buffer before they attend to them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kernels.attention.problem import AttentionProblem, PagedBatch

MOST_BYTES: Final = 128 << 20
"""Size of the buffer, unless the keys and values of one sequence take more."""


def sequences_of_part(problem: AttentionProblem, max_seqlen_k: int, item_bytes: int) -> int:
    """Return how many sequences are copied together, at least 1.

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
