"""The records between scheduler, model runner and sampler: what a step computes, and what it sampled."""

from __future__ import annotations

from collections.abc import Sequence as TypingSequence
from typing import Protocol

import msgspec

from server.engine.core.sequence import Sequence


class SampledResult(Protocol):
    """What the sampler says about one row."""

    @property
    def token_id(self) -> int | None:
        """The token; without meaning where `error` is set."""

    @property
    def logprob(self) -> float | None:
        """Natural logarithm of its probability, where asked for."""

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """(token id, log-probability), most likely first."""

    @property
    def error(self) -> str | None:
        """Why no token could be sampled; None where one was."""


class ScheduledSequence(msgspec.Struct, frozen=True):
    """One sequence's part of a step: its tokens `start .. start + num_tokens`.

    Attributes:
        sequence: whose tokens.
        start: the first token's position; equals `sequence.num_computed_tokens`.
        num_tokens: at least 1.
        num_logits: rows of logits, those of its last tokens: 0 where the step ends before the last known token, 1 to
            sample the next one, more to verify proposed tokens.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_logits: int


class SchedulerOutput(msgspec.Struct, frozen=True):
    """What one step computes. Rows of the batch are `decode` first, then `prefill`.

    Attributes:
        step: number of this step.
        decode: sequences with exactly one token.
        prefill: sequences with two tokens or more.
        num_tokens: tokens in all; 0 when there is nothing to do.
        first_scheduled: sequences that no earlier step computed anything of.
        preempted: ids of the sequences that lost their blocks in this call.
    """

    step: int
    decode: tuple[ScheduledSequence, ...]
    prefill: tuple[ScheduledSequence, ...]
    num_tokens: int
    first_scheduled: tuple[Sequence, ...]
    preempted: tuple[int, ...]


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the prompt tokens that follow a chunk's tokens.

    Attributes:
        start: position of the chunk's first token.
        logprobs: natural, of tokens `start + 1 ...`.
    """

    start: int
    logprobs: list[float]


class StepResult(msgspec.Struct, frozen=True):
    """What a step computed.

    Attributes:
        sampled: a list for each scheduled sequence, decode rows first: a token for each row of its logits.
        prompt_logprobs: by request id, for sequences that ask for them.
    """

    sampled: TypingSequence[TypingSequence[SampledResult]]
    prompt_logprobs: dict[int, PromptLogprobs]


class PendingStep(Protocol):
    """A step that the device has been given."""

    @property
    def feeds_next(self) -> bool:
        """Whether the step behind it can be launched before its results are there."""

    def result(self) -> StepResult:
        """Wait for what it computes."""


class StepRunner(Protocol):
    """Computes steps; `server.engine.runner.model_runner.ModelRunner` is the one that does so on a device."""

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Have a step computed, without waiting for it."""

    def forget(self, request_id: int) -> None:
        """Drop what is kept for a sequence that ended; an unknown id is ignored."""

    def recover(self, error: Exception) -> bool:
        """Return whether later steps can succeed after one that raised."""

    def use_idle_time(self) -> bool:
        """Work ahead for a while; return whether there was anything to do."""
