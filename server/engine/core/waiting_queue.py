"""The sequences that wait, and the order in which they are admitted: by priority, share and length.

Pure bookkeeping without clocks: the unit of work is a token.
"""

from __future__ import annotations

import bisect
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.sequence import Sequence

MAX_LENGTH_CLASSES: Final = 40
"""Length classes of `WaitingQueue.num_by_length`; more than any context needs."""

_rank = attrgetter("rank")
_turn = attrgetter("turn")


def _length(sequence: Sequence) -> tuple[int, tuple[int, int]]:
    return sequence.num_prompt_tokens, sequence.turn


def length_class(num_tokens: int) -> int:
    """Return the class of a prompt of this length: class c has the lengths from 2 ** (c - 1) to 2 ** c - 1."""
    return num_tokens.bit_length()


class WaitingQueue:
    """Owns the sequences that wait, and proposes which of them is admitted next.

    Sequences with a lower priority number always come first. Within a priority, preempted sequences come before new
    ones, in the order of their first admission. New sequences of one priority have two orders:

    - in turn: clients take turns, and the sequences of one client are in order of arrival. The turns are those of
      start-time fair queueing: a sequence's turn is the sum of the tokens (prompt and limit of the output) of its
      client's earlier sequences, or the queue's clock if that is later. The clock advances with each admission: by its
      tokens, divided by the number of waiting sequences, and at least to the turn of a sequence that is admitted in
      turn. A client that sends one request is therefore not behind all requests of one that sent many.
    - by length: the shortest prompt first. Lengths include tokens that the prefix cache may have.

    `head` is the first in turn, `shortest` the one that may be admitted before it. Between two admissions in turn, the
    prompts admitted out of turn have together at most as many tokens as the prompt of the head, or as a step if that is
    more; each counts at least as much as a sequence's share of a step (`max_num_batched_tokens / max_num_seqs`).
    After that, nothing overtakes the head. Every sequence is therefore admitted eventually, however many shorter ones
    keep arriving: a sequence before which the prompts in turn have N tokens is admitted after at most about 2 N tokens.

    Shares are counted while sequences of the priority wait; without a queue there is nothing to share.

    Only the scheduler calls it. Invariants (`check_invariants`): both orders contain the same sequences.

    Attributes:
        num_tokens_by_length, num_by_length: prompt tokens and number of the waiting sequences by `length_class`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.num_tokens_by_length = [0] * MAX_LENGTH_CLASSES
        self.num_by_length = [0] * MAX_LENGTH_CLASSES
        self._least_allowance = config.max_num_batched_tokens
        self._least_cost = config.max_num_batched_tokens // config.max_num_seqs
        self._num_added = 0
        self._preempted: list[Sequence] = []
        self._classes: dict[int, _PriorityClass] = {}

    def __len__(self) -> int:
        return sum(self.num_by_length)

    def __bool__(self) -> bool:
        return bool(self._classes or self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._preempted, *(known.in_turn for known in self._classes.values()))

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        if (known := self._classes.get(sequence.priority)) is None:
            known = self._classes[sequence.priority] = _PriorityClass()
        known.add(sequence, self._num_added)
        self._num_added += 1
        self._count(sequence, 1)

    def put_back(self, sequence: Sequence) -> None:
        """Add a sequence that was preempted."""
        bisect.insort(self._preempted, sequence, key=_rank)
        self._count(sequence, 1)

    @property
    def head(self) -> Sequence | None:
        """The sequence whose turn it is; None if none waits."""
        if not self._classes:
            return self._preempted[0] if self._preempted else None
        priority = min(self._classes)
        if self._preempted and self._preempted[0].priority <= priority:
            return self._preempted[0]
        return self._classes[priority].in_turn[0]

    @property
    def shortest(self) -> Sequence | None:
        """The shortest sequence that may be admitted before `head`; `head` itself if none may."""
        head = self.head
        if head is None or head.num_preemptions:
            return head
        known = self._classes[head.priority]
        shortest = known.by_length[0]
        allowance = max(head.num_prompt_tokens, self._least_allowance)
        return shortest if known.num_overtaken + self._cost(shortest) <= allowance else head

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence that is admitted."""
        if not sequence.num_preemptions:
            self._classes[sequence.priority].count_admission(sequence, self._cost(sequence))
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        self._count(sequence, -1)
        if sequence.num_preemptions:
            del self._preempted[bisect.bisect_left(self._preempted, sequence.rank, key=_rank)]
            return
        known = self._classes[sequence.priority]
        known.remove(sequence)
        if not known.in_turn:
            del self._classes[sequence.priority]

    def check_invariants(self) -> None:
        """Assert the invariants. Slow."""
        waiting = list(self)
        assert len(waiting) == len(self)
        assert [s.rank for s in self._preempted] == sorted(s.rank for s in self._preempted)
        for known in self._classes.values():
            assert [s.turn for s in known.in_turn] == sorted(s.turn for s in known.in_turn)
            assert known.by_length == sorted(known.in_turn, key=_length)
            assert known.in_turn, "a priority without sequences"
        tokens, counts = [0] * MAX_LENGTH_CLASSES, [0] * MAX_LENGTH_CLASSES
        for sequence in waiting:
            tokens[length_class(sequence.num_prompt_tokens)] += sequence.num_prompt_tokens
            counts[length_class(sequence.num_prompt_tokens)] += 1
        assert (tokens, counts) == (self.num_tokens_by_length, self.num_by_length)

    def _cost(self, sequence: Sequence) -> int:
        return max(sequence.num_prompt_tokens, self._least_cost)

    def _count(self, sequence: Sequence, sign: int) -> None:
        at = length_class(sequence.num_prompt_tokens)
        self.num_by_length[at] += sign
        self.num_tokens_by_length[at] += sign * sequence.num_prompt_tokens


class _PriorityClass:
    """The new sequences of one priority, at least one.

    Attributes:
        in_turn, by_length: the sequences in the two orders.
        num_overtaken: tokens of the prompts admitted out of turn since the last admission in turn.
    """

    __slots__ = ("_clock", "_next_turns", "by_length", "in_turn", "num_overtaken")

    def __init__(self) -> None:
        self.in_turn: list[Sequence] = []
        self.by_length: list[Sequence] = []
        self.num_overtaken = 0
        self._clock = 0
        self._next_turns: dict[str, int] = {}  # by client; only those after the clock count

    def add(self, sequence: Sequence, number: int) -> None:
        start = max(self._clock, self._next_turns.get(sequence.client, 0))
        self._next_turns[sequence.client] = start + sequence.max_num_tokens
        sequence.turn = (start, number)
        bisect.insort(self.in_turn, sequence, key=_turn)
        bisect.insort(self.by_length, sequence, key=_length)

    def count_admission(self, sequence: Sequence, cost: int) -> None:
        """Note that a sequence is about to be admitted."""
        # The clock also advances if each client sends one request, so that nobody waits for ever new ones.
        self._clock += -(-sequence.max_num_tokens // len(self.in_turn))
        if sequence is self.in_turn[0]:
            self._clock = max(self._clock, sequence.turn[0])
            self.num_overtaken = 0
        else:
            self.num_overtaken += cost
        if len(self._next_turns) > 2 * len(self.in_turn) + 16:
            self._next_turns = {c: t for c, t in self._next_turns.items() if t > self._clock}

    def remove(self, sequence: Sequence) -> None:
        del self.in_turn[bisect.bisect_left(self.in_turn, sequence.turn, key=_turn)]
        del self.by_length[bisect.bisect_left(self.by_length, _length(sequence), key=_length)]
