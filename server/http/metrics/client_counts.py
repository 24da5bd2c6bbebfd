"""What each client has in progress, in all front ends of a service, in memory that these share.

Each process has a row: the number of its entries, then an entry for each client that has something in progress there.
An entry is a number that stands for the client, and its counts. Only its owner writes a row. Reading one while it is
written may give the counts of a moment before, or miss a client for a moment.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

CAPACITY: Final = 512
"""Clients in a row; the counts of further ones are seen by their own process only."""
_DIGEST_BYTES: Final = 6  # a double has 53 bits


class Counts(NamedTuple):
    """What a client has in progress.

    Attributes:
        places: sequences that were admitted and not yet answered.
        queued: sequences that were submitted and that the engine has not started to compute.
        tokens: of their prompts.
        output: tokens that they will probably generate.
    """

    places: int = 0
    queued: int = 0
    tokens: int = 0
    output: int = 0


_NONE: Final = Counts()
_FIELDS: Final = len(Counts._fields)
_ENTRY: Final = 1 + _FIELDS
NUM_CELLS: Final = 1 + CAPACITY * _ENTRY
"""Numbers in a row."""


class ClientCounts:
    """Owns a row and reads those of the other processes. A client without anything in progress is forgotten.

    Args:
        mine: the row of this process.
        others: those of the other processes.
    """

    def __init__(self, mine: memoryview[float], others: list[memoryview[float]]) -> None:
        self._mine, self._others = mine, others
        self._counts: dict[str, Counts] = {}
        self._entries: dict[str, int] = {}  # where a client's entry is in the row
        self._clients: list[str] = []  # in the order of the entries
        mine[0] = 0  # an earlier process with this row has ended

    def add(self, client: str, counts: Counts) -> None:
        """Add to what a client has in progress; negative counts take away."""
        old = self._counts.get(client)
        if old is None:
            new = counts
            self._enter(client)
        else:
            new = Counts(*(a + b for a, b in zip(old, counts, strict=True)))
        if new == _NONE:
            del self._counts[client]
            self._leave(client)
            return
        self._counts[client] = new
        if (entry := self._entries.get(client)) is not None:
            start = 2 + entry * _ENTRY
            for i, value in enumerate(new):
                self._mine[start + i] = value

    def of(self, client: str) -> Counts:
        """Return what a client has in progress in all processes."""
        counts = self._counts.get(client, _NONE)
        if self._others:
            number = _number(client)
            for row in self._others:
                counts = _sum(counts, _find(row, number))
        return counts

    def num_clients(self, client: str) -> int:
        """Return how many clients have something in progress in any process, this one among them."""
        if not self._others:
            return len(self._counts) + (client not in self._counts)
        numbers = {_number(client)}
        for row in (self._mine, *self._others):
            numbers.update(_numbers(row))
        return len(numbers)

    def _enter(self, client: str) -> None:
        if not self._others or (at := len(self._clients)) == CAPACITY:
            return
        self._entries[client] = at
        self._clients.append(client)
        self._mine[1 + at * _ENTRY] = _number(client)
        self._mine[0] = at + 1

    def _leave(self, client: str) -> None:
        at = self._entries.pop(client, None)
        if at is None:
            return
        last = self._clients.pop()
        if last != client:
            start, from_ = 1 + at * _ENTRY, 1 + len(self._clients) * _ENTRY
            self._mine[start : start + _ENTRY] = self._mine[from_ : from_ + _ENTRY]
            self._clients[at] = last
            self._entries[last] = at
        self._mine[0] = len(self._clients)


def _number(client: str) -> float:
    digest = hashlib.blake2b(client.encode(), digest_size=_DIGEST_BYTES).digest()
    return float(int.from_bytes(digest, "big"))


def _numbers(row: memoryview[float]) -> list[float]:
    return list(row[1 : 1 + int(row[0]) * _ENTRY : _ENTRY])


def _find(row: memoryview[float], number: float) -> Counts:
    try:
        at = _numbers(row).index(number)
    except ValueError:
        return _NONE
    start = 2 + at * _ENTRY
    return Counts(*(int(value) for value in row[start : start + _FIELDS]))


def _sum(a: Counts, b: Counts) -> Counts:
    return Counts(
        a.places + b.places, a.queued + b.queued, a.tokens + b.tokens, a.output + b.output
    )
