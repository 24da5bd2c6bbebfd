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
) -> list[ScheduledSequence]:
    """Divide a budget among chunks and the sequences that are admitted.

    Half of the budget goes to the first chunk. The other half goes to the shortest chunks, and before each of them to
    the sequences that `admit_before` admits. What these do not need goes to the first chunk too, then to sequences that
    `admit_next` admits. So a short prompt does not wait for the end of a long one, and a long one takes at most twice
    as long as if short ones waited for it. Chunks of a lower priority number come first.

    Among several clients, the chunks of one with more than one have together at most an equal part of the budget while
    others need the rest, and the shortest chunk of each client comes before all second ones.

    Args:
        budget: tokens left after one for each chunk.
        chunks: of running sequences, in the order of the running list.
        waiting: admits waiting sequences.
        limits: tokens that some clients have at most beside one for each chunk, while others have no limit.

    Returns:
        Rows, in the order of the running list; at least one token for each chunk and each admitted sequence.
    """
    rows: list[ScheduledSequence] = []
    chunks = list(chunks)
    left = dict(limits)
    while True:
        if not chunks:
            chunk = waiting.admit_next() if budget else None
            if chunk is None:
                break
            budget -= 1
            chunks = [chunk]
        parts = _parts(budget, chunks)
        for client in parts.keys() & left.keys():
            parts[client] = min(parts[client], left[client])
        first = chunks[0]
        part = parts[first.sequence.client]
        reserved = min(first.num_tokens - 1, part - part // 2)
        budget -= reserved
        parts[first.sequence.client] = part - reserved
        taken: list[int] = []
        chunks = _in_turn(chunks)
        for chunk in chunks:
            while budget and (short := waiting.admit_before(chunk)) is not None:
                client = short.sequence.client
                num_tokens = min(short.num_tokens, budget, 1 + left.get(client, budget))
                budget -= num_tokens
                if client in left:
                    left[client] -= num_tokens - 1
                rows.append(_row(short, num_tokens))
            client = chunk.sequence.client
            if chunk is first:
                budget += reserved
                parts[client] += reserved
            num_tokens = min(chunk.num_tokens - 1, budget, parts[client])
            parts[client] -= num_tokens
            budget -= num_tokens
            taken.append(1 + num_tokens)
            if client in left:
                left[client] -= num_tokens
        for chunk, num_tokens in zip(chunks, taken, strict=True):
            client = chunk.sequence.client
            more = min(chunk.num_tokens - num_tokens, budget, left.get(client, budget))
            budget -= more
            if client in left:
                left[client] -= more
            rows.append(_row(chunk, num_tokens + more))
        chunks = []
    rows.sort(key=_rank)
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
