"""Pending results of a step, and how the host waits for them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from model.device.transfer import Download
from model.sampling.parameters import NOT_FINITE, SampledToken
from server.engine.core.step import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from model.network.step import StepOutput
    from model.sampling.sampler import PendingTokens
    from server.engine.core.step import PromptLogprobs, ScheduledSequence


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A step whose tokens come from the sampler, or that samples none.

    Attributes:
        tokens: the sampler's pending tokens; None if the step has no logits.
        num_logits: rows of logits of each scheduled sequence.
        prompt_logprobs: see `StepResult`.
        feeds_next: see `PendingStep`.
        errors: why rows of logits have no token; by row, in place of the sampler's result.
    """

    tokens: PendingTokens | None
    num_logits: list[int]
    prompt_logprobs: dict[int, PromptLogprobs]
    feeds_next: bool
    errors: Mapping[int, str] = field(default_factory=dict)

    def sample(self) -> None:
        """Do nothing: the sampler has started."""

    @torch.inference_mode()
    def result(self) -> StepResult:
        """Wait for the tokens. If the candidates of a row were too few, the sampler chooses its token again."""
        tokens = [] if self.tokens is None else self.tokens.result()
        for row, error in self.errors.items():
            tokens[row] = SampledToken(error=error)
        return StepResult(_split(tokens, self.num_logits), self.prompt_logprobs)


class WaitingStep:
    """A step of which some rows can be sampled only once the results of the step before are committed.

    The device computes it meanwhile.

    Args:
        start: starts the sampler.
    """

    def __init__(self, start: Callable[[], SampledStep]) -> None:
        self._start = start
        self._step: SampledStep | None = None

    @torch.inference_mode()
    def sample(self) -> None:
        """Start the sampler."""
        self._step = self._start()

    @property
    def feeds_next(self) -> bool:
        """See `PendingStep`."""
        assert self._step is not None, "`sample` was called"
        return self._step.feeds_next

    def result(self) -> StepResult:
        """Wait for the tokens."""
        assert self._step is not None, "`sample` was called"
        return self._step.result()


def suffices(outputs: Sequence[StepOutput], scheduled: Sequence[ScheduledSequence]) -> bool:
    """Return whether the forward pass computed all results that greedy sequences want."""
    wants_logprobs = any(s.sequence.sampling.logprobs for s in scheduled)
    return all(
        part.tokens is not None and (part.logprobs is not None or not wants_logprobs)
        for part in outputs
    )


class GreedyStep:
    """A step whose forward pass also computed the tokens, the argmax of each row.

    Args:
        outputs: results of the step's parts; `tokens` is set in each.
        scheduled: the step's sequences, in the order of their rows.
    """

    feeds_next = True

    def __init__(
        self, outputs: Sequence[StepOutput], scheduled: Sequence[ScheduledSequence]
    ) -> None:
        self._num_logits = [s.num_logits for s in scheduled]
        self._tokens = [Download(part.tokens) for part in outputs if part.tokens is not None]
        self._logprobs: list[Download] = []
        self._wanted: list[bool] = []
        if any(s.sequence.sampling.logprobs for s in scheduled):
            self._wanted = [
                s.sequence.sampling.logprobs for s in scheduled for _ in range(s.num_logits)
            ]
            found = (part.logprobs for part in outputs)
            self._logprobs = [Download(logprobs) for logprobs in found if logprobs is not None]

    def sample(self) -> None:
        """Do nothing: the forward pass computes the tokens."""

    def result(self) -> StepResult:
        """Wait for the tokens."""
        tokens: list[int] = [token for part in self._tokens for token in part.read().tolist()]
        logprobs: list[float | None] = [None] * len(tokens)
        if self._logprobs:
            found = [value for part in self._logprobs for value in part.read().tolist()]
            logprobs = [
                value if wanted else None for value, wanted in zip(found, self._wanted, strict=True)
            ]
        sampled = [
            SampledToken(token, logprob) if token >= 0 else SampledToken(error=NOT_FINITE)
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        return StepResult(_split(sampled, self._num_logits), {})


def _split(tokens: list[SampledToken], counts: list[int]) -> list[list[SampledToken]]:
    """Group the tokens by sequence; `counts` is the number of rows of each sequence."""
    remaining = iter(tokens)
    return [list(itertools.islice(remaining, count)) for count in counts]
