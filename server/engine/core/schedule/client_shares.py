"""Places and blocks of the clients: who is admitted at once because others have more, and who is preempted."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from server.engine.core.memory.block_manager import BlockManager
    from server.engine.core.queue.live_sequences import LiveSequences
    from server.engine.core.schedule.admission import Admission
    from server.engine.core.sequence import Sequence

_FEWER: Final = 2
"""Places that a client has less than another one when it gets the next: both have equally many then, or still fewer."""


class ClientShares:
    """Gives clients equal shares of the places and blocks. Part of the scheduler.

    A client alone may have all of them. A client with at least two running sequences fewer than another one has its
    next sequence admitted before the tokens of the step are divided. If no place is free for it, the last sequence of
    the client with the most places is preempted, and if blocks are short, those of the client with the most blocks, as
    far as that client keeps at least as many as the other one then has. So no preemption is undone by the next one.
    Sequences of a lower priority number are not preempted for it, nor is the first running sequence.
    """

    def __init__(
        self, live: LiveSequences, block_manager: BlockManager, admission: Admission
    ) -> None:
        self._live, self._block_manager, self._admission = live, block_manager, admission

    def admit(self) -> list[Sequence]:
        """Admit the sequences of clients with fewer places than others; return those that were preempted for them."""
        preempted: list[Sequence] = []
        while (sequence := self._next()) is not None:
            if self._admission.end_if_late(sequence):
                continue
            victims = self._victims(sequence)
            if victims is None:
                break
            for victim in victims:
                self._live.preempt(victim)
            preempted += victims
            if not self._admission.admit(sequence):
                break
        return preempted

    def last_of_heaviest(self, sequence: Sequence) -> Sequence:
        """Return the sequence that is preempted because `sequence`, which runs, needs a block.

        Returns:
            Of the sequences with the highest priority number that run from `sequence` on, apart from the first of all,
            the last one of the client with the most blocks.
        """
        running = self._live.running
        candidates = running[max(1, running.index(sequence)) :]
        assert candidates, "`Scheduler.add` ensures that the first sequence fits in the cache"
        priority = candidates[-1].priority
        return self._heaviest([it for it in candidates if it.priority == priority], self._blocks())

    def _next(self) -> Sequence | None:
        """Return a sequence whose client has too few places; None if there is none."""
        live = self._live
        places = live.num_places
        most = max(places.values(), default=0)
        if most < _FEWER or live.suspects:
            return None
        waiting = live.waiting
        head = waiting.head
        if head is None or (waiting.num_clients == len(places) == 1 and head.client in places):
            return None  # a client alone
        sequence = waiting.first_of_least(places)
        if sequence is None or sequence.num_tokens_in_flight:
            return None
        if places.get(sequence.client, 0) + _FEWER > most or live.awaits_prefix(sequence):
            return None
        return sequence

    def _victims(self, sequence: Sequence) -> list[Sequence] | None:
        """Return what must be preempted so that a sequence can be admitted; None if that would be too much."""
        live, manager = self._live, self._block_manager
        victims: list[Sequence] = []
        candidates = [
            it
            for it in live.running[1:]
            if it.client != sequence.client and it.priority >= sequence.priority
        ]
        if live.is_full:
            if not candidates:
                return None
            victim = self._heaviest(candidates, live.num_places)
            count = live.num_places.get(sequence.client, 0)
            if live.num_places[victim.client] < count + _FEWER:
                return None
            victims.append(victim)
        num_growing = live.num_growing()
        missing = manager.num_taken(sequence) + num_growing - manager.num_free_blocks
        if missing <= 0:
            return victims
        blocks = self._blocks()
        share = blocks[sequence.client] + sequence.num_tokens // manager.block_size + 1
        for victim in victims:
            blocks[victim.client] -= len(victim.block_table)
        while missing > manager.num_freed(victims) + sum(map(_may_grow, victims)):
            left = [it for it in candidates if it not in victims]
            if not left:
                return None
            victim = self._heaviest(left, blocks)
            blocks[victim.client] -= len(victim.block_table)
            if blocks[victim.client] < share:
                return None
            victims.append(victim)
        return victims

    def _blocks(self) -> Counter[str]:
        """Return the blocks of each client's running sequences; a shared block counts for each of them."""
        blocks: Counter[str] = Counter()
        for sequence in self._live.running:
            blocks[sequence.client] += len(sequence.block_table)
        return blocks

    @staticmethod
    def _heaviest(candidates: Iterable[Sequence], loads: dict[str, int]) -> Sequence:
        """Return the last sequence of the client with the highest load; of several, the one admitted last."""
        last: dict[str, Sequence] = {}
        for sequence in candidates:
            other = last.get(sequence.client)
            if other is None or sequence.client_rank > other.client_rank:
                last[sequence.client] = sequence
        return max(last.values(), key=lambda it: (loads[it.client], it.rank))


def _may_grow(sequence: Sequence) -> bool:
    return sequence.capacity < sequence.max_num_tokens - 1
