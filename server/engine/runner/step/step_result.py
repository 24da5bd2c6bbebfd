"""Pending results of a step, and how the host waits for them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from model.device.transfer import Download
from model.sampling.parameters import NOT_FINITE, SampledToken
from server.engine.core.step import SampledRows, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from model.executors.step import StepOutput
    from model.sampling.sampler import PendingTokens
    from server.engine.core.step import DecodeRows, PromptLogprobs, ScheduledSequence


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A step whose tokens come from the sampler, or that samples none.

    Attributes:
        tokens: the sampler's pending tokens; None if the step has no logits.
        num_decode: rows of logits of decode rows.
        num_logits: rows of logits of each prefill row.
        prompt_logprobs: see `StepResult`.
        feeds_next: see `PendingStep`.
        errors: why rows of logits have no token; by row, in place of the sampler's result.
        advance: given the tokens of the rows of logits, lets grammars follow them; None if there are none.
    """

    tokens: PendingTokens | None
    num_decode: int
    num_logits: list[int]
    prompt_logprobs: dict[int, PromptLogprobs]
    feeds_next: bool
    errors: Mapping[int, str] = field(default_factory=dict)
    advance: Callable[[list[SampledToken]], None] | None = None

    def sample(self) -> None:
        """Do nothing: the sampler has started."""

    @torch.inference_mode()
    def result(self) -> StepResult:
        """Wait for the tokens."""
        tokens = [] if self.tokens is None else self.tokens.result()
        for row, error in self.errors.items():
            tokens[row] = SampledToken(error=error)
        if self.advance is not None:
            self.advance(tokens)
        count = self.num_decode
        sampled = SampledRows.of(tokens[:count], _split(tokens[count:], self.num_logits))
        return StepResult(sampled, self.prompt_logprobs)


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


def suffices(outputs: Sequence[StepOutput], *, logprobs: bool) -> bool:
    """Return whether the forward pass computed all results that greedy sequences need.

    Args:
        outputs: results of the step's parts.
        logprobs: whether a sequence reports log-probabilities.
    """
    return all(
        part.tokens is not None and (part.logprobs is not None or not logprobs) for part in outputs
    )


class GreedyStep:
    """A step whose forward pass also computed the tokens, the argmax of each row.

    Args:
        outputs: results of the step's parts; `tokens` is set in each.
        decode, prefill: the step's sequences, in the order of their rows.
        logprobs: whether a sequence reports log-probabilities.
    """

    def __init__(
        self,
        outputs: Sequence[StepOutput],
        decode: DecodeRows,
        prefill: Sequence[ScheduledSequence],
        *,
        logprobs: bool,
    ) -> None:
        self.feeds_next = decode.drafts is None
        self._num_decode = decode.num_logits
        self._num_logits = [s.num_logits for s in prefill]
        self._tokens = [Download(part.tokens) for part in outputs if part.tokens is not None]
        self._logprobs: list[Download] = []
        self._wanted: list[bool] = []
        if logprobs:
            self._wanted = [it.sampling.logprobs for it in decode.sampling_sequences]
            self._wanted += [
                s.sequence.sampling.logprobs for s in prefill for _ in range(s.num_logits)
            ]
            found = (part.logprobs for part in outputs)
            self._logprobs = [Download(values) for values in found if values is not None]

    def sample(self) -> None:
        """Do nothing: the forward pass computes the tokens."""

    def result(self) -> StepResult:
        """Wait for the tokens."""
        tokens = _values(self._tokens)
        logprobs: dict[int, float] = {}
        if self._logprobs:
            pairs = enumerate(zip(_values(self._logprobs), self._wanted, strict=True))
            logprobs = {row: value for row, (value, wanted) in pairs if wanted}
        count = self._num_decode
        decoded = tokens[:count]
        failed = (
            [row for row, token in enumerate(decoded) if token < 0]
            if min(tokens, default=0) < 0
            else []
        )
        sampled = SampledRows(
            decoded,
            _split([_result(t, logprobs.get(row)) for row, t in enumerate(tokens[count:], count)], self._num_logits),
            {row: value for row, value in logprobs.items() if row < count},
            {row: SampledToken(error=NOT_FINITE) for row in failed},
        )  # fmt: skip
        return StepResult(sampled, {})


def _values(parts: list[Download]) -> list[Any]:
    """Wait for the results of a step's parts, and join them."""
    found = [part.read().numpy().tolist() for part in parts]
    return found[0] if len(found) == 1 else list(itertools.chain.from_iterable(found))


def _result(token: int, logprob: float | None) -> SampledToken:
    return SampledToken(token, logprob) if token >= 0 else SampledToken(error=NOT_FINITE)


def _split(tokens: list[SampledToken], counts: list[int]) -> list[list[SampledToken]]:
    """Group the tokens by sequence; `counts` is the number of rows of each sequence."""
    remaining = iter(tokens)
    return [list(itertools.islice(remaining, count)) for count in counts]
