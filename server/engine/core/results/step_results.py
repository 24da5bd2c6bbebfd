"""Enters the results of a step into its sequences."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from server.engine.core.queue.live_sequences import RUNNING, LiveSequences
from server.engine.core.request import FinishReason, TokenEvent
from server.engine.core.results.step_events import StepEvents
from server.engine.core.results.token_events import (
    append_forced,
    append_sampled,
    leading,
    void_results_in_flight,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as TypingSequence

    from server.engine.core.accounting import Accounting
    from server.engine.core.memory.block_manager import BlockManager
    from server.engine.core.sequence import Sequence
    from server.engine.core.step import (
        DecodeRows,
        SampledResult,
        SampledRows,
        ScheduledSequence,
        SchedulerOutput,
    )


class StepResults:
    """Appends tokens to sequences, caches the blocks that they fill, and ends those that are complete or failed.

    Part of the scheduler. Most decode rows only append their token, or also fill a block; `Sequence.check_at` says
    which. They take a shorter way than the other rows.

    Attributes:
        num_generated_tokens: tokens entered.
        renews_batch: whether the rows of the last batch are not as they were, since the scheduler last set it to False:
            a forced token took the position of a result in flight, or a state is in another slot.
    """

    def __init__(
        self, live: LiveSequences, block_manager: BlockManager, accounting: Accounting
    ) -> None:
        self.num_generated_tokens = 0
        self.renews_batch = False
        self._live, self._block_manager, self._accounting = live, block_manager, accounting
        self._block_size = block_manager.block_size

    def enter(self, output: SchedulerOutput, sampled: SampledRows) -> StepEvents:
        """Enter the results of a whole step; return its events, in the order of rows, those of failures last."""
        events, failures = StepEvents(), StepEvents()
        self._enter_decode(output.decode, sampled, events, failures)
        for row, tokens in zip(output.prefill, sampled.prefill, strict=True):
            self._enter_row(row, tokens, events, failures)
        return self._complete(events, failures)

    def enter_rows(
        self, rows: Iterable[tuple[ScheduledSequence, TypingSequence[SampledResult]]]
    ) -> StepEvents:
        """Enter the results of a step, which are given by row; return its events as `enter` does."""
        events, failures = StepEvents(), StepEvents()
        for row, tokens in rows:
            self._enter_row(row, tokens, events, failures)
        return self._complete(events, failures)

    def _complete(self, events: StepEvents, failures: StepEvents) -> StepEvents:
        self.num_generated_tokens += len(events)
        for request_id, event in failures:
            events.add(request_id, event)
        if events.ended:
            self._live.drop_finished()
        return events

    def _enter_decode(
        self, decode: DecodeRows, sampled: SampledRows, events: StepEvents, failures: StepEvents
    ) -> None:
        """Enter the results of the decode rows."""
        if decode.drafts is not None:
            counts = [row.num_logits for row in decode]
            for drafted, results in zip(decode, sampled.by_row(counts), strict=False):
                self._enter_row(drafted, results, events, failures)
            return
        sequences, request_ids = decode.batch.sequences, decode.batch.request_ids
        token_ids, logprobs = sampled.token_ids, sampled.logprobs
        others: list[int] = []
        # Stops at the rows without logits.
        rows = zip(range(len(token_ids)), sequences, token_ids, strict=False)
        for row, sequence, token_id in rows:
            known = sequence.token_ids
            if token_id < 0 or token_id in sequence.end_token_ids:
                others.append(row)
            elif len(known) < sequence.check_at and sequence.matcher is None:
                known.append(token_id)
                sequence.num_tokens_in_flight -= 1
            elif (
                sequence.check_at
                and len(known) < sequence.max_num_tokens - 1
                and (sequence.matcher is None or sequence.matcher.continues_after(token_id))
            ):
                known.append(token_id)
                sequence.num_tokens_in_flight -= 1
                if len(known) > sequence.check_at:
                    self._block_manager.cache_full_blocks(sequence, len(known) - 1)
                    self._set_check(sequence)
            else:
                others.append(row)
        first = 0
        for row in others:
            if first < row:
                events.add_tokens(request_ids, token_ids, logprobs, first, row)
            first = row + 1
            self._enter_row(decode[row], (sampled.result(row),), events, failures)
        if first < len(token_ids):
            events.add_tokens(request_ids, token_ids, logprobs, first, len(token_ids))
        for row in range(len(token_ids), len(decode)):
            self._enter_row(decode[row], (), events, failures)

    def _enter_row(
        self,
        row: ScheduledSequence,
        sampled: TypingSequence[SampledResult],
        events: StepEvents,
        failures: StepEvents,
    ) -> None:
        """Enter the result of one row; add the events of its tokens, and that of its failure if it fails."""
        sequence, num_logits = row.sequence, row.num_logits
        if sequence.finish_reason is not None:
            self._accounting.charge_ended(sequence.finish_reason, row.num_tokens)
            return
        if self._enter_followed(row, sampled, events):
            return
        sequence.num_tokens_in_flight -= num_logits
        if row.draft:
            sampled = leading(sampled, row.draft)
        num_known = len(sequence.token_ids)
        reason = append_sampled(sequence, sampled, events)
        self._note_draft(row, num_known, failed=reason is FinishReason.ERROR)
        if reason is not FinishReason.ERROR:
            num_rejected = num_logits - (len(sequence.token_ids) - num_known)
            self._reject(row, num_rejected)
            stop = row.start + row.num_tokens - num_rejected
            if stop // self._block_size > sequence.num_linked_blocks:
                self._cache_blocks(sequence, stop)
            if reason is None and sampled and sequence.sampling.skips_forced_tokens:
                reason = append_forced(sequence, events)
                if sequence.num_void_results:
                    self.renews_batch = True
            if reason is None:
                self._set_check(sequence)
                return
        if reason is FinishReason.ERROR:
            failures.add(sequence.request_id, self._fail(sequence))
        elif reason is not None:
            self._live.finish(sequence, reason)
            assert sequence.usage is not None
            events.usage[len(events) - 1] = sequence.usage

    def _reject(self, row: ScheduledSequence, num_rejected: int) -> None:
        """Let a sequence go on before the last tokens of its row, which do not follow those that it has."""
        sequence = row.sequence
        if sequence.status is not RUNNING:
            return
        sequence.num_computed_tokens -= num_rejected
        if row.draft:
            count = len(row.draft) - num_rejected
            self.renews_batch |= self._block_manager.accept_draft(sequence, count)

    def _note_draft(self, row: ScheduledSequence, num_known: int, *, failed: bool) -> None:
        """Count the tokens of a row's draft that its sequence, which had `num_known` tokens, has now.

        None is computed again for a sequence that has failed.
        """
        if row.draft:
            sampled = row.sequence.token_ids[num_known:]
            num_accepted = sum(map(operator.eq, sampled, row.draft))
            count = len(row.draft)
            # The sequence's own token is computed, though it may have no result and be computed again.
            num_dropped = 0 if failed else count + 1 - max(1, len(sampled))
            self._accounting.note_draft(row.sequence.account, count, num_accepted, num_dropped)

    def _enter_followed(
        self,
        row: ScheduledSequence,
        sampled: TypingSequence[SampledResult],
        events: StepEvents,
    ) -> bool:
        """Enter a result that is void, or a token and those that its grammar has followed if none ends the sequence.

        Returns:
            Whether it did; otherwise nothing has changed.
        """
        sequence = row.sequence
        if sequence.num_void_results and row.num_logits and not (sampled and sampled[0].error):
            sequence.num_void_results -= 1
            self._cache_blocks(sequence, row.start + row.num_tokens)
            self._set_check(sequence)
            return True
        if sequence.matcher is None or len(sampled) != 1 or row.num_logits != 1:
            return False
        if sequence.is_expired:
            return False
        token_id, known = sampled[0].token_id, sequence.token_ids
        if token_id is None or sampled[0].error is not None or sampled[0].top:
            return False
        most = sequence.max_num_tokens - len(known) - 1
        tokens = sequence.matcher.take_ahead(token_id, most, sequence.end_token_ids)
        if tokens is None:
            return False
        known += tokens
        sequence.num_tokens_in_flight -= 1
        events.add_run(sequence.request_id, tokens, sampled[0].logprob)
        stop = row.start + row.num_tokens
        if stop // self._block_size > sequence.num_linked_blocks:
            self._cache_blocks(sequence, stop)
        if len(tokens) > 1 and sequence.num_tokens_in_flight:
            void_results_in_flight(sequence)
            self.renews_batch = True
        self._set_check(sequence)
        return True

    def _set_check(self, sequence: Sequence) -> None:
        """Set the number of tokens from which on a row of a sequence needs more than its token; see `_enter_decode`."""
        if sequence.status is not RUNNING or sequence.num_void_results or sequence.is_expired:
            return
        stop = sequence.max_num_tokens - 1
        if self._block_manager.caches_output:
            stop = min(stop, (sequence.num_linked_blocks + 1) * self._block_size)
        sequence.check_at = stop

    def _cache_blocks(self, sequence: Sequence, stop: int) -> None:
        """Cache the full blocks of a sequence, whose first `stop` tokens are computed."""
        # A sequence that was preempted meanwhile keeps its tokens but has no block to cache.
        if sequence.status is RUNNING:
            self._block_manager.cache_full_blocks(sequence, stop)

    def _fail(self, sequence: Sequence) -> TokenEvent:
        """End a sequence with its error; return the event for the client."""
        assert sequence.error is not None
        self._live.finish(sequence, FinishReason.ERROR)
        return TokenEvent(
            token_id=None,
            finish_reason=FinishReason.ERROR,
            error=sequence.error,
            usage=sequence.usage,
        )
