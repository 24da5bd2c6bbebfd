"""Divides the token budget of a step among prompts that are longer than a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from server.engine.core.sequence import Sequence
from server.engine.core.step import ScheduledSequence

_rank = attrgetter("sequence.rank")
_NO_LIMITS: Final[Mapping[str, int]] = MappingProxyType({})


class Chunk(NamedTuple):
    """The tokens of a running sequence that are known and not computed: two or more, or all of a new sequence.

    Of a sequence with a state of fixed size, only those before the next state that is kept.
    """

    sequence: Sequence
    num_tokens: int

    def fit(self, most: int) -> int:
        """Return the most tokens up to `most` that a step may compute; 0 if it must end beyond them."""
        if most >= self.num_tokens:
            return self.num_tokens
        slots = self.sequence.slots
        if slots is None:
            return most
        return max(0, most - (self.sequence.num_computed_tokens + most) % slots.align)

    @classmethod
    def of(cls, sequence: Sequence, num_known: int) -> Chunk:
        """Return the tokens of a running sequence that has `num_known` known tokens."""
        start = sequence.num_computed_tokens
        num_tokens = num_known - start
        if sequence.slots is not None:
            num_tokens = sequence.slots.cut(start, num_tokens)
        return cls(sequence, num_tokens)


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


def divide(
    budget: int,
    chunks: Iterable[Chunk],
    waiting: WaitingSource,
    limits: Mapping[str, int] = _NO_LIMITS,
    align: int = 1,
) -> list[ScheduledSequence]:
    """Divide a budget among chunks and the sequences that are admitted.

    Half of the budget goes to the first chunk. The other half goes to the shortest chunks, and before each of them to
    the sequences that `admit_before` admits. What these do not need goes to the first chunk too, then to sequences that
    `admit_next` admits. So a short prompt does not wait for the end of a long one, and a long one takes at most twice
    as long as if short ones waited for it. Chunks of a lower priority number come first.

    Among several clients, the chunks of one with more than one have together at most an equal part of the budget while
    others need the rest, and the shortest chunk of each client comes before all second ones.

    Where parts of chunks end at multiples of `align` tokens (`SequenceSlots.align`), a chunk may have none, but the
    first one has some.

    Args:
        budget: tokens left after one for each chunk; without that if `align` is more than 1, and then at least `align`
            if there are chunks.
        chunks: of running sequences, in the order of the running list.
        waiting: admits waiting sequences.
        limits: tokens that some clients have at most beside one for each chunk, while others have no limit.
        align: of all sequences.

    Returns:
        Rows, in the order of the running list; at least one token for each chunk and each admitted sequence, or none if
        `align` is more than 1.
    """
    rows: list[ScheduledSequence] = []
    chunks = list(chunks)
    sure = int(align == 1)  # tokens of each chunk
    left = {client: max(most, sure or align) for client, most in limits.items()}
    while True:
        if not chunks:
            chunk = waiting.admit_next() if budget >= align else None
            if chunk is None:
                break
            budget -= sure
            chunks = [chunk]
        parts = _parts(budget, chunks)
        for client in parts.keys() & left.keys():
            parts[client] = min(parts[client], left[client])
        first = chunks[0]
        part = parts[first.sequence.client]
        reserved = first.fit(max(sure + part - part // 2, align)) - sure
        budget -= reserved
        parts[first.sequence.client] = part - reserved
        taken: list[int] = []
        chunks = _in_turn(chunks)
        for chunk in chunks:
            before = _admit_before(chunk, budget, waiting, left, align)
            rows += before
            budget -= sum([row.num_tokens for row in before])
            client = chunk.sequence.client
            if chunk is first:
                budget += reserved
                parts[client] += reserved
            num_tokens = chunk.fit(sure + max(0, min(budget, parts[client]))) - sure
            parts[client] -= num_tokens
            budget -= num_tokens
            taken.append(sure + num_tokens)
            if client in left:
                left[client] -= num_tokens
        for chunk, num_tokens in zip(chunks, taken, strict=True):
            client = chunk.sequence.client
            more = chunk.fit(num_tokens + min(budget, left.get(client, budget))) - num_tokens
            budget -= more
            if client in left:
                left[client] -= more
            rows.append(_row(chunk, num_tokens + more))
        chunks = []
    rows.sort(key=_rank)
    return rows


def _admit_before(
    chunk: Chunk, budget: int, waiting: WaitingSource, left: dict[str, int], align: int
) -> list[ScheduledSequence]:
    """Admit sequences that are served before a chunk; return their rows, and take their tokens from `left`."""
    rows: list[ScheduledSequence] = []
    sure = int(align == 1)
    while budget >= align and (short := waiting.admit_before(chunk)) is not None:
        client = short.sequence.client
        num_tokens = short.fit(min(budget, sure + left.get(client, budget)))
        budget -= num_tokens
        if client in left:
            left[client] -= num_tokens - sure
        rows.append(_row(short, num_tokens))
    return rows


def _parts(budget: int, chunks: list[Chunk]) -> dict[str, int]:
    """Return what each client may have of a budget: an equal part if it has several chunks, else all."""
    counts = Counter([chunk.sequence.client for chunk in chunks])
    equal = budget // len(counts)
    return {client: equal if count > 1 else budget for client, count in counts.items()}


def _in_turn(chunks: list[Chunk]) -> list[Chunk]:
    """Return chunks in order of priority, and the shortest first; of each client one after the other."""
    shortest_first = sorted(chunks, key=_shortest_first)
    seen: Counter[str] = Counter()
    turns = []
    for chunk in shortest_first:
        client = chunk.sequence.client
        turns.append(seen[client])
        seen[client] += 1
    if len(seen) == 1:
        return shortest_first
    pairs = zip(shortest_first, turns, strict=True)
    ordered = sorted(pairs, key=lambda it: (it[0].sequence.priority, it[1], it[0].num_tokens))
    return [chunk for chunk, _ in ordered]


def _shortest_first(chunk: Chunk) -> tuple[int, int]:
    return chunk.sequence.priority, chunk.num_tokens


def _row(chunk: Chunk, num_tokens: int) -> ScheduledSequence:
    sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
    num_logits = int(start + num_tokens == sequence.num_known_tokens)
    return ScheduledSequence(sequence, start, num_tokens, num_logits)
