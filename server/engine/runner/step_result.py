"""What a step leaves, and how the host waits for it: tokens that the sampler draws or that a recording has chosen.

Knows tokens on their way to the host, nothing of how they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from model.device.transfer import Download
from model.sampling.parameters import NOT_FINITE, SampledToken

if TYPE_CHECKING:
    from model.sampling.sampler import PendingTokens
    from server.engine.runner.step_graph import Computed


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens `start + 1 ...`, computed by one chunk."""

    start: int
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed.

    Attributes:
        sampled: one for each scheduled sequence that samples, in the scheduler's order.
        prompt_logprobs: by request id, for sequences that ask for them.
    """

    sampled: list[SampledToken]
    prompt_logprobs: dict[int, PromptLogprobs]


class PendingStep(Protocol):
    """A step that the device has been given."""

    @property
    def feeds_next(self) -> bool:
        """Whether the step behind it can be launched before its results are there."""

    def result(self) -> StepResult:
        """Wait for what it computes."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step whose tokens the sampler draws."""

    draw: PendingTokens | None
    prompt_logprobs: dict[int, PromptLogprobs]
    feeds_next: bool

    def result(self) -> StepResult:
        """Wait for the draw."""
        return StepResult([] if self.draw is None else self.draw.result(), self.prompt_logprobs)


@dataclass(frozen=True, slots=True)
class MostLikely:
    """A step whose recording has chosen the tokens.

    Attributes:
        tokens: of its recordings.
        logprobs: theirs, where any row asks.
        wanted: whether each row asks.
    """

    tokens: list[Download]
    logprobs: list[Download]
    wanted: list[bool]
    feeds_next: bool = True

    def result(self) -> StepResult:
        """Wait for the tokens."""
        tokens: list[int] = [token for part in self.tokens for token in part.read().tolist()]
        logprobs: list[float | None] = [None] * len(tokens)
        if self.logprobs:
            found = [value for part in self.logprobs for value in part.read().tolist()]
            logprobs = [
                value if wanted else None for value, wanted in zip(found, self.wanted, strict=True)
            ]
        sampled = [
            SampledToken(token, logprob) if token >= 0 else SampledToken(error=NOT_FINITE)
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        return StepResult(sampled, {})


def most_likely(computed: list[Computed], wanted: list[bool]) -> MostLikely:
    """Send the host what recordings have chosen, with log-probabilities where a row wants its own."""
    logprobs = []
    if any(wanted):
        logprobs = [Download(part.logprobs) for part in computed]
    return MostLikely([Download(part.tokens) for part in computed], logprobs, wanted)
