"""Runs the engine's loop in this process on many requests, and records when each step is published.

Times the code that the service runs, `Engine.run`, with a channel in memory instead of sockets and without text.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from model.sampling.parameters import SamplingParams
from server.engine.core.messages import (
    EngineConfig,
    EngineMessage,
    FrontEndMessage,
    Shutdown,
    StepMessage,
)
from server.engine.core.request import FinishReason, GenerateRequest
from server.engine.link.engine_process.rank_processes import RankProcesses
from server.engine.runner.start.startup import start_engine

if TYPE_CHECKING:
    from numpy.random import Generator


class EngineRunError(Exception):
    """A request ended without all its tokens; the text says why."""


class Trace(msgspec.Struct):
    """Times of the tokens of the requests of a run; all times are `time.perf_counter()`.

    Attributes:
        sent: when the first requests were sent.
        sequences: number of requests.
        times: when each step with tokens was published.
        tokens: number of tokens of each of these steps.
        first: index of the step after which every request has its first token.
    """

    sent: float
    sequences: int
    times: list[float] = []
    tokens: list[int] = []
    first: int = 0

    @property
    def seconds(self) -> float:
        """Seconds from sending to the last token."""
        return self.times[-1] - self.sent

    @property
    def last(self) -> int:
        """Index of the last step up to which every step after `first` has a token of every request."""
        last = self.first
        while last + 1 < len(self.tokens) and self.tokens[last + 1] == self.sequences:
            last += 1
        return last

    @property
    def decode_steps(self) -> int:
        """Number of steps in which all requests decode and nothing else is computed."""
        return self.last - self.first

    @property
    def decode_seconds(self) -> float:
        """Seconds of those steps."""
        return self.times[self.last] - self.times[self.first]

    @property
    def tokens_before(self) -> int:
        """Average output tokens of a request when those steps begin."""
        return round(sum(self.tokens[: self.first + 1]) / self.sequences)


class _Channel:
    """Passes requests to the engine, and ends its loop when all work is done.

    Args:
        idle_seconds: time for preparatory work after which the loop ends although there is more of it.
    """

    def __init__(self, idle_seconds: float = math.inf) -> None:
        self._idle_seconds = idle_seconds
        self._idle_until = math.inf
        self.inbox: list[FrontEndMessage] = []
        self.steps: list[tuple[float, StepMessage]] = []
        self.on_step: Callable[[StepMessage], None] | None = None

    def send(self, message: EngineMessage) -> None:
        if isinstance(message, StepMessage):
            self.steps.append((time.perf_counter(), message))
            if self.on_step is not None:
                self.on_step(message)

    def receive(self, *, wait: float) -> Iterable[FrontEndMessage]:
        messages, self.inbox = self.inbox, []
        if messages:
            self._idle_until = math.inf
            return messages
        now = time.perf_counter()
        if math.isinf(wait) or now > self._idle_until:
            self._idle_until = math.inf
            return [Shutdown()]
        if wait and math.isinf(self._idle_until):  # the engine's work is done
            self._idle_until = now + self._idle_seconds
        return []


class EngineRun:
    """An engine in this process.

    Args:
        config: of the engine.
        idle_seconds: time for the engine's idle-time work each time it has no other work.

    Attributes:
        info: properties of the engine.
    """

    def __init__(self, config: EngineConfig, idle_seconds: float = math.inf) -> None:
        self._channel = _Channel(idle_seconds)
        ranks = RankProcesses(config) if config.tensor_parallel > 1 else None
        self._engine = start_engine(config, self._channel, ranks)
        self.info = self._engine.info
        self._ids = itertools.count(1)

    def use_idle_time(self) -> None:
        """Let the engine do its idle-time work."""
        self._engine.run()

    def request(self, prompt: Sequence[int], max_new_tokens: int) -> GenerateRequest:
        """Return a greedy request without end tokens, which generates `max_new_tokens` tokens.

        It has no drafts, so that a step computes one token of each sequence: `python -m benchmarks.edits` measures
        those.
        """
        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0)
        return GenerateRequest(
            request_id=next(self._ids),
            prompt_token_ids=list(prompt),
            sampling=sampling,
            max_draft_tokens=0,
        )

    def random_requests(
        self, prompts: Sequence[int], outputs: Sequence[int], generator: Generator
    ) -> list[GenerateRequest]:
        """Return requests of these lengths in tokens. The tokens are random, so that no two prompts share a prefix."""
        return [
            self.request(generator.integers(0, self.info.vocab_size, prompt).tolist(), output)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def run(
        self,
        requests: Sequence[GenerateRequest],
        on_step: Callable[[StepMessage], None] | None = None,
        concurrency: int | None = None,
    ) -> Trace:
        """Send requests and wait until all of them end.

        Args:
            requests: with distinct ids.
            on_step: called with each step right after the engine publishes it.
            concurrency: number of requests that are sent together; then one whenever another ends. None sends all of
                them together.

        Raises:
            EngineRunError: a request ended without all its tokens.
        """
        channel = self._channel
        channel.steps.clear()
        waiting = iter(requests)
        channel.inbox += itertools.islice(waiting, concurrency)

        def publish(step: StepMessage) -> None:
            channel.inbox += itertools.islice(waiting, sum(map(bool, step.finish_reasons)))
            if on_step is not None:
                on_step(step)

        channel.on_step = publish
        sent = time.perf_counter()
        self._engine.run()
        channel.on_step = None
        return read_trace(sent, channel.steps, requests)


def read_trace(
    sent: float, steps: Sequence[tuple[float, StepMessage]], requests: Sequence[GenerateRequest]
) -> Trace:
    """Build the trace of a run from the engine's messages.

    Args:
        sent: when the requests were sent.
        steps: (time of publication, message).
        requests: the requests that were sent.

    Raises:
        EngineRunError: a request ended without all its tokens.
    """
    trace = Trace(sent, len(requests))
    missing = {request.request_id: request.sampling.max_new_tokens for request in requests}
    waiting = set(missing)
    for when, step in steps:
        for error in step.errors.values():
            raise EngineRunError(f"the engine refused a request: {error}")
        if not step.request_ids:
            continue
        if waiting:
            waiting -= set(step.request_ids)
            trace.first = len(trace.times)
        for request_id, reason in zip(step.request_ids, step.finish_reasons, strict=True):
            missing[request_id] -= 1
            if reason not in (0, FinishReason.LENGTH):
                raise EngineRunError(f"a request ended with {FinishReason(reason).name}")
        trace.times.append(when)
        trace.tokens.append(len(step.request_ids))
    if any(missing.values()):
        raise EngineRunError(f"{sum(missing.values())} tokens are missing")
    return trace
