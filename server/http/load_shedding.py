"""Refuses requests that would wait too long in the engine's queue, and says when to try again.

The engine reports what waits and how fast it goes (`EngineStats`); a front end adds what it has submitted since.
"""

from __future__ import annotations

import math
import random
import time
from itertools import islice
from typing import TYPE_CHECKING, Final

from server.engine.core.waiting_queue import MAX_LENGTH_CLASSES, length_class
from server.engine.link.protocol import EngineState
from server.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.engine.core.messages import EngineInfo, EngineStats
    from server.engine.link.client import EngineHandle
    from server.http.config import HTTPConfig

_MAX_RETRY_SECONDS: Final = 600
_REPORTED_SECONDS: Final = 1.0
"""After this time without newer stats, the newest include all that was submitted before they came: what the engine read
too late for them would have begun a step, which ends with others. An idle engine sends none.
"""
_SPREAD: Final = 0.5
"""Clients that are refused at one moment are told to return at random times, up to this share later, so that they do
not all return at one moment. The header has whole seconds: delays up to a second are not spread.
"""


class LoadShedding:
    """Estimates how long a prompt will wait, and refuses it if that is too long.

    A prompt waits for the shorter ones and for those whose turn it is, each of which get half of the engine
    (`server.engine.core.waiting_queue`). So at most the whole queue is before it, and at most about twice the prompts
    that are no longer. The wait is that many tokens at the measured rate of prompts, or that many sequences at the
    measured rate at which sequences end, if places are short. It ends where the prompt's own computation begins: an
    idle engine accepts every request. Until a rate was measured, nothing is refused for its wait. Priorities are not
    considered.

    Used only on the event loop.

    Args:
        client: the engine's client.
        config: limits of the queue.
    """

    def __init__(self, client: EngineHandle, config: HTTPConfig) -> None:
        self._client = client
        self._config = config
        self._stats: EngineStats | None = None
        self._stats_seen = 0.0
        # Submitted since the newest stats, and between those and the stats before. The engine may have
        # read the latter too late to report them.
        self._recent = _Lengths()
        self._previous = _Lengths()

    def admit(
        self, lengths: Sequence[int], info: EngineInfo, deadline: float | None = None
    ) -> None:
        """Count prompts as submitted, or refuse them. Call directly before they are submitted.

        Args:
            lengths: tokens of each prompt.
            info: reported by the running engine.
            deadline: when the request ends, `time.monotonic` seconds; None for never.

        Raises:
            OverloadedError: the prompts would wait too long, or wait until the deadline.
        """
        if self._client.state is not EngineState.READY:
            return  # requests wait for another engine process, which has no queue; admission bounds their number
        stats = self._update()
        if stats.waiting_by_length or stats.num_prefill_tokens or self._recent or self._previous:
            self._check(lengths, info, stats, deadline)
        for length in lengths:
            self._recent.add(length)

    def retry_after(self, sequences: int = 1) -> int:
        """Return the seconds after which a number of sequences will probably have ended."""
        rate = self._client.stats.end_rate
        return _whole_seconds(sequences / rate if rate else 0.0)

    def expected_wait(self, length: int, info: EngineInfo) -> float:
        """Return the seconds that a prompt would wait before its computation begins, as far as is known."""
        return self._expected_wait(length, info, self._update())

    def _check(
        self, lengths: Sequence[int], info: EngineInfo, stats: EngineStats, deadline: float | None
    ) -> None:
        config = self._config
        most_tokens = config.max_queued_tokens
        if most_tokens is not None:
            queued, wanted = self._queued_tokens(stats), sum(lengths)
            if queued and queued + wanted > most_tokens:
                excess = min(queued, queued + wanted - most_tokens)
                seconds = excess / stats.prompt_rate if stats.prompt_rate else 0.0
                raise _overloaded(
                    f"{queued} tokens of prompts are queued: with {wanted} more there would be more than "
                    f"{most_tokens}",
                    seconds,
                )
        wait = self._wait(self._queued_tokens(stats), self._queued_sequences(stats), info, stats)
        if wait <= config.max_queue_seconds and (deadline is None or not wait):
            return  # the usual case: not even the whole queue takes too long
        wait = self._expected_wait(max(lengths), info, stats)
        if wait > config.max_queue_seconds:
            raise _overloaded(
                f"the request would wait about {wait:.0f} s, longer than {config.max_queue_seconds:g} s",
                wait - config.max_queue_seconds,
            )
        if deadline is not None and wait > 0.0:
            left = deadline - time.monotonic()
            if wait > left:
                raise _overloaded(
                    f"the request would wait about {wait:.1f} s, longer than `timeout_ms` allows",
                    wait - left,
                )

    def _expected_wait(self, length: int, info: EngineInfo, stats: EngineStats) -> float:
        stop = length_class(length) + 1
        recent, previous = self._recent, self._previous
        tokens = _sum(stats.waiting_tokens_by_length, stop)
        tokens += _sum(recent.tokens, stop) + _sum(previous.tokens, stop)
        sequences = _sum(stats.waiting_by_length, stop)
        sequences += _sum(recent.counts, stop) + _sum(previous.counts, stop)
        return self._wait(
            min(2 * tokens, self._queued_tokens(stats)),
            min(2 * sequences, self._queued_sequences(stats)),
            info,
            stats,
        )

    def _wait(self, tokens: int, sequences: int, info: EngineInfo, stats: EngineStats) -> float:
        """Return the seconds until so many tokens and sequences that are queued are computed and have places."""
        seconds = 0.0
        if stats.prompt_rate:
            # The engine begins several prompts in one step.
            seconds = max(0, tokens - info.max_num_batched_tokens) / stats.prompt_rate
        if stats.end_rate:
            seconds = max(seconds, (sequences + 1 - stats.num_free_places) / stats.end_rate)
        return seconds

    def _queued_tokens(self, stats: EngineStats) -> int:
        """Return the prompt tokens that are submitted and not computed."""
        submitted = self._recent.num_tokens + self._previous.num_tokens
        return stats.num_prefill_tokens + sum(stats.waiting_tokens_by_length) + submitted

    def _queued_sequences(self, stats: EngineStats) -> int:
        return sum(stats.waiting_by_length) + self._recent.num + self._previous.num

    def _update(self) -> EngineStats:
        stats = self._client.stats
        if stats is not self._stats:
            self._stats = stats
            if self._recent or self._previous:
                self._previous, self._recent = self._recent, _Lengths()
                self._stats_seen = time.monotonic()
        elif self._previous and time.monotonic() - self._stats_seen > _REPORTED_SECONDS:
            self._previous = _Lengths()
        return stats


class _Lengths:
    """Numbers of prompts and of their tokens, by `length_class` and in all; true if there is one."""

    __slots__ = ("counts", "num", "num_tokens", "tokens")

    def __init__(self) -> None:
        self.counts = [0] * MAX_LENGTH_CLASSES
        self.tokens = [0] * MAX_LENGTH_CLASSES
        self.num = 0
        self.num_tokens = 0

    def __bool__(self) -> bool:
        return self.num > 0

    def add(self, length: int) -> None:
        at = length_class(length)
        self.counts[at] += 1
        self.tokens[at] += length
        self.num += 1
        self.num_tokens += length


def _sum(values: list[int], stop: int) -> int:
    return sum(islice(values, stop))


def _overloaded(message: str, seconds: float) -> OverloadedError:
    return OverloadedError(f"Model is overloaded: {message}", _whole_seconds(seconds))


def _whole_seconds(seconds: float) -> int:
    """Return a value for Retry-After."""
    if seconds > 1.0:
        seconds *= 1.0 + _SPREAD * random.random()  # noqa: S311 - not for secrets
    return min(_MAX_RETRY_SECONDS, max(1, math.ceil(seconds)))
