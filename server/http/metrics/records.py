"""What is measured about one request while it is answered. Knows no metric names."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.http.metrics.registry import Endpoint, Metrics, Outcome


class TokenClock:
    """Measures the waits between the tokens of one sequence."""

    __slots__ = ("_last", "_metrics", "_started")

    def __init__(self, metrics: Metrics, started: float) -> None:
        self._metrics = metrics
        self._started = started
        self._last = 0.0

    def tokens(self, count: int) -> None:
        """`count` tokens arrived together."""
        now = time.perf_counter()
        if self._last:
            self._metrics.itl.observe((now - self._last) / count, count)
        else:
            self._metrics.ttft.observe(now - self._started)
        self._last = now


class RequestRecord:
    """What is measured about one request; `finish` or `succeed` counts it, once.

    Attributes:
        started: when its first byte was seen, `time.perf_counter` seconds.
    """

    __slots__ = ("_endpoint", "_finished", "_metrics", "started")

    def __init__(self, metrics: Metrics, endpoint: Endpoint) -> None:
        self.started = time.perf_counter()
        self._metrics = metrics
        self._endpoint = endpoint
        self._finished = False

    def clock(self) -> TokenClock:
        """For one of the request's sequences."""
        return TokenClock(self._metrics, self.started)

    def finish(self, outcome: Outcome) -> None:
        """Count the request; further calls do nothing."""
        if not self._finished:
            self._finished = True
            self._metrics.count_request(self._endpoint, outcome)

    def succeed(
        self, outcome: Outcome, *, queue_seconds: float, prompt_tokens: int, generated_tokens: int
    ) -> None:
        """Count a request that was answered in full."""
        if not self._finished:
            metrics = self._metrics
            metrics.duration.observe(time.perf_counter() - self.started)
            metrics.queue.observe(queue_seconds)
            metrics.prompt_length.observe(prompt_tokens)
            metrics.output_length.observe(generated_tokens)
        self.finish(outcome)
