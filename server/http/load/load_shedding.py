"""Refuses requests that would wait too long in the engine's queue, and says when to try again.

The engine reports what waits and how fast it goes (`EngineStats`); a front end adds what it has submitted since.
"""

from __future__ import annotations

import math
import random
import time
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from server.engine.core.messages import MAX_LISTED_ADAPTERS
from server.engine.core.queue.expected_output import expected_output
from server.engine.core.queue.length_counts import MAX_LENGTH_CLASSES, length_class
from server.engine.link.protocol import EngineState
from server.errors import OverloadedError
from server.http.load.shares import allows
from server.http.metrics.client_counts import Counts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from server.engine.core.messages import EngineInfo, EngineStats
    from server.engine.link.front_end.client import EngineHandle
    from server.http.config import HTTPConfig
    from server.http.metrics.client_counts import ClientCounts

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
    (`server.engine.core.queue.waiting_queue`). So at most the whole queue is before it, and at most about twice the
    prompts that are no longer. The wait is that many tokens at the measured rate of prompts, or, if places are
    short, what those sequences will probably generate at the measured rate of output. It ends where the prompt's
    own computation begins: an idle engine accepts every request. Until a rate was measured, nothing is refused for
    its wait. Priorities are not considered.

    If sequences hold all slots for adapters, a request for an adapter without a slot waits until others have ended,
    although there are places; those that wait so hold up no other requests.

    The engine serves clients by turns, so the queue of another client delays a prompt by no more than the queue of its
    own client does: of several clients, each expects to wait for as many times what it has queued itself.

    Used only on the event loop.

    Args:
        client: of the engine.
        config: the limits.
        clients: what each client has in progress; None if the whole queue is one client's.
    """

    def __init__(
        self, client: EngineHandle, config: HTTPConfig, clients: ClientCounts | None = None
    ) -> None:
        self._client = client
        self._config = config
        self._clients = clients
        self._stats: EngineStats | None = None
        self._stats_seen = 0.0
        self._steps_seen = 0  # of the engine at the last submission
        # Submitted since the newest stats, and between those and the stats before. The engine may have
        # read the latter too late to report them.
        self._recent = _Lengths()
        self._previous = _Lengths()

    def admit(
        self,
        lengths: Sequence[tuple[int, int]],
        info: EngineInfo,
        deadline: float | None = None,
        client: str = "",
        adapter: str | None = None,
    ) -> None:
        """Count sequences as submitted, or refuse them. Call directly before they are submitted.

        Args:
            lengths: tokens of each prompt, and the limit of its output.
            info: reported by the running engine.
            deadline: when the request ends, `time.monotonic` seconds; None for never.
            client: who asks.
            adapter: name of the sequences' adapter; None for none.

        Raises:
            OverloadedError: the prompts would wait too long, or wait until the deadline.
        """
        if self._client.state is not EngineState.READY:
            return  # requests wait for another engine process, which has no queue; admission bounds their number
        stats = self._update()
        if stats.waiting_by_length or stats.num_prefill_tokens or self._recent or self._previous:
            self._check(lengths, info, _before(stats, adapter), deadline, client)
        for length, limit in lengths:
            self._recent.add(length, expected_output(limit, stats.output_means))
        self._steps_seen = stats.num_steps

    def enqueue(self, client: str, length: int, limit: int) -> Callable[[], None]:
        """Count a submitted sequence in its client's queue.

        Args:
            client: who sent it.
            length: tokens of its prompt.
            limit: of its output.

        Returns:
            What must be called when its first step begins or it has ended, whichever is first; further calls do
            nothing.
        """
        clients = self._clients
        assert clients is not None
        output = expected_output(limit, self._client.stats.output_means)
        clients.add(client, Counts(0, 1, length, output))
        is_queued = True

        def leave() -> None:
            nonlocal is_queued
            if is_queued:
                is_queued = False
                clients.add(client, Counts(0, -1, -length, -output))

        return leave

    def retry_after(self, sequences: int = 1) -> int:
        """Return the seconds in which sequences as long as those that wait will probably have ended."""
        stats = self._client.stats
        return _whole_seconds(_seconds_of_ends(sequences, self._queued(stats), stats))

    def _check(
        self,
        lengths: Sequence[tuple[int, int]],
        info: EngineInfo,
        stats: EngineStats,
        deadline: float | None,
        client: str,
    ) -> None:
        config = self._config
        most_tokens = config.max_queued_tokens
        if most_tokens is not None:
            queued, wanted = self._queued(stats).tokens, sum(length for length, _ in lengths)
            if queued + wanted > most_tokens and not self._may_queue(
                client, wanted, queued, most_tokens
            ):
                excess = min(queued, queued + wanted - most_tokens)
                seconds = excess / stats.prompt_rate if stats.prompt_rate else 0.0
                raise _overloaded(
                    f"{queued} tokens of prompts are queued: with {wanted} more there would be more than "
                    f"{most_tokens}",
                    seconds,
                )
        wait = self._wait(self._queued(stats), info, stats)
        if wait <= config.max_queue_seconds and (deadline is None or not wait):
            return  # the usual case: not even the whole queue takes too long
        wait = self._expected_wait(max(lengths)[0], info, stats, client)
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

    def _may_queue(self, client: str, wanted: int, queued: int, limit: int) -> bool:
        """Return whether a client may queue more tokens although all clients together have reached the limit."""
        if not queued:
            return True  # a prompt that could never fit would be told to retry for ever
        queued_by_it, num_clients = self._share(client)
        return num_clients > 1 and allows(wanted, queued_by_it.tokens, queued, limit, num_clients)

    def _share(self, client: str) -> tuple[Counts, int]:
        """Return what a client has in progress, and the number of clients that have something."""
        if self._clients is None:
            return Counts(), 1
        return self._clients.of(client), self._clients.num_clients(client)

    def _expected_wait(
        self, length: int, info: EngineInfo, stats: EngineStats, client: str = ""
    ) -> float:
        """Return the seconds that a prompt would wait before its computation begins, as far as is known."""
        shorter = self._queued_classes(stats, length_class(length) + 1)
        pairs = zip(shorter, self._queued(stats), strict=True)
        before = _Queue(*(min(2 * part, whole) for part, whole in pairs))
        queued_by_it, num_clients = self._share(client)
        if num_clients > 1:
            turns = (queued_by_it.queued, queued_by_it.tokens, queued_by_it.output)
            pairs = zip(before, turns, strict=True)
            before = _Queue(*(min(whole, num_clients * part) for whole, part in pairs))
            if not queued_by_it.queued:
                return 0.0  # the engine makes place for it
        return self._wait(before, info, stats)

    def _wait(self, queue: _Queue, info: EngineInfo, stats: EngineStats) -> float:
        """Return the seconds until a queue is computed, and a sequence after it has a place."""
        seconds = 0.0
        if stats.prompt_rate:
            # The engine begins several prompts in one step.
            seconds = max(0, queue.tokens - info.max_num_batched_tokens) / stats.prompt_rate
        ends = queue.sequences + 1 - stats.num_free_places
        return max(seconds, _seconds_of_ends(ends, queue, stats))

    def _queued(self, stats: EngineStats) -> _Queue:
        """Return what is submitted and not computed."""
        reported = _Queue(*(sum(values) for values in _waiting(stats)))
        sums = map(sum, zip(reported, self._recent.sums, self._previous.sums, strict=True))
        queue = _Queue(*sums)
        return queue._replace(tokens=queue.tokens + stats.num_prefill_tokens)

    def _queued_classes(self, stats: EngineStats, stop: int) -> _Queue:
        """Return what waits of the prompts in the first `stop` classes."""
        parts = zip(_waiting(stats), self._recent.by_class, self._previous.by_class, strict=True)
        return _Queue(*(sum(_sum(values, stop) for values in part) for part in parts))

    def _update(self) -> EngineStats:
        stats = self._client.stats
        if stats is not self._stats:
            self._stats = stats
            if self._recent or self._previous:
                self._previous = _Lengths() if self._are_reported(stats) else self._recent
                self._recent = _Lengths()
                self._stats_seen = time.monotonic()
        elif self._previous and time.monotonic() - self._stats_seen > _REPORTED_SECONDS:
            self._previous = _Lengths()
        return stats

    def _are_reported(self, stats: EngineStats) -> bool:
        """Whether stats include all that was submitted, which the engine reads between two steps."""
        has_work = stats.num_running or stats.num_waiting
        return not has_work or stats.num_steps >= self._steps_seen + 2


class _Queue(NamedTuple):
    """Sequences, the tokens of their prompts, and those that they will probably generate."""

    sequences: int
    tokens: int
    output: int


class _Lengths:
    """Sums of `_Queue` over the submitted sequences, by `length_class` and in all; true if there is one."""

    __slots__ = ("by_class", "sums")

    def __init__(self) -> None:
        self.by_class = tuple([0] * MAX_LENGTH_CLASSES for _ in _Queue._fields)
        self.sums = [0 for _ in _Queue._fields]

    def __bool__(self) -> bool:
        return self.sums[0] > 0

    def add(self, length: int, output: int) -> None:
        at = length_class(length)
        for field, value in enumerate((1, length, output)):
            self.by_class[field][at] += value
            self.sums[field] += value


def _waiting(stats: EngineStats) -> tuple[list[int], list[int], list[int]]:
    """Return the fields of `_Queue` of the engine's queue, by `length_class`."""
    return (stats.waiting_by_length, stats.waiting_tokens_by_length, stats.waiting_output_by_length)


