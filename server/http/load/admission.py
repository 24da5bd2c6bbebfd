"""Admission: limits the sequences in flight, the requests that only tokenize, and the bytes of bodies.

A request is refused as early as possible: before its body is read if no sequence could be admitted, before its body is
buffered if the budget of bytes is used up, and after it was parsed if it asks for more sequences than there are places.
A place is taken only when the body is complete, so that clients that send slowly hold none.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, Self

from server.errors import OverloadedError, ValidationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from server.engine.core.messages import EngineInfo
    from server.http.config import HTTPConfig
    from server.http.metrics.registry import Metrics

FREE_BYTES = 64 * 1024
"""Bytes of a request that the budget does not count: the server itself reads as much ahead from every connection."""

_CPU_PLACES: Final = 2
_GPU_PLACES: Final = 16
"""Sequences in flight for each that is computed at the same time. On a GPU thousands may wait, as in other services;
`LoadShedding` refuses those that would wait too long once the rates are known.
"""
_DEFAULT_PLACES: Final = 128
"""Until the engine reports its limit; that of a CPU."""


class Admission:
    """Owns the budget of bytes and the number of requests that tokenize. Used only on the event loop.

    Args:
        config: the limits.
        metrics: counts the sequences in flight in all processes of the service.
        retry_after: returns the seconds after which a number of sequences will probably have ended.
    """

    def __init__(
        self, config: HTTPConfig, metrics: Metrics, retry_after: Callable[[int], int]
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._retry_after = retry_after
        self._budget = _Budget(config.max_buffered_body_bytes)
        self._tokenizing = 0

    def limit(self, info: EngineInfo | None) -> int:
        """Return the limit of sequences in flight: the configured one, or a multiple of the engine's `max_num_seqs`."""
        configured = self._config.max_concurrent_requests
        if configured is not None:
            return configured
        if info is None:
            return _DEFAULT_PLACES
        return info.max_num_seqs * (_CPU_PLACES if info.device == "cpu" else _GPU_PLACES)

    def check(self, info: EngineInfo) -> None:
        """Refuse a request whose body is not read yet if not even one sequence could be admitted.

        Raises:
            OverloadedError: no place is free.
        """
        self._check_places(1, info)

    def check_sequences(self, field: str, count: int, info: EngineInfo) -> None:
        """Check that a request asks for no more sequences than are ever admitted.

        Raises:
            ValidationError: it asks for more, so that a retry could not succeed.
        """
        limit = self.limit(info)
        if count > limit:
            raise ValidationError(
                f"`{field}` must ask for at most {limit} completions in all. Given: {count}"
            )

    @contextlib.contextmanager
    def admit(self, sequences: int, info: EngineInfo) -> Iterator[None]:
        """Count the sequences of a request as in flight.

        The limit applies to the whole service. Front ends that admit at the same moment may exceed it by one request
        each.

        Raises:
            OverloadedError: the request would exceed the limit.
        """
        self._check_places(sequences, info)
        self._metrics.add_in_flight(sequences)
        try:
            yield
        finally:
            self._metrics.add_in_flight(-sequences)

    def _check_places(self, sequences: int, info: EngineInfo) -> None:
        excess = self._metrics.in_flight + sequences - self.limit(info)
        if excess > 0:
            raise OverloadedError(retry_after=self._retry_after(excess))

    @contextlib.contextmanager
    def admit_tokenizing(self, info: EngineInfo | None) -> Iterator[None]:
        """Count a request that only tokenizes; this process serves as many at a time as there may be sequences.

        Args:
            info: reported by the engine; None if it is not ready, which these requests do not need.

        Raises:
            OverloadedError: no place is free.
        """
        if self._tokenizing >= self.limit(info):
            raise OverloadedError("too many requests are being tokenized")
        self._tokenizing += 1
        try:
            yield
        finally:
            self._tokenizing -= 1

    def buffer(self) -> Buffer:
        """Make the account of a new request's bytes."""
        return Buffer(self._budget)


class _Budget:
    """Bytes that all requests may hold together.

    Args:
        limit: number of bytes; a request that no other one competes with may exceed it.
    """

    __slots__ = ("held", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0


class Buffer:
    """Context manager with the bytes that one request holds of the budget; it gives them back at the end."""

    __slots__ = ("_budget", "_held")

    def __init__(self, budget: _Budget) -> None:
        self._budget = budget
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._held:
            self.release()

    def hold(self, size: int) -> None:
        """Hold `size` bytes in all; the first `FREE_BYTES` do not count.

        Raises:
            OverloadedError: other requests hold too many.
        """
        more = size - FREE_BYTES - self._held
        if more <= 0:
            return
        budget = self._budget
        # A request that could never fit would be told to retry for ever.
        if budget.held + more > budget.limit and budget.held > self._held:
            raise OverloadedError("too many bytes of requests are being processed")
        budget.held += more
        self._held += more

    def add(self, size: int) -> None:
        """Hold `size` bytes in addition to those that count already.

        Raises:
            OverloadedError: other requests hold too many.
        """
        self.hold(size + (FREE_BYTES + self._held if self._held else 0))

    def release(self) -> None:
        """Give all bytes back."""
        self._budget.held -= self._held
        self._held = 0
