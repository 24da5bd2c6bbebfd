"""The unfinished sequences: those that wait, those that run, and what changes when a sequence passes on."""

from __future__ import annotations

import bisect
from collections import Counter
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from server.engine.core.memory.shared_beginnings import SharedBeginnings
from server.engine.core.queue.expected_output import OutputMeans, expected_output
from server.engine.core.queue.suspects import Suspects
from server.engine.core.queue.waiting_queue import WaitingQueue
from server.engine.core.request import FinishReason
from server.engine.core.request_checks import DuplicateRequestError
from server.engine.core.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from server.engine.core.accounting import Accounting
    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.memory.block_manager import BlockManager
    from server.engine.core.step import SchedulerOutput

RUNNING: Final = SequenceStatus.RUNNING
"""A constant, since looking the member up takes as long as the rest of what most rows need."""

_rank = attrgetter("rank")
_peers = attrgetter("priority", "client", "client_priority")


class LiveSequences:
    """Owns the waiting queue and the running list. Part of the scheduler.

    No other module changes the status of a sequence: its place, blocks, account and status change together.

    Invariants (`check_invariants`): the running list is in order, and of a client's sequences with one priority,
    running ones were admitted before those that wait after a preemption. Exactly the running sequences own blocks.
    Every running sequence has a token left to compute, unless its last one is in flight.

    Attributes:
        waiting: the queue.
        running: sequences in order of priority, then of first admission. A sequence that ends with its step stays until
            `drop_finished`.
        num_places: running sequences by client, those left out that have ended; no client without one.
        place_limits: most running sequences of some clients; see `limit_places`.
        num_preemptions: preemptions so far.
        output_means: how much ended sequences have generated.
        suspects: sequences that may make their step fail.
    """

    def __init__(
        self, config: SchedulerConfig, block_manager: BlockManager, accounting: Accounting
    ) -> None:
        self.waiting = WaitingQueue(config)
        self.running: list[Sequence] = []
        self.num_places: dict[str, int] = {}
        self.place_limits: dict[str, int] = {}
        self.num_preemptions = 0
        self.output_means = OutputMeans()
        self.suspects = Suspects()
        self._most_running = config.max_num_seqs
        self._block_manager, self._accounting = block_manager, accounting
        self._by_id: dict[int, Sequence] = {}
        self._num_admitted = 0
        slots = block_manager.slots
        self._beginnings = None
        if slots is not None and block_manager.enable_prefix_caching:
            self._beginnings = SharedBeginnings(slots.unit)

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: int) -> Sequence | None:
        """Return the unfinished sequence with an id; None if there is none."""
        return self._by_id.get(request_id)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue.

        Raises:
            DuplicateRequestError: a sequence with its request id is not finished yet.
        """
        if sequence.request_id in self._by_id:
            raise DuplicateRequestError(sequence.request_id)
        self._by_id[sequence.request_id] = sequence
        self.estimate_output(sequence)
        self.waiting.add(sequence)
        self._note_waiting(sequence)

    def estimate_output(self, sequence: Sequence) -> None:
        """Set how many tokens a sequence that is not in the queue will probably generate."""
        limit = sequence.sampling.max_new_tokens
        sequence.expected_output = expected_output(limit, self.output_means.means)

    def withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue that was never admitted."""
        self._remove_waiting(sequence)
        del self._by_id[sequence.request_id]

    def limit_places(self, limits: dict[str, int]) -> None:
        """Limit the running sequences of some clients: at the limit the queue passes over a client."""
        self.place_limits = limits
        places = self.num_places
        self.waiting.passed_over = {c for c, most in limits.items() if places.get(c, 0) >= most}

    @property
    def is_full(self) -> bool:
        """Whether as many sequences run as may."""
        return len(self.running) == self._most_running

    def admit(self, sequence: Sequence) -> bool:
        """Move a sequence from the queue to the running list; return whether there is a place for it."""
        if self.is_full:
            return False
        if sequence.num_tokens_in_flight:
            return (
                False  # preempted by a schedule that was not started: not all its tokens have ids
            )
        if self.suspects and not self.suspects.may_run(sequence, self.running):
            return False
        num_spare, beginnings = self.num_growing(), self._beginnings
        if beginnings is None:
            if not self._block_manager.admit(sequence, num_spare):
                return False
        else:
            shared = partial(beginnings.partings, sequence)
            if not self._block_manager.admit(sequence, num_spare, shared):
                return False
            beginnings.remove(sequence)
        self.waiting.admit(sequence)
        if not sequence.num_preemptions:
            sequence.rank = (sequence.priority, self._num_admitted)
            self._num_admitted += 1
        bisect.insort(self.running, sequence, key=_rank)
        sequence.status = RUNNING
        client = sequence.client
        self.num_places[client] = count = self.num_places.get(client, 0) + 1
        if count >= self.place_limits.get(client, count + 1):
            self.waiting.passed_over.add(client)
        self._accounting.admit(
            sequence.account, len(sequence.block_table), sequence.num_computed_tokens
        )
        self._accounting.num_reserved_tokens += sequence.max_num_tokens
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence back to the queue, without its blocks; `running` becomes another list."""
        self.running = [it for it in self.running if it is not sequence]
        self._leave(sequence)
        self._block_manager.free(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.check_at = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.put_back(sequence)
        self._note_waiting(sequence)

    def remove(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state."""
        if sequence.status is RUNNING:
            self.running.remove(sequence)
        self.finish(sequence, reason)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence and free its blocks; a running one stays in the running list until `drop_finished`.

        After an error its blocks leave the prefix cache.
        """
        if sequence.status is RUNNING:
            self._leave(sequence)
            self._block_manager.free(sequence, discard_cached=reason is FinishReason.ERROR)
            self.output_means.add(sequence.sampling.max_new_tokens, sequence.num_output_tokens)
        else:
            self._remove_waiting(sequence)
        sequence.usage = self._accounting.end(
            sequence.account,
            reason,
            num_tokens_in_flight=sequence.num_tokens_in_flight,
            has_output=sequence.num_output_tokens > 0,
        )
        self.suspects.discard(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.check_at = 0
        sequence.finish_reason = reason
        del self._by_id[sequence.request_id]

    def awaits_prefix(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence should be admitted later, since a running one computes its beginning.

        This is so for states of fixed size, if a snapshot of a running sequence will soon save the sequence at least
        a quarter of its tokens. Keys and values, which are cached block by block, save most of that without waiting.
        """
        if self._beginnings is None:
            return False
        count = self._block_manager.num_pending_tokens(sequence)
        if 4 * count < sequence.num_tokens:
            return False
        num_cached = self._block_manager.num_cached_tokens(sequence)
        return 4 * (count - num_cached) >= sequence.num_tokens - num_cached

    def drop_finished(self) -> None:
        """Remove the sequences that have ended from the running list."""
        self.running = [sequence for sequence in self.running if sequence.status is RUNNING]

    def _note_waiting(self, sequence: Sequence) -> None:
        if self._beginnings is not None and self._block_manager.looks_up(sequence):
            self._beginnings.add(sequence)

    def _remove_waiting(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        if self._beginnings is not None:
            self._beginnings.remove(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Account for a sequence whose place and blocks are about to be free."""
        left = self.num_places[sequence.client] - 1
        if left:
            self.num_places[sequence.client] = left
        else:
            del self.num_places[sequence.client]
        self._accounting.leave(
            sequence.account, len(sequence.block_table), sequence.num_computed_tokens
        )
        self._accounting.num_reserved_tokens -= sequence.max_num_tokens

    def num_growing(self) -> int:
        """Count the running sequences that may need another block before they end."""
        return len([s for s in self.running if s.capacity < s.max_num_tokens - 1])

    def check_invariants(self, started: Iterable[SchedulerOutput]) -> None:
        """Assert the invariants. Slow: for tests.

        Args:
            started: the steps whose results are not entered yet.
        """
        running, waiting = self.running, list(self.waiting)
        self.waiting.check_invariants()
        if self._beginnings is not None:
            self._beginnings.check_invariants(
                it for it in waiting if self._block_manager.looks_up(it)
            )
        ranks = [sequence.rank for sequence in running]
        assert ranks == sorted(ranks), "sequences out of order"
        last_running = {_peers(sequence): sequence.rank for sequence in running}
        for sequence in waiting:
            rank = last_running.get(_peers(sequence))
            if sequence.num_preemptions and rank is not None:
                assert rank < sequence.rank, f"{sequence} was overtaken"
        assert len(running) <= self._most_running
        assert all(sequence.status is RUNNING for sequence in running)
        assert self.num_places == Counter(sequence.client for sequence in running)
        for sequence in waiting:
            assert sequence.status is SequenceStatus.WAITING
            assert not sequence.block_table, f"{sequence} waits and owns blocks"
        assert self._by_id == {sequence.request_id: sequence for sequence in running + waiting}
        steps = list(started)
        for sequence in running + waiting:
            sampling = [
                row.num_logits
                for step in steps
                for row in (*step.decode, *step.prefill)
                if row.sequence is sequence
            ]
            assert sequence.num_tokens_in_flight + sequence.num_void_results == sum(sampling)
            self._check_shortcut(sequence)
        num_remaining = [
            sequence.num_known_tokens - sequence.num_computed_tokens
            for sequence in running
            if sequence.num_known_tokens < sequence.max_num_tokens
        ]
        assert all(count > 0 for count in num_remaining)
        assert self._block_manager.owners == set(running)
        self._block_manager.check_invariants()

    def _check_shortcut(self, sequence: Sequence) -> None:
        """Assert that the tokens before `check_at` need nothing but to be appended."""
        if not (stop := sequence.check_at):
            return
        assert sequence.status is RUNNING, sequence
        assert not sequence.is_expired, sequence
        assert not sequence.num_void_results, sequence
        assert stop < sequence.max_num_tokens, sequence
        if self._block_manager.caches_output:
            block_size = self._block_manager.block_size
            assert stop <= (sequence.num_linked_blocks + 1) * block_size, sequence
