"""Admits waiting sequences to the step that is being scheduled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from server.engine.core.request import FinishReason, TokenEvent
from server.engine.core.schedule.prompt_chunks import Chunk

if TYPE_CHECKING:
    from server.engine.core.accounting import Accounting
    from server.engine.core.memory.block_manager import BlockManager
    from server.engine.core.queue.live_sequences import LiveSequences
    from server.engine.core.results.step_charges import StepCharges
    from server.engine.core.sequence import Sequence

_SHORTER: Final = 2
"""A waiting prompt goes before the rest of a running one that is at least this many times as long. Prompts of similar
lengths, which often begin alike, are computed one after the other, so that the later ones find the prefix in the cache.
"""


def timeout_event(sequence: Sequence) -> TokenEvent:
    """Return the event of a sequence that has ended because of its deadline."""
    return TokenEvent(token_id=None, finish_reason=FinishReason.TIMEOUT, usage=sequence.usage)


class Admission:
    """Decides which waiting sequences are admitted; see `prompt_chunks.WaitingSource`. Part of the scheduler.

    A sequence is admitted if blocks are free for all its known tokens and one more token, unless a running one computes
    its beginning (`LiveSequences.awaits_prefix`). It gets these blocks at once,
    so a prompt in chunks never waits for blocks half way. One further block must stay free for each running sequence
    that may still grow; otherwise the new sequence would soon be preempted and its work lost. A sequence that has no
    token yet and could not get one before its deadline, at the lowest price of a token so far, ends instead.

    Attributes:
        first_scheduled: sequences that were admitted for the first time since `begin`.
        is_short_of_places: whether the head of the queue was not admitted since `begin`.
        prefix_cache_query_tokens: prompt tokens looked up in the prefix cache at first admission.
        prefix_cache_hit_tokens: prompt tokens found there.
        num_prompt_tokens: prompt tokens of the sequences admitted so far, including cached tokens.
    """

    def __init__(
        self,
        live: LiveSequences,
        block_manager: BlockManager,
        accounting: Accounting,
        charges: StepCharges,
    ) -> None:
        self.first_scheduled: list[Sequence] = []
        self.is_short_of_places = False
        self.prefix_cache_query_tokens = 0
        self.prefix_cache_hit_tokens = 0
        self.num_prompt_tokens = 0
        self._live, self._block_manager = live, block_manager
        self._accounting, self._charges = accounting, charges
        self._step = 0
        self._late: list[tuple[int, TokenEvent]] = []

    def begin(self, step: int) -> None:
        """Begin to schedule a step, of which `step` is the number."""
        self._step = step
        self.first_scheduled = []
        self.is_short_of_places = False

    def take_late(self) -> list[tuple[int, TokenEvent]]:
        """Return (request id, event) of the sequences that ended because of their deadline since the last call."""
        late, self._late = self._late, []
        return late

    def admit_next(self) -> Chunk | None:
        """Admit the head of the queue, or a shorter one if there is no place for it; see `divide`."""
        if suspects := self._live.suspects:
            suspect = suspects.next(self._live.waiting)
            return None if suspect is None else self.admit(suspect)
        head = self._candidate(shortest=False)
        if head is None:
            return None
        if self._live.awaits_prefix(head):
            shortest = self._candidate(shortest=True)
            if shortest is None or shortest is head or self._live.awaits_prefix(shortest):
                return None
            return self.admit(shortest)
        if (chunk := self.admit(head)) is None:
            assert self._live.running or head.num_tokens_in_flight, (
                "`Scheduler.add` ensures that a sequence fits in an empty cache"
            )
            self.is_short_of_places = True
            shortest = self._candidate(shortest=True)
            if shortest is not None and shortest is not self._live.waiting.head:
                chunk = self.admit(shortest)
        return chunk

    def admit_before(self, chunk: Chunk) -> Chunk | None:
        """Admit a sequence that is served before a chunk, if there is a place for it; see `divide`."""
        if self._live.suspects:
            return None
        shortest = self._candidate(shortest=True)
        if shortest is None or shortest.priority > chunk.sequence.priority:
            return None
        if self._live.awaits_prefix(shortest):
            return None
        is_ahead = shortest.priority < chunk.sequence.priority
        if is_ahead or shortest.num_tokens * _SHORTER <= chunk.num_tokens:
            return self.admit(shortest)
        return None

    def _candidate(self, *, shortest: bool) -> Sequence | None:
        """Return the queue's head or its shortest sequence; end those that cannot meet their deadline."""
        waiting = self._live.waiting
        while sequence := waiting.shortest if shortest else waiting.head:
            if not self.end_if_late(sequence):
                return sequence
        return None

    def end_if_late(self, sequence: Sequence) -> bool:
        """End a waiting sequence if it cannot meet its deadline; return whether it was so."""
        if not self._is_late(sequence):
            return False
        self._live.finish(sequence, FinishReason.TIMEOUT)
        self._late.append((sequence.request_id, timeout_event(sequence)))
        return True

    def admit(self, sequence: Sequence) -> Chunk | None:
        """Admit a waiting sequence; None if there is no place for it."""
        if not self._live.admit(sequence):
            return None
        is_first = sequence.first_scheduled_step is None
        self._charges.admit(sequence, is_first=is_first)
        if is_first:
            sequence.first_scheduled_step = self._step
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.first_scheduled.append(sequence)
            self.num_prompt_tokens += sequence.num_prompt_tokens
            if self._block_manager.looks_up(sequence):
                self.prefix_cache_query_tokens += sequence.num_prompt_tokens
                self.prefix_cache_hit_tokens += sequence.num_cached_tokens
        return Chunk.of(sequence, sequence.num_tokens)

    def _is_late(self, sequence: Sequence) -> bool:
        """Return whether even an idle engine could not compute a sequence's next token before its deadline."""
        if sequence.deadline is None or sequence.num_output_tokens:
            return False
        left, price = sequence.deadline - self._accounting.now, self._accounting.least_price
        if sequence.num_prompt_tokens * price <= left:
            return False
        num_cached = self._block_manager.num_cached_tokens(sequence)
        return (sequence.num_prompt_tokens - num_cached) * price > left
