"""Measures one request and counts it once, by its outcome."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from server.engine.core.request import FinishReason
from server.errors import (
    AbortedError,
    ClientError,
    DeadlineExceededError,
    OverloadedError,
    UnavailableError,
)
from server.http.body.request_body import ClientDisconnectedError
from server.http.metrics.specs import Outcome

if TYPE_CHECKING:
    from types import TracebackType

    from server.http.metrics.registry import Metrics
    from server.http.metrics.usage import RequestUsage

_SUCCESSES = {
    FinishReason.LENGTH: Outcome.LENGTH,
    FinishReason.EOS: Outcome.EOS_TOKEN,
    FinishReason.STOP: Outcome.STOP_SEQUENCE,
    FinishReason.TIMEOUT: Outcome.TIMEOUT,
}


class TokenClock:
    """Measures the waits between the tokens of one sequence."""

    __slots__ = ("_last", "_metrics", "_record")

    def __init__(self, metrics: Metrics, record: RequestRecord) -> None:
        self._metrics = metrics
        self._record = record
        self._last = 0.0

    def tokens(self, count: int, now: float) -> None:
        """Observe `count` tokens that arrived together, at `time.perf_counter()` == `now`."""
        if self._last:
            self._metrics.itl.observe((now - self._last) / count, count)
        else:
            self._record.observe_first_token(now)
        self._last = now


class RequestRecord:
    """Measures one request. As a context manager, it counts the request if an exception ends it.

    Only the first call of `finish` or `succeed` has an effect.

    Attributes:
        started: when the request was received, `time.perf_counter` seconds.
        first_token_seconds: time until the first token of its first sequence that had one; None before.
        outcome: how it ended; None before.
    """

    __slots__ = ("_endpoint", "_metrics", "first_token_seconds", "outcome", "started")

    def __init__(self, metrics: Metrics, endpoint: str) -> None:
        self.started = time.perf_counter()
        self._metrics = metrics
        self._endpoint = endpoint
        self.first_token_seconds: float | None = None
        self.outcome: Outcome | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.finish(outcome_of(error))

    def clock(self) -> TokenClock:
        """Make a clock for one of the request's sequences."""
        return TokenClock(self._metrics, self)

    def observe_first_token(self, now: float) -> None:
        """Observe the first token of one of the request's sequences, at `time.perf_counter()` == `now`."""
        seconds = now - self.started
        self._metrics.ttft.observe(seconds)
        if self.first_token_seconds is None:
            self.first_token_seconds = seconds

    def finish(self, outcome: Outcome) -> None:
        """Count the request."""
        if self.outcome is None:
            self.outcome = outcome
            self._metrics.count_request(self._endpoint, outcome)

    def succeed(
        self,
        reason: FinishReason | None,
        *,
        usage: RequestUsage,
        submitted: float,
        prompt_tokens: int,
        completion_tokens: int,
        longest: int,
        max_new_tokens: int,
    ) -> None:
        """Count a generation request that was answered in full, and observe its sizes and times.

        Args:
            reason: why the first completion ended; None only if `finish` was called before.
            usage: what the request used.
            submitted: when its prompts were sent to the engine, `time.perf_counter` seconds.
            prompt_tokens: tokens of the request's prompts.
            completion_tokens: tokens of the answer.
            longest: tokens of its longest completion.
            max_new_tokens: limit of the tokens of a completion.
        """
        if self.outcome is not None:
            return
        assert reason is not None
        metrics = self._metrics
        metrics.duration.observe(time.perf_counter() - self.started)
        metrics.validation.observe(submitted - self.started)
        prefill, decode = usage.prefill_ms / 1000, usage.decode_ms / 1000
        metrics.queue.observe(usage.queue_ms / 1000)
        metrics.prefill.observe(prefill)
        metrics.decode.observe(decode)
        metrics.inference.observe(prefill + decode)
        if longest > 1:
            metrics.time_per_token.observe(decode / (longest - 1))
        metrics.prompt_length.observe(prompt_tokens)
        metrics.output_length.observe(completion_tokens)
        metrics.max_new_tokens.observe(max_new_tokens)
        self.finish(_SUCCESSES[reason])


def outcome_of(error: BaseException) -> Outcome:
    """Return how a request ended that an exception ended. A request is cancelled if the server stops: an error."""
    if isinstance(error, ClientDisconnectedError | AbortedError):
        return Outcome.ABORT
    if isinstance(error, DeadlineExceededError):
        return Outcome.TIMEOUT
    if isinstance(error, ClientError):
        return Outcome.VALIDATION
    if isinstance(error, OverloadedError):
        return Outcome.OVERLOADED
    return Outcome.UNAVAILABLE if isinstance(error, UnavailableError) else Outcome.ERROR
