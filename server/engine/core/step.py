"""Records and interfaces between scheduler and model runner: the work of a step and its results."""

from __future__ import annotations

from collections.abc import Sequence as TypingSequence
from concurrent.futures import Future
from typing import Protocol

import msgspec

from server.engine.core.grammar import Matcher
from server.engine.core.sequence import Sequence


class SampledResult(Protocol):
    """The sampler's result for one row of logits."""

    @property
    def token_id(self) -> int | None:
        """The token id; ignored if `error` is set."""

    @property
    def logprob(self) -> float | None:
        """Natural logarithm of its probability, if requested."""

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """(token id, log-probability), most likely first."""

    @property
    def error(self) -> str | None:
        """Why no token could be sampled; None if one was."""


class FailedResult(msgspec.Struct, frozen=True):
    """The result of a row that could not be computed."""

    error: str
    token_id: None = None
    logprob: None = None
    top: tuple[()] = ()


class ScheduledSequence(msgspec.Struct, frozen=True):
    """One sequence's part of a step: its tokens `start .. start + num_tokens`.

    Attributes:
        sequence: the sequence.
        start: position of the first token; equals `sequence.num_computed_tokens`.
        num_tokens: at least 1.
        num_logits: number of the last tokens that get a row of logits: 0 if the step ends before the last known token,
            1 to sample the next token, more to verify proposed tokens.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_logits: int


class SchedulerOutput(msgspec.Struct, frozen=True):
    """The work of one step. The batch consists of the rows of `decode`, then those of `prefill`.

    Attributes:
        step: number of this step.
        decode: sequences with exactly one token, those without logits last.
        prefill: sequences with two tokens or more.
        num_tokens: total tokens; 0 if there is nothing to do.
        first_scheduled: sequences that are scheduled for the first time.
        preempted: request ids of the sequences that this step's scheduling preempted.
    """

    step: int
    decode: tuple[ScheduledSequence, ...]
    prefill: tuple[ScheduledSequence, ...]
    num_tokens: int
    first_scheduled: tuple[Sequence, ...]
    preempted: tuple[int, ...]


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the prompt tokens that follow each token of a chunk.

    Attributes:
        start: position of the chunk's first token.
        logprobs: natural logarithms, of the tokens from `start + 1` on.
        top_tokens: (token id, log-probability) of the most likely tokens at the same positions; empty if not requested.
    """

    start: int
    logprobs: list[float]
    top_tokens: list[list[tuple[int, float]]] = []


class StepResult(msgspec.Struct, frozen=True):
    """Results of a step.

    Attributes:
        sampled: one list per scheduled sequence, decode rows first, with one token per row of logits.
        prompt_logprobs: by request id, for sequences that requested them.
    """

    sampled: TypingSequence[TypingSequence[SampledResult]]
    prompt_logprobs: dict[int, PromptLogprobs]


class PendingStep(Protocol):
    """A step that was launched on the device."""

    def sample(self) -> None:
        """Start sampling, if that had to wait for the results of the step before; called once they are committed."""

    @property
    def feeds_next(self) -> bool:
        """Whether the next step can be launched before the results of this one are known; read after `sample`."""

    def result(self) -> StepResult:
        """Wait for the results."""


class StepRunner(Protocol):
    """Computes steps; implemented by `server.engine.runner.model_runner.ModelRunner`."""

    def compile_grammar(self, grammar: str) -> Future[Matcher]:
        """Start to compile a serialized grammar on another thread."""

    def launch(self, output: SchedulerOutput) -> PendingStep:
        """Start a step on the device without waiting for its results."""

    def forget(self, request_id: int) -> None:
        """Drop the state kept for a sequence that ended; unknown ids are ignored."""

    def recover(self, error: Exception) -> bool:
        """Clean up after a step that raised; return whether later steps can succeed."""

    def use_idle_time(self) -> bool:
        """Do one piece of preparatory work; return whether there was any to do."""
