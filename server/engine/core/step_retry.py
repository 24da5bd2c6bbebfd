"""Computes a failed step again in parts, so that only the sequences whose rows make it fail end with an error.

First the whole step: the cause may have been temporary, and the memory that other programs or earlier steps held may be
free now. A part that fails is divided into two, down to single rows. A step with one culprit among n sequences is thus
computed about 2 log2(n) times more, in ever smaller parts. That is safe since a step changes nothing but the slots of
its own tokens in the KV cache, to which it writes the same keys and values again.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from server.engine.core.step import SchedulerOutput

if TYPE_CHECKING:
    from collections.abc import Sequence as TypingSequence

    from server.engine.core.sequence import Sequence
    from server.engine.core.step import (
        PromptLogprobs,
        SampledResult,
        ScheduledSequence,
        StepResult,
        StepRunner,
    )

log = logging.getLogger("tessera.engine")

FORWARD_PASS_FAILED: Final = "the forward pass failed"
OUT_OF_MEMORY: Final = "the memory of the device does not suffice for this request"

_RUNS_WITHOUT_SUCCESS: Final = 7
"""The whole step, its halves and its quarters: if all of them fail, the cause is not a single sequence."""


@dataclass(frozen=True, slots=True)
class _Error:
    """The result of a row that cannot be computed."""

    error: str
    token_id: None = None
    logprob: None = None
    top: tuple[()] = ()


@dataclass
class RetriedStep:
    """The results of a step that was computed again.

    Attributes:
        results: by sequence, see `Scheduler.commit_parts`.
        prompt_logprobs: see `StepResult`.
        num_succeeded: parts that were computed.
        broken: the error after which the device does not work; None if it does.
    """

    results: dict[Sequence, TypingSequence[SampledResult]] = field(default_factory=dict)
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    num_succeeded: int = 0
    broken: Exception | None = None


def retry_step(runner: StepRunner, step: int, rows: list[ScheduledSequence]) -> RetriedStep:
    """Compute a step again, in parts where necessary. The device works.

    Args:
        runner: computes the parts and waits for each.
        step: number of the step.
        rows: see `Scheduler.not_started`.

    Returns:
        The results of all rows. Every row has an error if no part could be computed.
    """
    retried = RetriedStep()
    parts = deque([rows] if rows else [])
    # Two culprits at least; the rows of all parts that are left then fail together.
    num_left = _RUNS_WITHOUT_SUCCESS + 4 * len(rows).bit_length()
    num_runs = 0
    while parts:
        part = parts.popleft()
        reason = FORWARD_PASS_FAILED
        is_hopeless = num_runs >= _RUNS_WITHOUT_SUCCESS and not retried.num_succeeded
        if retried.broken is None and not is_hopeless and num_runs < num_left:
            num_runs += 1
            try:
                result = _compute(runner, step, part)
            except Exception as error:
                if isinstance(error, MemoryError) or "out of memory" in str(error):
                    reason = OUT_OF_MEMORY
                if not runner.recover(error):
                    retried.broken = error
                elif len(part) > 1:
                    parts += [part[: len(part) // 2], part[len(part) // 2 :]]
                    continue
                else:
                    log.error(  # noqa: TRY400 - one line; the first attempt had the traceback
                        "request %d makes a step fail and ends with an error: %s: %s",
                        part[0].sequence.request_id,
                        type(error).__name__,
                        error,
                    )
            else:
                retried.num_succeeded += 1
                retried.prompt_logprobs |= result.prompt_logprobs
                for row, sampled in zip(part, result.sampled, strict=True):
                    retried.results[row.sequence] = sampled
                continue
        for row in part:
            retried.results[row.sequence] = [_Error(reason)]
    return retried


def _compute(runner: StepRunner, step: int, rows: list[ScheduledSequence]) -> StepResult:
    """Compute some rows of a step, in their order, and wait for the results."""
    part = SchedulerOutput(
        step=step,
        decode=tuple(row for row in rows if row.num_tokens == 1),
        prefill=tuple(row for row in rows if row.num_tokens > 1),
        num_tokens=sum(row.num_tokens for row in rows),
        first_scheduled=(),
        preempted=(),
    )
    pending = runner.launch(part)
    pending.sample()
    return pending.result()
