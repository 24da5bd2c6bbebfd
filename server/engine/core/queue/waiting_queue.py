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
_start_tag = attrgetter("start_tag")


def _length(sequence: Sequence) -> tuple[int, tuple[int, int]]:
    return sequence.num_prompt_tokens, sequence.start_tag


def length_class(num_tokens: int) -> int:
    """Return the class of a prompt of this length: class c has the lengths from 2 ** (c - 1) to 2 ** c - 1."""
    return num_tokens.bit_length()


class WaitingQueue:
    """Owns the sequences that wait, and proposes which of them is admitted next.

    Sequences with a lower priority number always come first. Within a priority, preempted sequences come before new
    ones, in the order of their first admission. New sequences of one priority have two orders:

    - by start tag: start-time fair queueing among clients. The sequences of one client are in order of arrival. The
      start tag of a sequence is the finish tag of its client's sequence before it, or the virtual time if that is
      later. The finish tag is the start tag plus the sequence's tokens (prompt and limit of the output). The virtual
      time advances with each admission: by its tokens, divided by the number of waiting sequences, and at least to the
      start tag of an admitted head. A client that sends one request is therefore not behind all requests of one that
      sent many.
    - by length: the shortest prompt first. Lengths include tokens that the prefix cache may have.

    `head` has the lowest start tag, `shortest` is the one that may be admitted before it. Between two admissions of a
    head, the other admitted prompts have together at most as many tokens as the prompt of the head, or as a step if
    that is more; each counts at least as much as a sequence's share of a step (`max_num_batched_tokens /
    max_num_seqs`). After that, nothing overtakes the head. Every sequence is therefore admitted eventually, however
    many shorter ones keep arriving: one with N tokens of prompts before it by start tag is admitted after at most about
    2 N tokens.

    Source: Goyal, Vin, Cheng, "Start-time fair queueing", SIGCOMM 1996.

    Shares are counted while sequences of the priority wait; without a queue there is nothing to share.

    Only the scheduler calls it. Invariants (`check_invariants`): both orders contain the same sequences.

    Attributes:
        num_tokens_by_length, num_by_length: prompt tokens and number of the waiting sequences by `length_class`.
        output_by_length: tokens that they will probably generate.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.num_tokens_by_length = [0] * MAX_LENGTH_CLASSES
        self.num_by_length = [0] * MAX_LENGTH_CLASSES
        self.output_by_length = [0] * MAX_LENGTH_CLASSES
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
        return chain(self._preempted, *(known.by_start_tag for known in self._classes.values()))

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
        """The sequence with the lowest start tag, or a preempted one; None if none waits."""
        if not self._classes:
            return self._preempted[0] if self._preempted else None
        priority = min(self._classes)
        if self._preempted and self._preempted[0].priority <= priority:
            return self._preempted[0]
        return self._classes[priority].by_start_tag[0]

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
        if not known.by_start_tag:
            del self._classes[sequence.priority]

    def check_invariants(self) -> None:
        """Assert the invariants. Slow."""
        waiting = list(self)
        assert len(waiting) == len(self)
        assert [s.rank for s in self._preempted] == sorted(s.rank for s in self._preempted)
        for known in self._classes.values():
            assert [s.start_tag for s in known.by_start_tag] == sorted(
                s.start_tag for s in known.by_start_tag
            )
            assert known.by_length == sorted(known.by_start_tag, key=_length)
            assert known.by_start_tag, "a priority without sequences"
        sums = [[0] * MAX_LENGTH_CLASSES for _ in range(3)]
        for sequence in waiting:
            values = (sequence.num_prompt_tokens, 1, sequence.expected_output)
            for counts, value in zip(sums, values, strict=True):
                counts[length_class(sequence.num_prompt_tokens)] += value
        assert sums == [self.num_tokens_by_length, self.num_by_length, self.output_by_length]

    def _cost(self, sequence: Sequence) -> int:
        return max(sequence.num_prompt_tokens, self._least_cost)

    def _count(self, sequence: Sequence, sign: int) -> None:
        at = length_class(sequence.num_prompt_tokens)
        self.num_by_length[at] += sign
        self.num_tokens_by_length[at] += sign * sequence.num_prompt_tokens
        self.output_by_length[at] += sign * sequence.expected_output


class _PriorityClass:
    """The new sequences of one priority, at least one.

    Attributes:
        by_start_tag, by_length: the sequences in the two orders.
        num_overtaken: tokens of the prompts admitted before the head since the last admission of a head.
    """

    __slots__ = ("_finish_tags", "_virtual_time", "by_length", "by_start_tag", "num_overtaken")

    def __init__(self) -> None:
        self.by_start_tag: list[Sequence] = []
        self.by_length: list[Sequence] = []
        self.num_overtaken = 0
        self._virtual_time = 0
        self._finish_tags: dict[str, int] = {}  # by client; only those after the virtual time count

    def add(self, sequence: Sequence, number: int) -> None:
        start = max(self._virtual_time, self._finish_tags.get(sequence.client, 0))
        self._finish_tags[sequence.client] = start + sequence.max_num_tokens
        sequence.start_tag = (start, number)
        bisect.insort(self.by_start_tag, sequence, key=_start_tag)
        bisect.insort(self.by_length, sequence, key=_length)
        if self._has_too_many_tags():
            self._prune()

    def count_admission(self, sequence: Sequence, cost: int) -> None:
        """Note that a sequence is about to be admitted."""
        # Also if each client sends one request: otherwise ever new clients would start at the same virtual time.
        self._virtual_time += -(-sequence.max_num_tokens // len(self.by_start_tag))
        if sequence is self.by_start_tag[0]:
            self._virtual_time = max(self._virtual_time, sequence.start_tag[0])
            self.num_overtaken = 0
        else:
            self.num_overtaken += cost

    def _prune(self) -> None:
        """Forget the finish tags that no longer count and, if that is not enough, those of clients that do not wait."""
        tags = self._finish_tags
        self._finish_tags = {c: tag for c, tag in tags.items() if tag > self._virtual_time}
        if self._has_too_many_tags():
            waiting = {sequence.client for sequence in self.by_start_tag}
            self._finish_tags = {c: tag for c, tag in self._finish_tags.items() if c in waiting}

    def _has_too_many_tags(self) -> bool:
        return len(self._finish_tags) > 2 * len(self.by_start_tag) + 16

    def remove(self, sequence: Sequence) -> None:
        del self.by_start_tag[
            bisect.bisect_left(self.by_start_tag, sequence.start_tag, key=_start_tag)
        ]
        del self.by_length[bisect.bisect_left(self.by_length, _length(sequence), key=_length)]
