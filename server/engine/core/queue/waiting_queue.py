"""The sequences that wait, and the order in which they are admitted: by priority, share and length.

Pure bookkeeping without clocks: the unit of work is a token.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from server.engine.core.queue.client_queues import ClientQueues
from server.engine.core.queue.length_counts import LengthCounts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.sequence import Sequence


class WaitingQueue:
    """Owns the sequences that wait, and proposes which of them is admitted next.

    Sequences with a lower priority number always come first. Those of one priority have two orders:

    - by client, with start-time fair queueing among clients (`client_queues.ClientQueues`). A client's preempted
      sequences come before its new ones.
    - by length: the shortest prompt first, of those that were not preempted. Lengths include tokens that the prefix
      cache may have.

    `head` is the first sequence of the client whose turn it is, `shortest` is the one that may be admitted before it.
    Between two admissions of a head, the other admitted prompts have together at most as many tokens as the prompt of
    the head, or as a step if that is more; each counts at least as much as a sequence's share of a step
    (`max_num_batched_tokens / max_num_seqs`). After that, nothing overtakes the head, and nothing ever overtakes a
    preempted one. Every sequence is therefore admitted eventually, however many shorter ones keep arriving: one with N
    tokens of prompts before it in the order of clients is admitted after at most about 2 N tokens.

    `first_of_least` serves a client that has fewer places than others, whatever its turn.

    Only the scheduler calls it. Invariants (`check_invariants`): both orders contain the same new sequences.

    Attributes:
        by_length: counts of the waiting sequences.
        passed_over: clients whose turn does not come at the moment: `head` and `shortest` are of others.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.by_length = LengthCounts.zeros()
        self._least_allowance = config.max_num_batched_tokens
        self._least_cost = config.max_num_batched_tokens // config.max_num_seqs
        self.passed_over: set[str] = set()
        self._num_added = 0
        self._priorities: dict[int, ClientQueues] = {}

    def __len__(self) -> int:
        return sum(self.by_length.sequences)

    def __bool__(self) -> bool:
        return bool(self._priorities)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(*self._priorities.values())

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence."""
        sequence.arrival = self._num_added
        self._num_added += 1
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Add a sequence that was preempted."""
        if (clients := self._priorities.get(sequence.priority)) is None:
            clients = self._priorities[sequence.priority] = ClientQueues()
        clients.add(sequence)
        self.by_length.add(sequence)

    @property
    def head(self) -> Sequence | None:
        """The first sequence of the client whose turn it is; None if none waits."""
        if not self._priorities:
            return None
        if not self.passed_over:
            return self._priorities[min(self._priorities)].head
        heads = (
            self._priorities[it].head_beside(self.passed_over) for it in sorted(self._priorities)
        )
        return next((head for head in heads if head is not None), None)

    @property
    def shortest(self) -> Sequence | None:
        """The shortest sequence that may be admitted before `head`; `head` itself if none may."""
        head = self.head
        if head is None or head.num_preemptions:
            return head
        clients = self._priorities[head.priority]
        shortest = clients.shortest
        if shortest.client in self.passed_over:
            return head
        if shortest.num_prompt_tokens >= head.num_prompt_tokens:
            return head
        allowance = max(head.num_prompt_tokens, self._least_allowance)
        return shortest if clients.num_overtaken + self._cost(shortest) <= allowance else head

    def first_of_least(self, num_places: Mapping[str, int]) -> Sequence | None:
        """Return the first sequence of the client with the fewest places among those that wait; None if none waits.

        Only clients with sequences of the lowest priority number count. Of several the one whose turn is next.

        Args:
            num_places: running sequences by client; none of a client that is missing.
        """
        if not self._priorities:
            return None
        return self._priorities[min(self._priorities)].first_of_least(num_places, self.passed_over)

    def num_of(self, client: str) -> int:
        """Return how many sequences of a client wait."""
        return sum(clients.num_of(client) for clients in self._priorities.values())

    @property
    def num_clients(self) -> int:
        """Clients that wait with sequences of the lowest priority number."""
        return self._priorities[min(self._priorities)].num_clients if self._priorities else 0

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence that is admitted."""
        if not sequence.num_preemptions:
            self._priorities[sequence.priority].charge(sequence, self._cost(sequence))
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        self.by_length.add(sequence, -1)
        clients = self._priorities[sequence.priority]
        clients.remove(sequence)
        if not clients:
            del self._priorities[sequence.priority]

    def check_invariants(self) -> None:
        """Assert the invariants. Slow."""
        waiting = list(self)
        assert len(waiting) == len(self)
        for priority, clients in self._priorities.items():
            assert clients, "a priority without sequences"
            assert all(sequence.priority == priority for sequence in clients)
            clients.check_invariants()
        assert self.by_length == LengthCounts.of(waiting)

    def _cost(self, sequence: Sequence) -> int:
        return max(sequence.num_prompt_tokens, self._least_cost)
