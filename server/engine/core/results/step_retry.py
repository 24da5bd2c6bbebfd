"""Computes a failed step again in parts, so that only the sequences whose rows make it fail end with an error.

First the whole step: the cause may have been temporary, and the memory that other programs or earlier steps held may be
free now. A part that fails is divided into two, down to single rows. A step with one culprit among n sequences is thus
computed about 2 log2(n) times more, in ever smaller parts. That is safe since a step changes nothing but the slots of
its own tokens in the KV cache, to which it writes the same keys and values again. It is not safe where layers have a
state of fixed size, which the failed step may have replaced: all sequences of such a step begin again (`suspects`).
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from server.engine.core.step import DecodeRows, FailedResult, SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Sequence as TypingSequence

    from server.engine.core.progress import Progress
    from server.engine.core.sequence import Sequence
    from server.engine.core.step import (
        PromptLogprobs,
        SampledResult,
        ScheduledSequence,
        StepResult,
        StepRunner,
    )

log = logging.getLogger("tessera.engine")

STEP_FAILED: Final = "the forward pass failed"
OUT_OF_MEMORY: Final = "the memory of the device does not suffice for this request"

_RUNS_WITHOUT_SUCCESS: Final = 7
"""The whole step, its halves and its quarters: if all of them fail, the cause is not a single sequence."""


@dataclass
class RetriedStep:
    """The results of a step that was computed again.

    Attributes:
        results: by sequence, see `Scheduler.commit_parts`.
        prompt_logprobs: see `StepResult`.
        error: why no row could be computed, or why the device does not work any more; None if neither is so.
        is_broken: whether the device does not work any more.
    """

    results: dict[Sequence, TypingSequence[SampledResult]] = field(default_factory=dict)
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    error: Exception | None = None
    is_broken: bool = False


def retry_step(
    runner: StepRunner, step: int, rows: list[ScheduledSequence], progress: Progress | None = None
) -> RetriedStep:
    """Compute a step again, in parts where necessary. The device works.

    Args:
        runner: computes the parts and waits for each.
        step: number of the step.
        rows: see `Scheduler.not_started`.
        progress: each part counts as progress.

    Returns:
        The results of all rows. Every row has an error if no part could be computed.
    """
    retried = RetriedStep()
    parts = deque([rows] if rows else [])
    # Enough for two culprits. The rows that are left then fail together.
    most_runs = _RUNS_WITHOUT_SUCCESS + 4 * len(rows).bit_length()
    num_runs = num_computed = 0
    last_error = None
    while parts:
        part = parts.popleft()
        is_hopeless = num_runs >= (most_runs if num_computed else _RUNS_WITHOUT_SUCCESS)
        if retried.is_broken or is_hopeless:
            _fail(part, retried, STEP_FAILED)
            continue
        num_runs += 1
        if progress is not None:
            progress.count += 1
        try:
            result = _compute(runner, step, part)
        except Exception as error:
            last_error = error
            retried.is_broken = not runner.recover(error)
            if len(part) > 1:
                parts += [part[: len(part) // 2], part[len(part) // 2 :]]
                continue
            log.exception(
                "request %d makes its step fail and ends with an error", part[0].sequence.request_id
            )
            _fail(part, retried, error_text(error))
            continue
        num_computed += 1
        retried.prompt_logprobs |= result.prompt_logprobs
        counts = [row.num_logits for row in part if row.is_decode]
        for row, sampled in zip(part, result.sampled.by_row(counts), strict=True):
            retried.results[row.sequence] = sampled
    if retried.is_broken or not num_computed:
        retried.error = last_error
    return retried


def error_text(error: Exception | None) -> str:
    """Return what a client is told about an error of a step."""
    is_out_of_memory = isinstance(error, MemoryError) or "out of memory" in str(error)
    return OUT_OF_MEMORY if is_out_of_memory else STEP_FAILED


def _fail(rows: list[ScheduledSequence], retried: RetriedStep, reason: str) -> None:
    for row in rows:
        retried.results[row.sequence] = [FailedResult(reason)]


def _compute(runner: StepRunner, step: int, rows: list[ScheduledSequence]) -> StepResult:
    """Compute some rows of a step, in their order, and wait for the results."""
    part = SchedulerOutput(
        step=step,
        decode=DecodeRows.of(row for row in rows if row.is_decode),
        prefill=tuple(row for row in rows if not row.is_decode),
        num_tokens=sum(row.num_tokens for row in rows),
        first_scheduled=(),
        preempted=(),
    )
    pending = runner.launch(part)
    pending.sample()
    return pending.result()
