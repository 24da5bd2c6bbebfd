"""Host-side view of a paged batch, for the PyTorch rows.

Turns block tables into runs of neighbouring cache slots. Knows no tensors beyond reading them once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kernels.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.plan import AttentionProblem, PagedBatch


class Run(NamedTuple):
    """Cache slots that lie next to each other: `length` tokens from `slot`."""

    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class HostSequence:
    """One sequence's part of a step.

    Attributes:
        row: its first query row.
        num_queries: query tokens, at least 1.
        history: tokens of the window that lie before its first query.
        runs: the slots of all tokens that any of its queries attends to, in order.
    """

    row: int
    num_queries: int
    history: int
    runs: tuple[Run, ...]

    @property
    def num_keys(self) -> int:
        """Tokens in `runs`."""
        return self.history + self.num_queries


def slot_runs(block_ids: Sequence[int], start: int, stop: int, block_size: int) -> tuple[Run, ...]:
    """Find the fewest runs of slots that hold tokens start to stop of a sequence.

    Args:
        block_ids: the sequence's blocks in order.
        start: first token.
        stop: one past the last token, above `start`.
        block_size: tokens per block.
    """
    first = start // block_size
    slot = block_ids[first] * block_size + start % block_size
    expected = block_ids[first] + 1
    remaining = stop - start
    length = min(block_size - start % block_size, remaining)
    remaining -= length
    runs: list[Run] = []
    for block_id in block_ids[first + 1 : -(-stop // block_size)]:
        if block_id != expected:
            runs.append(Run(slot, length))
            slot, length = block_id * block_size, 0
        taken = min(block_size, remaining)
        length += taken
        remaining -= taken
        expected = block_id + 1
    runs.append(Run(slot, length))
    return tuple(runs)


def host_sequences(problem: AttentionProblem, batch: PagedBatch) -> list[HostSequence]:
    """Read the batch to the host and find the runs of every sequence that has queries.

    Raises:
        ShapeError: query rows do not ascend, a sequence is shorter than its queries, or its block
            table is too short or holds a negative block.
    """
    offsets: list[int] = batch.cu_seqlens_q.tolist()
    lengths: list[int] = batch.seq_lens.tolist()
    tables: list[list[int]] = batch.block_table.tolist()
    window = problem.sliding_window
    sequences: list[HostSequence] = []
    for index, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        num_queries = offsets[index + 1] - offsets[index]
        _check(index, num_queries, length, table, problem.block_size)
        if num_queries == 0 or length == 0:
            continue
        start = 0 if window is None else max(0, length - num_queries - window + 1)
        runs = slot_runs(table, start, length, problem.block_size)
        sequences.append(
            HostSequence(offsets[index], num_queries, length - num_queries - start, runs)
        )
    return sequences


def _check(index: int, num_queries: int, length: int, table: list[int], block_size: int) -> None:
    if num_queries < 0 or num_queries > length:
        raise ShapeError(
            f"sequence {index} has {num_queries} query tokens and {length} tokens in the cache; "
            "queries must be between 0 and the cached tokens"
        )
    needed = -(-length // block_size)
    if needed > len(table):
        raise ShapeError(
            f"sequence {index} has {length} tokens, {needed} blocks of {block_size}; "
            f"its block table has {len(table)}"
        )
    if needed and min(table[:needed]) < 0:
        raise ShapeError(f"sequence {index} has a negative block among its first {needed}")
