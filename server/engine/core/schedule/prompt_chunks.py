"""Divides the token budget of a step among prompts that are longer than a token."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple, Protocol

from server.engine.core.sequence import Sequence
from server.engine.core.step import ScheduledSequence

_rank = attrgetter("sequence.rank")


class Chunk(NamedTuple):
    """The tokens of a running sequence that are known and not computed: two or more, or all of a new sequence."""

    sequence: Sequence
    num_tokens: int


class WaitingSource(Protocol):
    """Admits waiting sequences to the step that is being scheduled."""

    def admit_next(self) -> Chunk | None:
        """Admit the head of the queue, or a shorter one if that does not fit; None if there is none."""

    def admit_before(self, chunk: Chunk) -> Chunk | None:
        """Admit a sequence that is served before a running one; None if there is none."""


class NoneWaiting:
    """Admits nothing."""

    def admit_next(self) -> None:
        """Return None."""

    def admit_before(self, chunk: Chunk) -> None:
        """Return None."""


def divide(budget: int, chunks: Iterable[Chunk], waiting: WaitingSource) -> list[ScheduledSequence]:
    """Divide a budget among chunks and the sequences that are admitted.

    Half of the budget goes to the first chunk. The other half goes to the shortest chunks, and before each of them to
    the sequences that `admit_before` admits. What these do not need goes to the first chunk too, then to sequences that
    `admit_next` admits. So a short prompt does not wait for the end of a long one, and a long one takes at most twice
    as long as if short ones waited for it. Chunks of a lower priority number come first.

    Args:
        budget: tokens left after one for each chunk.
        chunks: of running sequences, in the order of the running list.
        waiting: admits waiting sequences.

    Returns:
        Rows, in the order of the running list; at least one token for each chunk and each admitted sequence.
    """
    rows: list[ScheduledSequence] = []
    chunks = list(chunks)
    while True:
        if not chunks:
            chunk = waiting.admit_next() if budget else None
            if chunk is None:
                break
            budget -= 1
            chunks = [chunk]
        first = chunks[0]
        reserved = min(first.num_tokens - 1, budget - budget // 2)
        budget -= reserved
        for chunk in sorted(chunks, key=_shortest_first):
            while budget and (short := waiting.admit_before(chunk)) is not None:
                num_tokens = min(short.num_tokens, budget)
                budget -= num_tokens
                rows.append(_row(short, num_tokens))
            if chunk is first:
                budget += reserved
            num_tokens = 1 + min(chunk.num_tokens - 1, budget)
            budget -= num_tokens - 1
            rows.append(_row(chunk, num_tokens))
        chunks = []
    rows.sort(key=_rank)
    return rows


def _shortest_first(chunk: Chunk) -> tuple[int, int]:
    return chunk.sequence.priority, chunk.num_tokens


def _row(chunk: Chunk, num_tokens: int) -> ScheduledSequence:
    sequence = chunk.sequence
    num_logits = int(num_tokens == chunk.num_tokens)
    return ScheduledSequence(sequence, sequence.num_computed_tokens, num_tokens, num_logits)
