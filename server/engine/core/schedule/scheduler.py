"""Chooses the sequences and tokens of each step, and commits the results of the steps.

Pure bookkeeping without tensors or clocks: a step is a list of (sequence, number of tokens). The engine tells the time
in `Scheduler.accounting.now`.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Final

from server.engine.core.accounting import Accounting
from server.engine.core.queue.live_sequences import RUNNING, LiveSequences
from server.engine.core.request import FinishReason
from server.engine.core.request_checks import CapacityError, EmptyRequestError
from server.engine.core.results.step_charges import StepCharges
from server.engine.core.results.step_results import StepResults
from server.engine.core.schedule.admission import Admission, timeout_event
from server.engine.core.schedule.client_shares import ClientShares
from server.engine.core.schedule.draft import LookupDrafter
from server.engine.core.schedule.draft_policy import DraftPolicy
from server.engine.core.schedule.prompt_chunks import Chunk, NoneWaiting, divide
from server.engine.core.schedule.rates import Rate
from server.engine.core.schedule.short_steps import ShortSteps
from server.engine.core.step import (
    NO_ROWS,
    DecodeBatch,
    DecodeRows,
    FailedResult,
    ScheduledSequence,
    SchedulerOutput,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Sequence as TypingSequence

    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.memory.block_manager import BlockManager
    from server.engine.core.queue.waiting_queue import WaitingQueue
    from server.engine.core.request import TokenEvent
    from server.engine.core.results.step_events import StepEvents
    from server.engine.core.sequence import Sequence
    from server.engine.core.step import SampledResult, SampledRows

_NONE_WAITING: Final = NoneWaiting()


class Scheduler:
    """Owns the waiting queue and the running list, and decides what each step computes.

    There are no prefill and decode phases: every running sequence computes its known tokens that are
    not computed yet, at least one in each step. A decoding sequence has a single one.

    States of fixed size: where a state has the same bits only if steps end at multiples of `StateSpec.chunk` tokens,
    the chunks of prompts end there, so a prompt may wait for a step with room for so many tokens. The generated tokens
    of a deterministic sequence are computed one by one, also when they are computed again after a preemption.

    Chunks: what a step's token budget leaves after one token for each running sequence is divided
    among the longer chunks and new sequences (`prompt_chunks.divide`): half of it to the sequence
    that was admitted first, half to the shortest. So short prompts do not wait for long ones.

    Order: `WaitingQueue` says which sequence is admitted next, `Admission` whether there is a place for it. The running
    list is in order of priority, then of first admission. Priorities are strict: a sequence waits as long as sequences
    with lower numbers keep coming and fill the limits.

    Preemption: if no block is free for the next token of a running sequence, the last running sequence of the client
    with the most blocks loses them and returns to the queue, before all new sequences of its client, until its whole
    context fits again. A waiting sequence preempts one of another client only if that has more than its share of the
    places or blocks (`ClientShares`). After a preemption the step admits no further sequence. The first running
    sequence therefore always advances, and of sequences with one priority each eventually is the first.

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

    Grammars: tokens that a grammar forces become known together with the token before them, and the
    next step computes them as one chunk. A step that was started meanwhile samples at the position of
    the first of them; its result for the sequence is ignored.

    Attributes:
        num_steps: steps scheduled so far.
        admission: decides which waiting sequences are admitted, and counts their prompts.
        num_prefill_tokens: known tokens of running sequences that the last schedule left for later steps.
        prompt_rate: prompt tokens computed per second, of the steps that used the whole budget.
        output_rate: tokens generated per second, of the steps during which sequences waited for a place or a slot.
        waits_for_slots: whether others wait until a sequence releases the slot of its adapter; may be set.
        accounting: what sequences and steps used.
        drafts: chooses the tokens that are proposed for the decode rows.

    Args:
        config: limits of a step.
        block_manager: owns the blocks.
        pads_drafts: see `DraftPolicy`.
    """

    def __init__(
        self, config: SchedulerConfig, block_manager: BlockManager, *, pads_drafts: bool = False
    ) -> None:
        self.config = config
        self.block_manager = block_manager
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.accounting = Accounting()
        self.prompt_rate = Rate()
        self.output_rate = Rate()
        self.waits_for_slots = False
        self._num_counted = 0  # of the generated tokens, those of steps before
        # Whether the last schedule left sequences waiting for a place or a slot.
        self._is_full = False
        self._charges = StepCharges(self.accounting)
        self._live = LiveSequences(config, block_manager, self.accounting)
        self.admission = Admission(self._live, block_manager, self.accounting, self._charges)
        self._shares = ClientShares(self._live, block_manager, self.admission)
        drafter = LookupDrafter(pools=block_manager.enable_prefix_caching)
        self.drafts = DraftPolicy(config, drafter, pads=pads_drafts)
        self._short_steps = ShortSteps(self._live, block_manager, self.accounting)
        self._results = StepResults(self._live, block_manager, self.accounting)
        self._idle: list[Sequence] = []  # that run and have no token in the latest `schedule`
        self._align = 1 if block_manager.slots is None else block_manager.slots.chunk
        self._scheduled: SchedulerOutput | None = None
        self._decode_batch = DecodeBatch([])  # of the latest `schedule`
        self._started: deque[SchedulerOutput] = deque()

    @property
    def output_means(self) -> list[float]:
        """Mean numbers of tokens that sequences have generated; see `OutputMeans`."""
        return self._live.output_means.means

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the queue."""
        return len(self._live.waiting)

    @property
    def waiting(self) -> WaitingQueue:
        """The queue; only the scheduler changes it."""
        return self._live.waiting

    @property
    def num_running(self) -> int:
        """Number of sequences that own blocks."""
        return len(self._live.running)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions so far."""
        return self._live.num_preemptions

    @property
    def num_generated_tokens(self) -> int:
        """Number of tokens sampled so far, and forced by grammars."""
        return self._results.num_generated_tokens

    @property
    def num_free_places(self) -> int:
        """Number of sequences that may be admitted before another one ends; 0 if the last schedule lacked blocks."""
        waiting = self._live.waiting
        if waiting and (self.admission.is_short_of_places or waiting.passed_over):
            return 0
        return self.config.max_num_seqs - len(self._live.running)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._live)

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
        self._live.add(sequence)
        self._short_steps.note_arrival(sequence.client)

    def estimate_output(self, sequence: Sequence) -> None:
        """See `LiveSequences.estimate_output`."""
        self._live.estimate_output(sequence)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> Sequence | None:
        """End a sequence in any state and free its blocks.

        May be called between `schedule` and `commit`; the results of that step for the sequence are then ignored.

        Returns:
            The sequence, or None if no unfinished sequence has this id.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        self._live.remove(sequence, reason)
        return sequence

    def withdraw(self, sequence: Sequence) -> bool:
        """Take a sequence that no step has scheduled out of the queue; it may be added again.

        Returns:
            Whether it was in the queue.
        """
        is_queued = self._live.get(sequence.request_id) is sequence and (
            sequence.first_scheduled_step is None and sequence.status is not RUNNING
        )
        if is_queued:
            self._live.withdraw(sequence)
        return is_queued

    def expire(self, request_id: int) -> TokenEvent | None:
        """End a sequence whose deadline has passed: with its next token if it has output and runs, else now.

        Called before each `schedule` until the sequence has ended: it may be preempted before its next token.

        Returns:
            The event for the client if the sequence has ended.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        if sequence.num_output_tokens and sequence.status is RUNNING:
            sequence.is_expired = True
            sequence.check_at = 0
            return None
        self._live.remove(sequence, FinishReason.TIMEOUT)
        return timeout_event(sequence)

    def schedule(self) -> SchedulerOutput:
        """Choose the tokens that the next step computes, and allocate their blocks."""
        decoding: list[Sequence] = []
        starts: list[int] = []
        chunks: list[Chunk] = []
        repeated: list[Sequence] = []
        preempted: list[int] = []
        self._return_slots()
        self.admission.begin(self.num_steps)
        self._idle = []
        self._apply_shares(preempted)
        # A preemption takes a sequence out of a new list during this loop, never one that the loop has already passed.
        for sequence in self._live.running:
            if preempted and sequence.status is not RUNNING:
                continue
            start = sequence.num_computed_tokens
            num_known = len(sequence.token_ids) + sequence.num_tokens_in_flight
            if num_known > sequence.capacity:
                if num_known == sequence.max_num_tokens:
                    continue  # its last token is in flight
                if not self._reserve_blocks(sequence, num_known, preempted):
                    continue
            if num_known - start == 1:
                decoding.append(sequence)
                starts.append(start)
            elif sequence.slots is not None and start >= sequence.slots.num_chunked:
                repeated.append(sequence)
            else:
                chunks.append(Chunk.of(sequence, num_known))
        num_logits = len(decoding)
        decoding += repeated
        starts += [sequence.num_computed_tokens for sequence in repeated]
        self.num_prefill_tokens = sum(
            [it.num_known_tokens - it.num_computed_tokens - 1 for it in repeated]
        )
        prefill: list[ScheduledSequence] = []
        if chunks or (self._live.waiting and not preempted):
            num_logits = self._divide(
                chunks, decoding, starts, num_logits, prefill, admits=not preempted
            )
        decode = self._decode_rows(decoding, starts, num_logits, drafts=not (prefill or preempted))
        is_short = bool(self._live.waiting) and self.num_free_places <= 0
        self._is_full = is_short or self.waits_for_slots
        output = SchedulerOutput(
            step=self.num_steps,
            decode=decode,
            prefill=tuple(prefill),
            num_tokens=decode.num_tokens + sum(row.num_tokens for row in prefill),
            first_scheduled=tuple(self.admission.first_scheduled),
            preempted=tuple(preempted),
        )
        self.num_steps += 1
        self._scheduled = output
        return output

    def _divide(
        self,
        chunks: list[Chunk],
        decoding: list[Sequence],
        starts: list[int],
        num_logits: int,
        prefill: list[ScheduledSequence],
        *,
        admits: bool,
    ) -> int:
        """Divide the tokens that decode rows leave, and add the rows to those of the step.

        Returns:
            The decode rows that have logits; `num_logits` of them had before.
        """
        limit = self.config.max_num_batched_tokens if decoding else self.config.prefill_budget
        budget = limit - len(decoding) - (len(chunks) if self._align == 1 else 0)
        source = self.admission if admits else _NONE_WAITING
        for row in divide(budget, chunks, source, self._live.place_limits, self._align):
            num_left = row.sequence.num_known_tokens - row.start - row.num_tokens
            self.num_prefill_tokens += num_left
            if not row.num_tokens:
                self._idle.append(row.sequence)
                continue
            if row.num_tokens > 1:
                prefill.append(row)
                self.block_manager.plan_state(row.sequence, row.start, row.start + row.num_tokens)
                continue
            at = num_logits if row.num_logits else len(decoding)
            num_logits += row.num_logits
            decoding.insert(at, row.sequence)
            starts.insert(at, row.start)
        return num_logits

    def take_late(self) -> list[tuple[int, TokenEvent]]:
        """Return (request id, event) of the sequences that `schedule` ended because of their deadline."""
        return self.admission.take_late()

    def start(self, output: SchedulerOutput) -> None:
        """Note that a step was launched on the device.

        Args:
            output: result of the latest `schedule`.
        """
        assert output is self._scheduled, "a step is started once, and only the latest one"
        self._scheduled = None
        self._started.append(output)
        self._charges.start(self._idle)
        decode = output.decode
        sequences = decode.batch.sequences
        for sequence, start in zip(sequences, decode.starts, strict=True):
            if sequence.status is RUNNING:
                sequence.num_computed_tokens = start + 1
                sequence.num_tokens_in_flight += 1
        for sequence in sequences[decode.num_sampling :]:
            if sequence.status is RUNNING:
                sequence.num_tokens_in_flight -= 1
        if decode.drafts is not None:
            for sequence, draft in zip(sequences, decode.drafts, strict=True):
                if sequence.status is RUNNING:
                    sequence.num_computed_tokens += len(draft)
                    sequence.num_tokens_in_flight += len(draft)
            self.drafts.note_drafts(sequences, decode.drafts)
        for row in output.prefill:
            sequence = row.sequence
            if sequence.status is RUNNING:
                sequence.num_computed_tokens = row.start + row.num_tokens
                sequence.num_tokens_in_flight += row.num_logits
        if self.block_manager.slots is not None:
            self._advance_states(output)

    def commit(
        self, output: SchedulerOutput, sampled: SampledRows, device_seconds: float = 0.0
    ) -> StepEvents:
        """Enter the results of a step.

        Args:
            output: the earliest started step that has not ended.
            sampled: the tokens that continue the sequences: one for each row of logits of the decode rows, of which
                those are kept up to the first that is not the draft's; and for a prefill row at most as many as its
                `num_logits`. Tokens that were proposed and are not kept count as not computed.
            device_seconds: time that the step took on the device.

        Returns:
            An event for every token and every sequence that ended, in the order of rows, those of failures last.
            A result with an error ends its sequence and removes the sequence's blocks from the prefix cache.
        """
        counts = [row.num_logits for row in output.prefill]
        results = sampled.prefill
        assert len(sampled.token_ids) == output.decode.num_logits, "a token for each row of logits"
        assert len(counts) == len(results), f"{len(results)} results of {len(counts)} rows"
        assert all(bool(n) >= bool(r) and n >= len(r) for n, r in zip(counts, results, strict=True))
        self._begin_end(output, device_seconds)
        events = self._results.enter(output, sampled)
        self._complete_end(output, device_seconds)
        if not output.prefill:
            self.drafts.note_step(output.decode, device_seconds)
        return events

    @property
    def repeats_steps(self) -> bool:
        """Whether a step can be computed again: keys and values are written again, a state has been replaced."""
        return self.block_manager.slots is None

    @contextmanager
    def not_started(self, output: SchedulerOutput) -> Iterator[list[ScheduledSequence]]:
        """Return to the state in which a started step was launched, so that it can be computed again.

        The steps before it must have ended. Computing a step again writes the same keys and values to the same slots.

        Yields:
            The rows of the sequences that still own their blocks. The others have ended or were preempted meanwhile.
        """
        assert output is self._started[0], "an earlier step has not ended"
        rows = [
            row for row in chain(output.decode, output.prefill) if row.sequence.status is RUNNING
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
        self._begin_end(output, device_seconds)
        rows = chain(output.decode, output.prefill)
        events = self._results.enter_rows((row, results.get(row.sequence, ())) for row in rows)
        self._complete_end(output, device_seconds)
        return events

    def begin_again(
        self, output: SchedulerOutput, error: str, device_seconds: float = 0.0, *, is_cause: bool
    ) -> StepEvents:
        """Enter a step that failed and cannot be computed again: all running sequences are preempted.

        One that is known to make steps fail ends instead; see `Suspects`.

        Args:
            output: see `commit`.
            error: of a sequence that ends.
            device_seconds: see `commit`.
            is_cause: whether the step failed by itself, and not because it was launched on the results of one that did.

        Returns:
            See `commit`.
        """
        assert output is self._started[0], "steps end in the order in which they were started"
        sequences = [row.sequence for row in chain(output.decode, output.prefill)]
        running = [it for it in sequences if it.status is RUNNING]
        culprit = self._live.suspects.note_failure(running) if is_cause and running else None
        for row in chain.from_iterable(it.decode for it in self._started):
            if row.draft and row.sequence.status is RUNNING:  # it may be wrong
                row.sequence.num_computed_tokens -= len(row.draft)
        for sequence in self._live.running:  # which becomes another list
            if sequence is not culprit:
                self._live.preempt(sequence)
        for sequence in sequences:
            if sequence.finish_reason is None and sequence is not culprit:
                self._charges.preempt(sequence)
        self._decode_batch = NO_ROWS.batch
        results = {} if culprit is None else {culprit: [FailedResult(error)]}
        return self.commit_parts(output, results, device_seconds)

    def fail(self, output: SchedulerOutput, error: str, device_seconds: float = 0.0) -> StepEvents:
        """End the sequences of a failed step with an error, and remove their blocks from the prefix cache.

        Returns:
            See `commit`.
        """
        failed = [FailedResult(error)]
        self._begin_end(output, device_seconds)
        rows = chain(output.decode, output.prefill)
        events = self._results.enter_rows((row, failed) for row in rows)
        self._complete_end(output, device_seconds)
        return events

    def _advance_states(self, output: SchedulerOutput) -> None:
        """Note which slots the next steps of the sequences of a launched step read and write."""
        decode, moved, advance = output.decode, False, self.block_manager.advance_state
        for sequence, start in zip(decode.batch.sequences, decode.starts, strict=True):
            held = sequence.slots
            if held is not None and (held.cuts or held.planned or held.read != held.write):
                moved |= advance(sequence, start + 1)
        for row in output.prefill:
            advance(row.sequence, row.start + row.num_tokens)
        if moved:  # the rows of a batch keep their slots
            self._decode_batch = NO_ROWS.batch

    def _begin_end(self, output: SchedulerOutput, device_seconds: float) -> None:
        """Take the earliest started step, and charge it."""
        assert self._started, "a step ends once, and after it was started"
        assert output is self._started[0], "steps end in the order in which they were started"
        self._started.popleft()
        self._charges.charge(output, device_seconds)

    def _complete_end(self, output: SchedulerOutput, device_seconds: float) -> None:
        """Update the rates after the results of all rows."""
        self._charges.note_first_tokens()
        if self._live.suspects:
            self._live.suspects.clear_advanced()
        if self._is_full:
            self.output_rate.add(self.num_generated_tokens - self._num_counted, device_seconds)
        self._num_counted = self.num_generated_tokens
        if output.num_tokens >= self.config.max_num_batched_tokens and output.prefill:
            self.prompt_rate.add(output.num_tokens - output.decode.num_tokens, device_seconds)

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
        """Assert the invariants of the sequences and their blocks. Slow: for tests and idle times."""
        self._live.check_invariants(self._started)

    @property
    def expects_drafts(self) -> bool:
        """Whether the next step will probably have drafts, once the tokens in flight are known."""
        return self.drafts.expects(self._decode_batch.sequences)

    def _decode_rows(
        self, sequences: list[Sequence], starts: list[int], num_sampling: int, *, drafts: bool
    ) -> DecodeRows:
        """Return the decode rows of a step; with `drafts`, some may have one."""
        if self._results.renews_batch or sequences != self._decode_batch.sequences:
            self._results.renews_batch = False
            self._decode_batch = DecodeBatch(sequences)
            self.drafts.forget_ended()
        found = None
        # A sequence that does not sample may make the step deterministic.
        if drafts and (self._decode_batch.deterministic or num_sampling == len(sequences)):
            found = self._draft(sequences, num_sampling)
        if found is not None:
            found += [()] * (len(sequences) - num_sampling)
        return DecodeRows(self._decode_batch, starts, num_sampling, found)

    def _draft(self, sequences: list[Sequence], num_sampling: int) -> list[tuple[int, ...]] | None:
        """Return the drafts of the rows that sample, with blocks and slots for their tokens; None if none has one.

        No sequence is preempted for a draft, and the last blocks are left for tokens that are sure.
        """
        drafts = self.drafts.choose(sequences, num_sampling)
        if drafts is None:
            return None
        manager = self.block_manager
        for row, draft in enumerate(drafts):
            if not draft:
                continue
            sequence = sequences[row]
            count = manager.lend_for_draft(sequence, self._reserve_for_draft(sequence, len(draft)))
            drafts[row] = draft[:count]
        return drafts if any(drafts) else None

    def _reserve_for_draft(self, sequence: Sequence, count: int) -> int:
        """Allocate blocks for a draft of `count` tokens; return for how many of them there are blocks."""
        manager, num_blocks = self.block_manager, len(sequence.block_table)
        stop = len(sequence.token_ids) + count
        if stop <= num_blocks * manager.block_size:
            return count
        is_short = manager.num_free_blocks <= len(self._live.running)
        if is_short or not manager.grow(sequence, stop):
            return num_blocks * manager.block_size - len(sequence.token_ids)
        self.accounting.allocate(sequence.account, len(sequence.block_table) - num_blocks)
        return count

    def _return_slots(self) -> None:
        """Release the slots for the drafts of a scheduled step that was not launched."""
        if self._scheduled is not None and self._scheduled.decode.drafts is not None:
            for sequence in self._scheduled.decode.batch.sequences:
                self.block_manager.lend_for_draft(sequence, 0)

    def _reserve_blocks(self, sequence: Sequence, num_tokens: int, preempted: list[int]) -> bool:
        """Allocate blocks for `num_tokens` tokens of a running sequence, and preempt it or later ones if necessary.

        Returns:
            False if the sequence was itself preempted.
        """
        num_blocks = len(sequence.block_table)
        while not self.block_manager.grow(sequence, num_tokens):
            victim = self._shares.last_of_heaviest(sequence)
            self._live.preempt(victim)
            self._note_preemption(victim, preempted)
            if victim is sequence:
                return False
        self.accounting.allocate(sequence.account, len(sequence.block_table) - num_blocks)
        return True

    def _apply_shares(self, preempted: list[int]) -> None:
        """Preempt and admit sequences so that each client has its share."""
        excess = self._short_steps.begin()
        for victim in excess:
            self._live.preempt(victim)
        for victim in (*excess, *self._shares.admit()):
            self._note_preemption(victim, preempted)

    def _note_preemption(self, victim: Sequence, preempted: list[int]) -> None:
        if self._started:
            self._charges.preempt(victim)
        preempted.append(victim.request_id)
