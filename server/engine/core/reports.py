"""The engine's reports to the front ends: the message of a step, and the statistics that some of them carry."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import msgspec

from server.engine.core.messages import EngineStats, EngineTotals, StepMessage, encode_totals
from server.engine.core.queue.length_counts import LengthCounts
from server.standard_error import num_dropped_lines

if TYPE_CHECKING:
    from collections.abc import Sized

    from server.engine.core.adapter_pool import AdapterPool
    from server.engine.core.messages import SequenceStarted
    from server.engine.core.results.step_events import StepEvents
    from server.engine.core.schedule.scheduler import Scheduler
    from server.engine.core.step import PromptLogprobs

_STATS_SECONDS: Final = 0.002
"""Time between two messages with stats while no sequence starts or ends: they take 5 us, 3 % of a fast model's step."""
_TOTALS_SECONDS: Final = 0.1
"""Time between two encodings of `EngineTotals`, which takes 5 us."""


def step_message(
    events: StepEvents,
    started: list[SequenceStarted],
    prompt_logprobs: dict[int, PromptLogprobs],
    stats: StatsReporter,
) -> StepMessage:
    """Make one message for all sequences of a step.

    Args:
        events: of the step.
        started: the sequences that were scheduled for the first time.
        prompt_logprobs: of the prompts that the step completed, by request id.
        stats: of the engine; the message carries them if they are due, as when a sequence starts or ends.
    """
    return StepMessage(
        request_ids=events.request_ids,
        token_ids=events.token_ids,
        finish_reasons=events.finish_reasons,
        stats=stats.newest(is_due=not events.request_ids or bool(started) or bool(events.ended)),
        started=started,
        logprobs=events.logprobs,
        top_tokens=events.top_tokens,
        errors=events.errors,
        usage=events.usage,
        prompt_logprobs={i: prompt.logprobs for i, prompt in prompt_logprobs.items()},
        prompt_top_tokens={
            i: prompt.top_tokens for i, prompt in prompt_logprobs.items() if prompt.top_tokens
        },
    )


class StatsReporter:
    """Reads the gauges and counters of an engine, and decides which messages carry them.

    Attributes:
        num_failed_steps: steps so far that had to be computed again.
        num_invariant_violations: contradictions in the bookkeeping that idle checks have found.

    Args:
        scheduler: of the engine.
        compiling: the sequences whose grammar is compiled, which wait as well.
        engine: number of the engine among those of the service.
        adapters: of the engine, for which sequences wait too; None if it takes none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        compiling: Sized,
        engine: int,
        adapters: AdapterPool | None = None,
    ) -> None:
        self._engine = engine
        self.num_failed_steps = 0
        self.num_invariant_violations = 0
        self._scheduler = scheduler
        self._compiling = compiling
        self._adapters = adapters
        self._stats_due = -math.inf
        self._totals_due = -math.inf
        self._encoded_totals = msgspec.Raw()

    def newest(self, *, is_due: bool) -> EngineStats | None:
        """Return the current stats if they are due for another reason or because of their age, else None."""
        now = self._scheduler.accounting.now
        if not is_due and now < self._stats_due:
            return None
        self._stats_due = now + _STATS_SECONDS
        return self.read()

    def read(self) -> EngineStats:
        """Return the current gauges and counters."""
        scheduler, blocks = self._scheduler, self._scheduler.block_manager
        accounting, waiting = scheduler.accounting, self._waiting()
        used, adapters = blocks.num_blocks - blocks.num_free_blocks, self._adapters
        num_waiting = scheduler.num_waiting + len(self._compiling)
        others: dict[str, Any] = {}
        if (slots := blocks.slots) is not None:
            others = {
                "num_snapshots": slots.num_snapshots,
                "num_snapshot_hits": slots.num_hits,
                "num_snapshots_taken": slots.num_taken,
                "num_snapshots_evicted": slots.num_evicted,
            }
        if adapters is not None:
            num_waiting += len(adapters)
            others |= {
                "running_adapters": adapters.running,
                "waiting_adapters": adapters.waiting,
                "num_waiting_for_slots": len(adapters) if adapters.is_full else 0,
                "num_adapter_reads": adapters.num_reads,
                "num_adapter_loads": adapters.num_writes,
                "num_adapter_evictions": adapters.num_evictions,
            }
        return EngineStats(
            engine=self._engine,
            num_running=scheduler.num_running,
            num_waiting=num_waiting,
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free_blocks,
            num_cached_blocks=blocks.num_idle_blocks,
            kv_usage=used / blocks.num_blocks,
            prefix_cache_query_tokens=scheduler.admission.prefix_cache_query_tokens,
            prefix_cache_hit_tokens=scheduler.admission.prefix_cache_hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.admission.num_prompt_tokens,
            generation_tokens=scheduler.num_generated_tokens,
            num_steps=scheduler.num_steps,
            num_failed_steps=self.num_failed_steps,
            num_invariant_violations=self.num_invariant_violations,
            num_log_lines_dropped=num_dropped_lines(),
            num_reserved_tokens=accounting.num_reserved_tokens,
            num_free_places=scheduler.num_free_places,
            num_prefill_tokens=scheduler.num_prefill_tokens,
            waiting_by_length=waiting.sequences if waiting else [],
            waiting_tokens_by_length=waiting.tokens if waiting else [],
            waiting_output_by_length=waiting.output if waiting else [],
            prompt_rate=scheduler.prompt_rate.value,
            output_rate=scheduler.output_rate.value,
            output_means=list(scheduler.output_means),
            computed_tokens=accounting.num_computed_tokens,
            computed_prompt_tokens=accounting.num_computed_prompt_tokens,
            recomputed_tokens=accounting.num_recomputed_tokens,
            num_drafts=accounting.num_drafts,
            num_draft_tokens=accounting.num_draft_tokens,
            num_accepted_tokens=sum(accounting.num_accepted_tokens),
            prefill_seconds=accounting.prefill_steps.seconds,
            decode_seconds=accounting.decode_steps.seconds,
            block_seconds=accounting.block_seconds,
            totals=self._totals(),
            **others,
        )

    def _waiting(self) -> LengthCounts | None:
        """Return copies of the counts of what waits for a place or for an adapter; None if nothing does."""
        queued, adapters = self._scheduler.waiting, self._adapters
        if adapters:
            return queued.by_length.plus(adapters.by_length)
        return LengthCounts(*map(list, queued.by_length)) if queued else None

    def _totals(self) -> msgspec.Raw:
        """Return the encoded totals, which are renewed after `_TOTALS_SECONDS` or when there is no work left."""
        accounting = self._scheduler.accounting
        has_work = self._scheduler.has_work or len(self._compiling)
        if accounting.now >= self._totals_due or not has_work:
            self._totals_due = accounting.now + _TOTALS_SECONDS
            self._encoded_totals = encode_totals(
                EngineTotals(
                    accounting.prefill_steps.counts,
                    accounting.decode_steps.counts,
                    accounting.num_ended,
                    accounting.ended_device_seconds,
                    accounting.ended_block_seconds,
                    accounting.num_accepted_tokens,
                )
            )
        return self._encoded_totals
