"""The waiting sequences of one priority, and whose turn it is: start-time fair queueing among clients."""

from __future__ import annotations

import bisect
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from server.engine.core.sequence import Sequence

_client_rank = attrgetter("client_rank")


def _arrival(sequence: Sequence) -> tuple[int, int]:
    return sequence.client_priority, sequence.arrival


def _length(sequence: Sequence) -> tuple[int, int]:
    return sequence.num_prompt_tokens, sequence.arrival


class _ClientQueue:
    """The sequences of one client, at least one.

    Attributes:
        turn: start tag, and a number that no other client has at the same time: the lowest one is served next.
        preempted: in the order of `client_rank`.
        new: by `client_priority`, then in order of arrival.
    """

    __slots__ = ("client", "new", "preempted", "turn")

    def __init__(self, client: str, turn: tuple[int, int]) -> None:
        self.client = client
        self.turn = turn
        self.preempted: list[Sequence] = []
        self.new: list[Sequence] = []

    @property
    def first(self) -> Sequence:
        if not self.preempted:
            return self.new[0]
        preempted = self.preempted[0]
        if self.new and self.new[0].client_priority < preempted.client_priority:
            return self.new[0]
        return preempted


_turn = attrgetter("turn")


class ClientQueues:
    """The waiting sequences of one priority, by client.

    The start tag of a client that begins to wait is the finish tag of its last sequence, or the virtual time if that is
    later. With each admission its tag advances by the sequence's tokens (prompt and limit of the output), that of a
    preempted sequence only once. The virtual time advances with each admission: by its tokens, divided by the number of
    waiting clients, and at least to the start tag of the client whose turn it was. A client that sends one request is
    therefore not behind all requests of one that sent many. What a client withdraws costs it nothing.

    Shares are counted while sequences of the priority wait; without a queue there is nothing to share.

    Source: Goyal, Vin, Cheng, "Start-time fair queueing", SIGCOMM 1996.

    Attributes:
        num_overtaken: tokens of the prompts admitted before the head since the last admission of a head.
    """

    __slots__ = (
        "_by_client", "_by_length", "_by_turn", "_finish_tags", "_num_turns", "_virtual_time", "num_overtaken",
    )  # fmt: skip

    def __init__(self) -> None:
        self.num_overtaken = 0
        self._by_client: dict[str, _ClientQueue] = {}
        self._by_turn: list[_ClientQueue] = []
        self._by_length: list[Sequence] = []  # the new ones
        self._virtual_time = 0
        self._num_turns = 0
        # Of clients that do not wait; only those after the virtual time count.
        self._finish_tags: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._by_turn)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(*((*queue.preempted, *queue.new) for queue in self._by_turn))

    @property
    def num_clients(self) -> int:
        """Clients that wait."""
        return len(self._by_turn)

    @property
    def head(self) -> Sequence:
        """The first sequence of the client whose turn it is."""
        return self._by_turn[0].first

    def head_beside(self, passed_over: AbstractSet[str]) -> Sequence | None:
        """Return the first sequence of the client whose turn it is among the others; None if no other one waits."""
        queues = (queue for queue in self._by_turn if queue.client not in passed_over)
        return next((queue.first for queue in queues), None)

    def num_of(self, client: str) -> int:
        """Return how many sequences of a client wait."""
        queue = self._by_client.get(client)
        return 0 if queue is None else len(queue.preempted) + len(queue.new)

    @property
    def shortest(self) -> Sequence:
        """The new sequence with the shortest prompt, unless its client has others first; `head` then."""
        if self._by_length:
            shortest = self._by_length[0]
            queue = self._by_client[shortest.client]
            if not queue.preempted and shortest.client_priority <= queue.first.client_priority:
                return shortest
        return self.head

    def first_of_least(
        self, num_places: Mapping[str, int], passed_over: AbstractSet[str]
    ) -> Sequence | None:
        """Return the first sequence of the client with the fewest places; of several, the one whose turn is next."""
        queues = (queue for queue in self._by_turn if queue.client not in passed_over)
        least = min(queues, key=lambda queue: num_places.get(queue.client, 0), default=None)
        return None if least is None else least.first

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence, or one that was preempted."""
        queue = self._by_client.get(sequence.client)
        if queue is None:
            tag = max(self._virtual_time, self._finish_tags.pop(sequence.client, 0))
            queue = self._by_client[sequence.client] = _ClientQueue(sequence.client, (0, 0))
            self._place(queue, tag)
        if sequence.num_preemptions:
            bisect.insort(queue.preempted, sequence, key=_client_rank)
        else:
            bisect.insort(queue.new, sequence, key=_arrival)
            bisect.insort(self._by_length, sequence, key=_length)

    def charge(self, sequence: Sequence, cost: int) -> None:
        """Note that a new sequence is about to be admitted.

        Args:
            sequence: one of those that wait.
            cost: tokens by which it overtakes the head, unless it is the head.
        """
        queue = self._by_client[sequence.client]
        tag = queue.turn[0]
        # Also if each client sends one request: otherwise ever new clients would start at the same virtual time.
        self._virtual_time += -(-sequence.max_num_tokens // len(self._by_turn))
        if sequence is self.head:
            self._virtual_time = max(self._virtual_time, tag)
            self.num_overtaken = 0
        else:
            self.num_overtaken += cost
        del self._by_turn[bisect.bisect_left(self._by_turn, queue.turn, key=_turn)]
        self._place(queue, tag + sequence.max_num_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        queue = self._by_client[sequence.client]
        if sequence.num_preemptions:
            at = bisect.bisect_left(queue.preempted, sequence.client_rank, key=_client_rank)
            del queue.preempted[at]
        else:
            del queue.new[bisect.bisect_left(queue.new, _arrival(sequence), key=_arrival)]
            at = bisect.bisect_left(self._by_length, _length(sequence), key=_length)
            del self._by_length[at]
        if queue.preempted or queue.new:
            return
        del self._by_client[queue.client]
        del self._by_turn[bisect.bisect_left(self._by_turn, queue.turn, key=_turn)]
        if queue.turn[0] > self._virtual_time:
            self._finish_tags[queue.client] = queue.turn[0]
            if len(self._finish_tags) > 2 * len(self._by_turn) + 16:
                self._prune()

    def check_invariants(self) -> None:
        """Assert the invariants. Slow."""
        assert self._by_client == {queue.client: queue for queue in self._by_turn}
        turns = [queue.turn for queue in self._by_turn]
        assert turns == sorted(set(turns)), "turns out of order"
        assert not self._finish_tags.keys() & self._by_client.keys()
        new = [sequence for queue in self._by_turn for sequence in queue.new]
        assert self._by_length == sorted(new, key=_length)
        for queue in self._by_turn:
            assert queue.preempted or queue.new, f"client {queue.client!r} does not wait"
            assert queue.preempted == sorted(queue.preempted, key=_client_rank)
            assert queue.new == sorted(queue.new, key=_arrival)
            assert all(sequence.num_preemptions for sequence in queue.preempted)
            assert not any(sequence.num_preemptions for sequence in queue.new)

    def _place(self, queue: _ClientQueue, tag: int) -> None:
        queue.turn = tag, self._num_turns
        self._num_turns += 1
        bisect.insort(self._by_turn, queue, key=_turn)

    def _prune(self) -> None:
        """Forget the finish tags that no longer count and, if that is not enough, the lowest ones."""
        most = len(self._by_turn) + 8
        tags = [(c, tag) for c, tag in self._finish_tags.items() if tag > self._virtual_time]
        self._finish_tags = dict(sorted(tags, key=lambda it: it[1])[-most:])