def _before(stats: EngineStats, adapter: str | None) -> EngineStats:
    """Return statistics with the places that are free for a request with an adapter, or for one without."""
    if not stats.num_waiting_for_slots:
        return stats
    free = 0
    has_slot = adapter in stats.running_adapters and adapter not in stats.waiting_adapters
    # Of more adapters the names are not known.
    if adapter is None or has_slot or len(stats.running_adapters) >= MAX_LISTED_ADAPTERS:
        free = stats.num_free_places + stats.num_waiting_for_slots
    return msgspec.structs.replace(stats, num_free_places=free)


def _seconds_of_ends(ends: int, queue: _Queue, stats: EngineStats) -> float:
    """Return the seconds in which a number of sequences end that generate as much as those of a queue."""
    if not queue.sequences or not stats.output_rate:
        return 0.0
    return ends / queue.sequences * queue.output / stats.output_rate


def _sum(values: list[int], stop: int) -> int:
    return sum(islice(values, stop))


def _overloaded(message: str, seconds: float) -> OverloadedError:
    return OverloadedError(f"Model is overloaded: {message}", _whole_seconds(seconds))


def _whole_seconds(seconds: float) -> int:
    """Return a value for Retry-After."""
    if seconds > 1.0:
        seconds *= 1.0 + _SPREAD * random.random()  # noqa: S311 - not for secrets
    return min(_MAX_RETRY_SECONDS, max(1, math.ceil(seconds)))
