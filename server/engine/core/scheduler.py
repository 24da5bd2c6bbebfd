"""Chooses the sequences and tokens of each step, and commits the results of the steps.

Pure bookkeeping without tensors or clocks: a step is a list of (sequence, number of tokens). The engine tells the time
in `Scheduler.accounting.now`.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence as TypingSequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from server.engine.core.accounting import Accounting
from server.engine.core.block_manager import BlockManager
from server.engine.core.limits import SchedulerConfig
from server.engine.core.prompt_chunks import Chunk, NoneWaiting, divide
from server.engine.core.rates import Rate
from server.engine.core.request import FinishReason, TokenEvent
from server.engine.core.request_checks import (
    CapacityError,
    DuplicateRequestError,
    EmptyRequestError,
)
from server.engine.core.sequence import Sequence, SequenceStatus
from server.engine.core.step import (
    DecodeBatch,
    DecodeRows,
    FailedResult,
    SampledResult,
    SampledRows,
    ScheduledSequence,
    SchedulerOutput,
)
from server.engine.core.step_charges import StepCharges
from server.engine.core.step_events import StepEvents
from server.engine.core.token_events import append_forced, append_sampled
from server.engine.core.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_SHORTER: Final = 2
"""A waiting prompt goes before the rest of a running one that is at least this many times as long. Prompts of similar
lengths, which often begin alike, are computed one after the other, so that the later ones find the prefix in the cache.
"""

_rank = attrgetter("rank")

_RUNNING: Final = SequenceStatus.RUNNING
"""A constant, since looking the member up takes as long as the rest of what most rows need."""


_NONE_WAITING = NoneWaiting()


class _Ending(NamedTuple):
    """A step whose results are being entered.

    Attributes:
        output: the step.
        device_seconds: time that it took on the device.
        num_live: unfinished sequences before.
        events: of its rows.
        failures: the events of sequences that fail.
    """

    output: SchedulerOutput
    device_seconds: float
    num_live: int
    events: StepEvents
    failures: list[tuple[int, TokenEvent]]


def _timeout(sequence: Sequence) -> TokenEvent:
    return TokenEvent(token_id=None, finish_reason=FinishReason.TIMEOUT, usage=sequence.usage)


class Scheduler:
    """Owns the waiting queue and the running list, and decides what each step computes.

    There are no prefill and decode phases: every running sequence computes its known tokens that are
    not computed yet, at least one in each step. A decoding sequence has a single one.

    Chunks: what a step's token budget leaves after one token for each running sequence is divided
    among the longer chunks and new sequences (`prompt_chunks.divide`): half of it to the sequence
    that was admitted first, half to the shortest. So short prompts do not wait for long ones.

    Order: `WaitingQueue` says which sequence is admitted next. The running list is in order of
    priority, then of first admission. Priorities are strict: a sequence waits as long as sequences
    with lower numbers keep coming and fill the limits. A waiting sequence never preempts a running one.

    Admission: a sequence is admitted if blocks are free for all its known tokens and one more token.
    It gets these blocks at once, so a prompt in chunks never waits for blocks half way. One further
    block must stay free for each running sequence that may still grow; otherwise the new sequence
    would soon be preempted and its work lost. A sequence that has no token yet and could not get one
    before its deadline, at the lowest price of a token so far, ends instead.

    Preemption: if no block is free for the next token of a running sequence, the last running
    sequence loses all its blocks and returns to the queue, before all new sequences of its priority,
    until its whole context fits again. That step admits no sequence. The first running sequence
    therefore always advances, and of sequences with one priority each eventually is the first.

    Only the engine's loop calls it, from one thread. The life of a step:

        schedule    chooses tokens and allocates their blocks; may be called again instead of `start`
        start       the step was launched on the device: its tokens count as computed, and the tokens
                    that it samples as known, so that the next step can be scheduled
        commit      enters the results of the step; `fail` ends a step without results, `commit_parts` one that was
                    computed again

    Steps end in the order in which they were started, and at most one started step has not ended
    when `schedule` is called. `schedule` does not know which tokens of that step end their
    sequences, so it may schedule a row for a finished sequence; the result of that row is ignored.
    A block may be freed and allocated again meanwhile, because the device computes steps in order.

    Invariants (`check_invariants`): the running list is in order, and of sequences with one priority,
    running ones were admitted before those that wait after a preemption. Exactly the running
    sequences own blocks. Every running sequence has a token left to compute, unless its last one is
    in flight.

    Grammars: tokens that a grammar forces become known together with the token before them, and the
    next step computes them as one chunk. A step that was started meanwhile samples at the position of
    the first of them; its result for the sequence is ignored.

    Attributes:
        num_steps: steps scheduled so far.
        num_preemptions: preemptions so far.
        prefix_cache_query_tokens: prompt tokens looked up in the prefix cache at first admission.
        prefix_cache_hit_tokens: prompt tokens found there.
        num_prompt_tokens: prompt tokens of the sequences admitted so far, including cached tokens.
        num_generated_tokens: tokens sampled.
        num_prefill_tokens: known tokens of running sequences that the last schedule left for later steps.
        prompt_rate: prompt tokens computed per second, of the steps that used the whole budget.
        end_rate: sequences that ended per second, also by an abort or their deadline, while others waited.
        accounting: what sequences and steps used.
    """

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager) -> None:
        self.config = config
        self.block_manager = block_manager
        self._block_size = block_manager.block_size
        self.num_steps = 0
        self.num_preemptions = 0
        self.prefix_cache_query_tokens = 0
        self.prefix_cache_hit_tokens = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.accounting = Accounting()
        self.prompt_rate = Rate()
        self.end_rate = Rate()
        self._num_ended = 0  # since the last step ended, for whatever reason
        self.num_prefill_tokens = 0
        self._is_short_of_places = False
        self._num_admitted = 0
        self._live: dict[int, Sequence] = {}
        self._waiting = WaitingQueue(config)
        self._first_scheduled: list[Sequence] = []  # by the latest `schedule`
        self._late: list[tuple[int, TokenEvent]] = []
        self._running: list[Sequence] = []
        self._scheduled: SchedulerOutput | None = None
        self._decode_batch = DecodeBatch([])  # of the latest `schedule`
        self._started: deque[SchedulerOutput] = deque()
        self._charges = StepCharges(self.accounting)

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the queue."""
        return len(self._waiting)

    @property
    def waiting(self) -> WaitingQueue:
        """The queue; only the scheduler changes it."""
        return self._waiting

    @property
    def num_running(self) -> int:
        """Number of sequences that own blocks."""
        return len(self._running)

    @property
    def num_free_places(self) -> int:
        """Number of sequences that may be admitted before another one ends; 0 if the last schedule lacked blocks."""
        if self._waiting and self._is_short_of_places:
            return 0
        return self.config.max_num_seqs - len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._running or self._waiting)

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of a sequence: the smaller of `max_model_len` and the cache's capacity."""
        manager = self.block_manager
        return min(self.config.max_model_len, manager.num_blocks * manager.block_size)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue.

        Raises:
            CapacityError: its prompt and max_new_tokens exceed `max_total_tokens`.
            EmptyRequestError: it has no prompt, or no token to generate.
            DuplicateRequestError: a sequence with its request id is not finished yet.
        """
        if not 0 < sequence.num_prompt_tokens < sequence.max_num_tokens:
            raise EmptyRequestError(sequence)
        if sequence.max_num_tokens > self.max_total_tokens:
            raise CapacityError(sequence.max_num_tokens, self.max_total_tokens)
        if sequence.request_id in self._live:
            raise DuplicateRequestError(sequence.request_id)
        self._live[sequence.request_id] = sequence
        self._waiting.add(sequence)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> Sequence | None:
        """End a sequence in any state and free its blocks.

        May be called between `schedule` and `commit`; the results of that step for the sequence are then ignored.

        Args:
            request_id: of the sequence.
            reason: its `finish_reason`.

        Returns:
            The sequence, or None if no unfinished sequence has this id.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        self._remove(sequence, reason)
        return sequence

    def expire(self, request_id: int) -> TokenEvent | None:
        """End a sequence whose deadline has passed: with its next token if it has output and runs, else now.

        Called before each `schedule` until the sequence has ended: it may be preempted before its next token.

        Returns:
            The event for the client if the sequence has ended.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        if sequence.num_output_tokens and sequence.status is _RUNNING:
            sequence.is_expired = True
            sequence.check_at = 0
            return None
        self._remove(sequence, FinishReason.TIMEOUT)
        return _timeout(sequence)

    def schedule(self) -> SchedulerOutput:
        """Choose the tokens that the next step computes, and allocate their blocks."""
        decoding: list[Sequence] = []
        starts: list[int] = []
        chunks: list[Chunk] = []
        preempted: list[int] = []
        self._first_scheduled = []
        # A preemption removes the last sequence of the list during this loop, never one that the
        # loop has already passed.
        for sequence in self._running:
            start = sequence.num_computed_tokens
            num_known = len(sequence.token_ids) + sequence.num_tokens_in_flight
            if num_known > sequence.capacity:
                if num_known == sequence.max_num_tokens:
                    continue  # its last token is in flight
                if not self._reserve_blocks(sequence, num_known, preempted):
                    break
            if num_known - start == 1:
                decoding.append(sequence)
                starts.append(start)
            else:
                chunks.append(Chunk(sequence, num_known - start))
        budget = self.config.max_num_batched_tokens - len(decoding) - len(chunks)
        num_logits = len(decoding)
        prefill: list[ScheduledSequence] = []
        self._is_short_of_places = False
        self.num_prefill_tokens = 0
        if chunks or (self._waiting and not preempted):
            for row in divide(budget, chunks, _NONE_WAITING if preempted else self):
                num_left = row.sequence.num_known_tokens - row.start - row.num_tokens
                self.num_prefill_tokens += num_left
                if row.num_tokens > 1:
                    prefill.append(row)
                    continue
                at = num_logits if row.num_logits else len(decoding)
                num_logits += row.num_logits
                decoding.insert(at, row.sequence)
                starts.insert(at, row.start)
        if decoding != self._decode_batch.sequences:
            self._decode_batch = DecodeBatch(decoding)
        output = SchedulerOutput(
            step=self.num_steps,
            decode=DecodeRows(self._decode_batch, starts, num_logits),
            prefill=tuple(prefill),
            num_tokens=len(starts) + sum(row.num_tokens for row in prefill),
            first_scheduled=tuple(self._first_scheduled),
            preempted=tuple(preempted),
        )
        self.num_steps += 1
        self._scheduled = output
        return output

    def take_late(self) -> list[tuple[int, TokenEvent]]:
        """Return (request id, event) of the sequences that `schedule` ended because of their deadline."""
        late, self._late = self._late, []
        return late

    def start(self, output: SchedulerOutput) -> None:
        """Note that a step was launched on the device.

        Args:
            output: result of the latest `schedule`.
        """
        assert output is self._scheduled, "a step is started once, and only the latest one"
        self._scheduled = None
        self._started.append(output)
        self._charges.start()
        decode = output.decode
        sequences = decode.batch.sequences
        for sequence, start in zip(sequences, decode.starts, strict=True):
            if sequence.status is _RUNNING:
                sequence.num_computed_tokens = start + 1
                sequence.num_tokens_in_flight += 1
        for sequence in sequences[decode.num_logits :]:
            if sequence.status is _RUNNING:
                sequence.num_tokens_in_flight -= 1
        for row in output.prefill:
            sequence = row.sequence
            if sequence.status is _RUNNING:
                sequence.num_computed_tokens = row.start + row.num_tokens
                sequence.num_tokens_in_flight += row.num_logits

    def commit(
        self, output: SchedulerOutput, sampled: SampledRows, device_seconds: float = 0.0
    ) -> StepEvents:
        """Enter the results of a step.

        Args:
            output: the earliest started step that has not ended.
            sampled: the tokens that continue the sequences: one for each decode row with logits, and for a prefill row
                at most as many as its `num_logits`. A shorter list means that proposed tokens were rejected; they then
                count as not computed.
            device_seconds: time that the step took on the device.

        Returns:
            An event for every token and every sequence that ended, in the order of rows, those of failures last.
            A result with an error ends its sequence and removes the sequence's blocks from the prefix cache.
        """
        counts = [row.num_logits for row in output.prefill]
        results = sampled.prefill
        assert len(sampled.token_ids) == output.decode.num_logits, "a token for each decode row"
        assert len(counts) == len(results), f"{len(results)} results of {len(counts)} rows"
        assert all(bool(n) >= bool(r) and n >= len(r) for n, r in zip(counts, results, strict=True))
        ending = self._begin_end(output, device_seconds)
        self._enter_decode(output.decode, sampled, ending)
        for row, tokens in zip(output.prefill, results, strict=True):
            self._enter(row, tokens, ending)
        return self._complete_end(ending)

    @contextmanager
    def not_started(self, output: SchedulerOutput) -> Iterator[list[ScheduledSequence]]:
        """Return to the state in which a started step was launched, so that it can be computed again.

        The steps before it must have ended. Computing a step again writes the same keys and values to the same slots.

        Args:
            output: the earliest started step that has not ended.

        Yields:
            The rows of the sequences that still own their blocks. The others have ended or were preempted meanwhile.
        """
        assert output is self._started[0], "an earlier step has not ended"
        rows = [
            row for row in chain(output.decode, output.prefill) if row.sequence.status is _RUNNING
        ]
        in_flight = [row.sequence.num_tokens_in_flight for row in rows]
        for row in rows:
            row.sequence.num_tokens_in_flight = 0
        try:
            yield rows
        finally:
            for row, count in zip(rows, in_flight, strict=True):
                row.sequence.num_tokens_in_flight = count

    def commit_parts(
        self,
        output: SchedulerOutput,
        results: Mapping[Sequence, TypingSequence[SampledResult]],
        device_seconds: float = 0.0,
    ) -> StepEvents:
        """Enter the results of a step that was computed again in parts.

        Args:
            output: see `commit`.
            results: by sequence, the tokens that continue it. A sequence that failed has one result, with an error,
                also if its row has no logits; one that was preempted meanwhile has none and is computed again after its
                preemption.
            device_seconds: see `commit`.

        Returns:
            See `commit`.
        """
        ending = self._begin_end(output, device_seconds)
        for row in chain(output.decode, output.prefill):
            self._enter(row, results.get(row.sequence, ()), ending)
        return self._complete_end(ending)

    def fail(self, output: SchedulerOutput, error: str, device_seconds: float = 0.0) -> StepEvents:
        """End the sequences of a failed step with an error, and remove their blocks from the prefix cache.

        Args:
            output: see `commit`.
            error: message for the clients.
            device_seconds: see `commit`.

        Returns:
            See `commit`.
        """
        failed = [FailedResult(error)]
        ending = self._begin_end(output, device_seconds)
        for row in chain(output.decode, output.prefill):
            self._enter(row, failed, ending)
        return self._complete_end(ending)

    def _begin_end(self, output: SchedulerOutput, device_seconds: float) -> _Ending:
        """Take the earliest started step, and charge it."""
        assert self._started, "a step ends once, and after it was started"
        assert output is self._started[0], "steps end in the order in which they were started"
        self._started.popleft()
        self._charges.charge(output, device_seconds)
        return _Ending(output, device_seconds, len(self._live), StepEvents(), [])

    def _complete_end(self, ending: _Ending) -> StepEvents:
        """Update the rates and the running list after the results of all rows; return the events."""
        output, device_seconds, num_live, events, failures = ending
        self.num_generated_tokens += len(events)
        for request_id, event in failures:
            events.add(request_id, event)
        self._charges.note_first_tokens()
        if self._waiting:
            self.end_rate.add(self._num_ended, device_seconds)
        self._num_ended = 0
        if output.num_tokens == self.config.max_num_batched_tokens and output.prefill:
            self.prompt_rate.add(output.num_tokens - len(output.decode), device_seconds)
        if len(self._live) < num_live:
            self._running = [s for s in self._running if s.status is _RUNNING]
        return events

    def idle_violations(self) -> list[str]:
        """Return what contradicts the bookkeeping of a scheduler without work; fast enough for idle times."""
        counts = {
            "waiting sequences": self.num_waiting,
            "running sequences": self.num_running,
            "unfinished sequences": len(self._live),
            "started steps": len(self._started),
            "reserved tokens": self.accounting.num_reserved_tokens,
        }
        found = [f"{count} {name}, expected none" for name, count in counts.items() if count]
        return found + self.block_manager.idle_violations()

    def check_invariants(self) -> None:
        """Assert the invariants. Slow: for tests and idle times."""
        running, waiting = self._running, list(self._waiting)
        self._waiting.check_invariants()
        ranks = [sequence.rank for sequence in running]
        assert ranks == sorted(ranks), "sequences out of order"
        last_running = {sequence.priority: sequence.rank for sequence in running}
        for sequence in waiting:
            rank = last_running.get(sequence.priority)
            if sequence.num_preemptions and rank is not None:
                assert rank < sequence.rank, f"{sequence} was overtaken"
        assert len(running) <= self.config.max_num_seqs
        assert all(sequence.status is _RUNNING for sequence in running)
        for sequence in waiting:
            assert sequence.status is SequenceStatus.WAITING
            assert not sequence.block_table, f"{sequence} waits and owns blocks"
        assert self._live == {sequence.request_id: sequence for sequence in running + waiting}
        for sequence in running + waiting:
            sampling = [
                row.num_logits
                for step in self._started
                for row in (*step.decode, *step.prefill)
                if row.sequence is sequence
            ]
            assert sequence.num_tokens_in_flight + sequence.num_void_results == sum(sampling)
        num_remaining = [
            sequence.num_known_tokens - sequence.num_computed_tokens
            for sequence in running
            if sequence.num_known_tokens < sequence.max_num_tokens
        ]
        assert all(count > 0 for count in num_remaining)
        for sequence in running + waiting:
            self._check_shortcut(sequence)
        assert self.block_manager.owners == set(running)
        self.block_manager.check_invariants()

    def _check_shortcut(self, sequence: Sequence) -> None:
        """Assert that the tokens before `check_at` need nothing but to be appended."""
        if not (stop := sequence.check_at):
            return
        assert sequence.status is _RUNNING, sequence
        assert sequence.matcher is None, sequence
        assert not sequence.is_expired, sequence
        assert not sequence.num_void_results, sequence
        assert stop < sequence.max_num_tokens, sequence
        if self.block_manager.enable_prefix_caching:
            assert stop <= (sequence.num_linked_blocks + 1) * self._block_size, sequence

    def admit_next(self) -> Chunk | None:
        """Admit the head of the queue, or a shorter one if there is no place for it; see `divide`."""
        head = self._candidate(shortest=False)
        if head is None:
            return None
        if (chunk := self._admit(head)) is None:
            assert self._running or head.num_tokens_in_flight, (
                "`add` ensures that a sequence fits in an empty cache"
            )
            self._is_short_of_places = True
            shortest = self._candidate(shortest=True)
            if shortest is not None and shortest is not self._waiting.head:
                chunk = self._admit(shortest)
        return chunk

    def admit_before(self, chunk: Chunk) -> Chunk | None:
        """Admit a sequence that is served before a chunk, if there is a place for it; see `divide`."""
        shortest = self._candidate(shortest=True)
        if shortest is None or shortest.priority > chunk.sequence.priority:
            return None
        is_ahead = shortest.priority < chunk.sequence.priority
        if is_ahead or shortest.num_tokens * _SHORTER <= chunk.num_tokens:
            return self._admit(shortest)
        return None

    def _candidate(self, *, shortest: bool) -> Sequence | None:
        """Return the queue's head or its shortest sequence; end those that cannot meet their deadline."""
        waiting = self._waiting
        while sequence := waiting.shortest if shortest else waiting.head:
            if not self._is_late(sequence):
                return sequence
            self._finish(sequence, FinishReason.TIMEOUT)
            self._late.append((sequence.request_id, _timeout(sequence)))
        return None

    def _admit(self, sequence: Sequence) -> Chunk | None:
        """Admit a waiting sequence; None if there is no place for it."""
        running = self._running
        if len(running) == self.config.max_num_seqs:
            return None
        if sequence.num_tokens_in_flight:
            return None  # preempted by a schedule that was not started: not all its tokens have ids
        if not self.block_manager.admit(sequence, num_spare=self._num_growing()):
            return None
        self._waiting.admit(sequence)
        if not sequence.num_preemptions:
            sequence.rank = (sequence.priority, self._num_admitted)
            self._num_admitted += 1
        bisect.insort(running, sequence, key=_rank)
        sequence.status = SequenceStatus.RUNNING
        self.accounting.admit(
            sequence.account, len(sequence.block_table), sequence.num_computed_tokens
        )
        self.accounting.num_reserved_tokens += sequence.max_num_tokens
        self._charges.admit(sequence, is_first=sequence.first_scheduled_step is None)
        if sequence.first_scheduled_step is None:
            sequence.first_scheduled_step = self.num_steps
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self._first_scheduled.append(sequence)
            self.num_prompt_tokens += sequence.num_prompt_tokens
            if self.block_manager.looks_up(sequence):
                self.prefix_cache_query_tokens += sequence.num_prompt_tokens
                self.prefix_cache_hit_tokens += sequence.num_cached_tokens
        return Chunk(sequence, sequence.num_tokens - sequence.num_computed_tokens)

    def _is_late(self, sequence: Sequence) -> bool:
        """Return whether even an idle engine could not compute a sequence's next token before its deadline."""
        if sequence.deadline is None or sequence.num_output_tokens:
            return False
        left, price = sequence.deadline - self.accounting.now, self.accounting.least_price
        if sequence.num_prompt_tokens * price <= left:
            return False
        num_cached = self.block_manager.num_cached_tokens(sequence)
        return (sequence.num_prompt_tokens - num_cached) * price > left

    def _enter_decode(self, decode: DecodeRows, sampled: SampledRows, ending: _Ending) -> None:
        """Enter the results of the decode rows. Most only append their token, or also fill a block."""
        sequences, request_ids = decode.batch.sequences, decode.batch.request_ids
        token_ids, logprobs = sampled.token_ids, sampled.logprobs
        others: list[int] = []
        # Stops at the rows without logits.
        rows = zip(range(len(token_ids)), sequences, token_ids, strict=False)
        for row, sequence, token_id in rows:
            known = sequence.token_ids
            if token_id < 0 or token_id in sequence.end_token_ids:
                others.append(row)
            elif len(known) < sequence.check_at:
                known.append(token_id)
                sequence.num_tokens_in_flight -= 1
            elif sequence.check_at and len(known) < sequence.max_num_tokens - 1:
                known.append(token_id)
                sequence.num_tokens_in_flight -= 1
                self.block_manager.cache_full_blocks(sequence, len(known) - 1)
                self._set_check(sequence)
            else:
                others.append(row)
        first, events = 0, ending.events
        for row in others:
            if first < row:
                events.add_tokens(request_ids, token_ids, logprobs, first, row)
            first = row + 1
            self._enter(decode[row], sampled.decode_row(row), ending)
        if first < len(token_ids):
            events.add_tokens(request_ids, token_ids, logprobs, first, len(token_ids))
        for row in range(len(token_ids), len(decode)):
            self._enter(decode[row], (), ending)

    def _enter(
        self, row: ScheduledSequence, sampled: TypingSequence[SampledResult], ending: _Ending
    ) -> None:
        """Enter the result of one row; add the events of its tokens, and that of its failure if it fails."""
        sequence, num_logits = row.sequence, row.num_logits
        if sequence.finish_reason is not None:
            self.accounting.charge_ended(sequence.finish_reason, row.num_tokens)
            return
        if sequence.num_void_results and num_logits and not (sampled and sampled[0].error):
            sequence.num_void_results -= 1
            self._cache_blocks(sequence, row.start + row.num_tokens)
            return
        sequence.num_tokens_in_flight -= num_logits
        events = ending.events
        reason = append_sampled(sequence, sampled, events)
        if reason is not FinishReason.ERROR:
            num_rejected = num_logits - len(sampled)
            if sequence.status is _RUNNING:
                sequence.num_computed_tokens -= num_rejected
            stop = row.start + row.num_tokens - num_rejected
            if stop // self._block_size > sequence.num_linked_blocks:
                self._cache_blocks(sequence, stop)
            if reason is None:
                if not (sampled and sequence.sampling.skips_forced_tokens):
                    self._set_check(sequence)
                    return
                reason = append_forced(sequence, events)
                if sequence.num_void_results:
                    self._decode_batch = DecodeBatch([])  # the next step computes a forced token
        if reason is FinishReason.ERROR:
            ending.failures.append(self._fail(sequence))
        elif reason is not None:
            self._finish(sequence, reason)
            assert sequence.usage is not None
            events.usage[len(events) - 1] = sequence.usage

    def _set_check(self, sequence: Sequence) -> None:
        """Set the number of tokens from which on a row of a sequence needs more than its token; see `_enter_decode`."""
        if sequence.status is not _RUNNING or sequence.matcher is not None or sequence.is_expired:
            return
        stop = sequence.max_num_tokens - 1
        if self.block_manager.enable_prefix_caching:
            stop = min(stop, (sequence.num_linked_blocks + 1) * self._block_size)
        sequence.check_at = stop

    def _cache_blocks(self, sequence: Sequence, stop: int) -> None:
        """Cache the full blocks of a sequence, whose first `stop` tokens are computed."""
        # A sequence that was preempted meanwhile keeps its tokens but has no block to cache.
        if sequence.status is _RUNNING:
            self.block_manager.cache_full_blocks(sequence, stop)

    def _fail(self, sequence: Sequence) -> tuple[int, TokenEvent]:
        """End a sequence with its error; return the event for the client."""
        assert sequence.error is not None
        self._finish(sequence, FinishReason.ERROR)
        event = TokenEvent(
            token_id=None,
            finish_reason=FinishReason.ERROR,
            error=sequence.error,
            usage=sequence.usage,
        )
        return sequence.request_id, event

    def _num_growing(self) -> int:
        """Count the running sequences that may need another block before they end."""
        return len([s for s in self._running if s.capacity < s.max_num_tokens - 1])

    def _reserve_blocks(self, sequence: Sequence, num_tokens: int, preempted: list[int]) -> bool:
        """Allocate blocks for `num_tokens` tokens of a running sequence, and preempt later sequences if necessary.

        Returns:
            False if the sequence was itself the last and was preempted.
        """
        num_blocks = len(sequence.block_table)
        while not self.block_manager.grow(sequence, num_tokens):
            victim = self._running.pop()
            self._leave(victim)
            if self._started:
                self._charges.preempt(victim)
            self.block_manager.free(victim)
            victim.status = SequenceStatus.WAITING
            victim.check_at = 0
            victim.num_preemptions += 1
            self.num_preemptions += 1
            preempted.append(victim.request_id)
            self._waiting.put_back(victim)
            if victim is sequence:
                assert self._running, "`add` ensures that the first sequence fits in the cache"
                return False
        self.accounting.allocate(sequence.account, len(sequence.block_table) - num_blocks)
        return True

    def _remove(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state."""
        if sequence.status is _RUNNING:
            self._running.remove(sequence)
        self._finish(sequence, reason)

    def _leave(self, sequence: Sequence) -> None:
        """Account for a sequence whose blocks are about to be freed."""
        self.accounting.leave(
            sequence.account, len(sequence.block_table), sequence.num_computed_tokens
        )
        self.accounting.num_reserved_tokens -= sequence.max_num_tokens

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence and free its blocks; the caller removes it from the running list."""
        if sequence.status is _RUNNING:
            self._leave(sequence)
            self.block_manager.free(sequence, discard_cached=reason is FinishReason.ERROR)
        else:
            self._waiting.remove(sequence)
        sequence.usage = self.accounting.end(
            sequence.account,
            reason,
            num_tokens_in_flight=sequence.num_tokens_in_flight,
            has_output=sequence.num_output_tokens > 0,
        )
        sequence.status = SequenceStatus.FINISHED
        sequence.check_at = 0
        sequence.finish_reason = reason
        del self._live[sequence.request_id]
        self._num_ended += 1
