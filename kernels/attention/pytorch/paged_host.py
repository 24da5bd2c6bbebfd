"""A paged batch on the host, for the PyTorch kernels: converts block tables to runs of consecutive cache slots.

The runs are computed once per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kernels.attention.problem import AttentionProblem, PagedBatch, Phase
from kernels.errors import ShapeError


class Run(NamedTuple):
    """Consecutive cache slots: `length` tokens from `slot`."""

    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class HostSequence:
    """The part of a step that belongs to one sequence.

    Attributes:
        row: its first query row.
        num_queries: query tokens, at least 1.
        history: tokens in `runs` before its first query.
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


def slot_runs(blocks: list[int], start: int, stop: int, block_size: int) -> tuple[Run, ...]:
    """Find the fewest runs of slots that hold tokens start to stop of a sequence.

    Args:
        blocks: the sequence's block ids in order.
        start: first token.
        stop: one past the last token, above `start`.
        block_size: tokens per block.
    """
    first, last = start // block_size, -(-stop // block_size)
    used = blocks[first:last]
    head = used[0]
    # This comparison runs in C and takes 2 us for 128 blocks; the loop below takes 15 us.
    if used == list(range(head, head + len(used))):
        return (Run(head * block_size + start % block_size, stop - start),)
    runs: list[Run] = []
    begin = 0
    for index in range(1, len(used) + 1):
        if index < len(used) and used[index] == used[index - 1] + 1:
            continue
        left = max(start, (first + begin) * block_size)
        right = min(stop, (first + index) * block_size)
        runs.append(Run(used[begin] * block_size + left % block_size, right - left))
        begin = index
    return tuple(runs)


def host_sequences(problem: AttentionProblem, batch: PagedBatch) -> list[HostSequence]:
    """Copy the batch to the host and find the runs of every sequence that has queries.

    Raises:
        ShapeError: query rows do not ascend from 0; a sequence has more queries than tokens, or than a decode takes;
            its block table is too short or contains a negative block.
    """
    offsets: list[int] = batch.cu_seqlens_q.tolist()
    lengths: list[int] = batch.seq_lens.tolist()
    tables: list[list[int]] = batch.block_table.tolist()
    window, block_size = problem.sliding_window, _block_size(problem)
    sequences: list[HostSequence] = []
    if offsets[0] != 0:
        raise ShapeError(f"cu_seqlens_q starts with {offsets[0]}; it must start with 0")
    for index, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        row = offsets[index]
        num_queries = offsets[index + 1] - row
        most = problem.max_query_tokens
        fits = num_queries == 1 or num_queries <= most > 1
        if problem.phase is Phase.DECODE and not fits:
            takes = "1" if most == 1 else f"at most {most}"
            raise ShapeError(
                f"sequence {index} has {num_queries} query tokens; decode takes {takes}"
            )
        _check(index, num_queries, length, table, block_size)
        if num_queries == 0 or length == 0:
            continue
        start = 0 if window is None else max(0, length - num_queries - window + 1)
        runs = slot_runs(table, start, length, block_size)
        sequences.append(HostSequence(row, num_queries, length - num_queries - start, runs))
    return sequences


def blocks_needed(sequences: list[HostSequence], problem: AttentionProblem) -> int:
    """Return the number of blocks that a cache must have to contain every run."""
    stop = max((slot + length for item in sequences for slot, length in item.runs), default=0)
    return -(-stop // _block_size(problem))


def _block_size(problem: AttentionProblem) -> int:
    assert problem.block_size is not None, "these kernels support no packed keys and values"
    return problem.block_size


def _check(index: int, num_queries: int, length: int, table: list[int], block_size: int) -> None:
    # Padding rows of a decode have a query but no tokens.
    if num_queries < 0 or (num_queries > length and (length or num_queries > 1)):
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
