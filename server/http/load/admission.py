"""Admission: limits the sequences in flight, the requests that only tokenize, and the bytes of bodies.

A request is refused as early as possible: before its body is read if no sequence could be admitted, before its body is
buffered if the budget of bytes is used up, and after it was parsed if it asks for more sequences than there are places.
A place is taken only when the body is complete, so that clients that send slowly hold none, and it is given back while
a grammar is compiled. Each limit is shared equally by clients (`server.http.load.shares`).
"""

from __future__ import annotations

import contextlib
import contextvars
from typing import TYPE_CHECKING, Final, Self

from server.errors import OverloadedError, ValidationError
from server.http.load.shares import Shares, allows
from server.http.metrics.client_counts import Counts
from server.http.request_id import current_request

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

_place: contextvars.ContextVar[_Place | None] = contextvars.ContextVar("tessera.place")


class Admission:
    """Owns the budget of bytes and the number of requests that tokenize. Used only on the event loop.

    Args:
        config: the limits.
        metrics: counts the sequences in flight in all processes of the service.
        retry_after: returns the seconds after which a number of sequences will probably have ended.
        note: called with the client of each request that is about to be admitted or refused.
    """

    def __init__(
        self,
        config: HTTPConfig,
        metrics: Metrics,
        retry_after: Callable[[int], int],
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._retry_after = retry_after
        self._note = note
        self._budget = _Budget(config.max_buffered_body_bytes)
        self._tokenizing = Shares()
        self._aside = Shares()

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
        client = current_request().client
        self._note(client)
        self._check_places(client, 1, info)

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
        each, and clients below their share may exceed it (`server.http.load.shares`).

        Raises:
            OverloadedError: the request would exceed the limit, and its client's share.
        """
        place = _Place(self, current_request().client, sequences, info)
        place.take()
        token = _place.set(place)
        try:
            yield
        finally:
            _place.reset(token)
            place.give_back()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Give the place of the current request back for a time in which others can use it, and take one afterwards.

        As many requests wait at a time as there may be sequences. Does nothing for a request without a place.

        Raises:
            OverloadedError: too many requests wait, or no place is free afterwards.
        """
        place = _place.get(None)
        if place is None:
            yield
            return
        client, waiting = place.client, self._aside
        if not waiting.allows(client, 1, self.limit(place.info)):
            raise OverloadedError("too many grammars wait to be compiled")
        waiting.add(client, 1)
        place.give_back()
        try:
            yield
        finally:
            waiting.add(client, -1)
        place.take()

    def take(self, client: str, sequences: int, info: EngineInfo) -> None:
        """Count sequences as in flight.

        Raises:
            OverloadedError: the request would exceed the limit, and its client's share.
        """
        self._check_places(client, sequences, info)
        self.count(client, sequences)

    def count(self, client: str, sequences: int) -> None:
        """Count sequences as in flight, or with a negative number as answered."""
        self._metrics.add_in_flight(sequences)
        self._metrics.clients.add(client, Counts(places=sequences))

    def _check_places(self, client: str, sequences: int, info: EngineInfo) -> None:
        metrics, limit = self._metrics, self.limit(info)
        total = metrics.in_flight
        if total + sequences <= limit:
            return
        held, num_clients = metrics.clients.of(client).places, metrics.clients.num_clients(client)
        if not allows(sequences, held, total, limit, num_clients):
            raise OverloadedError(retry_after=self._retry_after(total + sequences - limit))

    @contextlib.contextmanager
    def admit_tokenizing(self, info: EngineInfo | None) -> Iterator[None]:
        """Count a request that only tokenizes; this process serves as many at a time as there may be sequences.

        Args:
            info: reported by the engine; None if it is not ready, which these requests do not need.

        Raises:
            OverloadedError: no place is free, and the client has its share.
        """
        client = current_request().client
        if not self._tokenizing.allows(client, 1, self.limit(info)):
            raise OverloadedError("too many requests are being tokenized")
        self._tokenizing.add(client, 1)
        try:
            yield
        finally:
            self._tokenizing.add(client, -1)

    def buffer(self) -> Buffer:
        """Make the account of a new request's bytes."""
        return Buffer(self._budget, current_request().client)


class _Place:
    """The place of a request, for all its sequences, which it may give back and take again."""

    __slots__ = ("_admission", "_held", "_sequences", "client", "info")

    def __init__(self, admission: Admission, client: str, sequences: int, info: EngineInfo) -> None:
        self.client = client
        self.info = info
        self._admission = admission
        self._sequences = sequences
        self._held = False

    def take(self) -> None:
        if self._held:
            return
        self._admission.take(self.client, self._sequences, self.info)
        self._held = True

    def give_back(self) -> None:
        if self._held:
            self._held = False
            self._admission.count(self.client, -self._sequences)


class _Budget:
    """Bytes that all requests may hold together.

    Args:
        limit: number of bytes; a request that no other one competes with may exceed it.
    """

    __slots__ = ("_limit", "_shares")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._shares = Shares()

    @property
    def held(self) -> int:
        """Bytes that all requests hold."""
        return self._shares.total

    def allows(self, client: str, more: int, held: int) -> bool:
        """Return whether a request that holds `held` bytes may hold `more`."""
        # A request that could never fit would be told to retry for ever.
        return self._shares.allows(client, more, self._limit) or self.held <= held

    def add(self, client: str, size: int) -> None:
        self._shares.add(client, size)


class Buffer:
    """Context manager with the bytes that one request holds of the budget; it gives them back at the end."""

    __slots__ = ("_budget", "_client", "_held")

    def __init__(self, budget: _Budget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._held:
            self.release()

    def hold(self, size: int) -> None:
        """Hold `size` bytes in all; the first `FREE_BYTES` do not count.

        Raises:
            OverloadedError: other requests hold too many, and the client has its share.
        """
        more = size - FREE_BYTES - self._held
        if more <= 0:
            return
        if not self._budget.allows(self._client, more, self._held):
            raise OverloadedError("too many bytes of requests are being processed")
        self._budget.add(self._client, more)
        self._held += more

    def add(self, size: int) -> None:
        """Hold `size` bytes in addition to those that count already.

        Raises:
            OverloadedError: other requests hold too many.
        """
        self.hold(size + (FREE_BYTES + self._held if self._held else 0))

    def release(self) -> None:
        """Give all bytes back."""
        self._budget.add(self._client, -self._held)
        self._held = 0
