"""All connections of one front end: their limit, their deadlines, and one line of the log for what was refused."""

from __future__ import annotations

import asyncio
import collections
import logging
import resource
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from server.http.config import HTTPConfig

log = logging.getLogger("tessera.http")

MAX_CONNECTIONS = 8192
"""Default limit of one front end, if the limit of descriptors allows it."""

RESERVED_DESCRIPTORS = 128
"""Kept for files of the model, sockets and pipes of child processes and logs; a front end with a worker process and
traces has 40 to 60 open."""

_SWEEP_SECONDS = 1.0
_REPORT_SECONDS = 10.0
_EVICTION_ATTEMPTS = 16


class Connection(Protocol):
    """What this module needs of `HTTP11Protocol`."""

    def check(self, now: float) -> None:
        """Close the connection if it is late."""

    def has_unsent(self) -> bool:
        """Return whether the client has not yet accepted all of what was written."""

    def abort(self) -> None:
        """Close the connection at once."""


def connection_capacity(wanted: int | None) -> int:
    """Return how many connections this process accepts at the same time.

    Args:
        wanted: limit that the operator set; None for `MAX_CONNECTIONS`. Either is lowered to what the limit of
            descriptors leaves.
    """
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if descriptors == resource.RLIM_INFINITY:
        return wanted or MAX_CONNECTIONS
    available = max(descriptors - RESERVED_DESCRIPTORS, descriptors // 2, 1)
    if wanted is not None and wanted > available:
        log.warning(
            "accepting %d connections instead of %d: the limit of open files is %d",
            available, wanted, descriptors,
        )  # fmt: skip
    return min(wanted or MAX_CONNECTIONS, available)


class Connections:
    """Admits connections, closes those that are late, and reports what was refused.

    At the limit a new connection takes the place of the one that has waited longest for its next request. If a request
    runs on every connection, the new one is refused.

    Args:
        config: limits and intervals.

    Attributes:
        config: as given.
        capacity: limit of connections.
        waiting: connections on which no request runs, in the order in which they began to wait.
    """

    def __init__(self, config: HTTPConfig) -> None:
        self.config = config
        self.capacity = connection_capacity(config.max_connections)
        self.waiting: collections.OrderedDict[Connection, None] = collections.OrderedDict()
        self._all: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._counts: collections.Counter[str] = collections.Counter()
        self._next_report = 0.0
        shortest = min(
            config.header_timeout, config.keep_alive_timeout, config.send_timeout_seconds
        )
        self._interval = min(_SWEEP_SECONDS, shortest / 4)

    def admit(self, connection: Connection) -> bool:
        """Take a new connection; returns False if it must be refused."""
        if len(self._all) >= self.capacity and not self._evict():
            self.count("connections refused")
            return False
        self._all.add(connection)
        self._start_timer()
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection that was closed or refused."""
        self._all.discard(connection)
        self.waiting.pop(connection, None)

    def count(self, what: str) -> None:
        """Count an event; the log gets one line for all events of an interval.

        Args:
            what: a fixed phrase, without text from clients.
        """
        self._counts[what] += 1
        self._start_timer()

    def _evict(self) -> bool:
        """Close the connection that has waited longest, so that a new one can be accepted."""
        for _ in range(min(_EVICTION_ATTEMPTS, len(self.waiting))):
            connection = next(iter(self.waiting))
            if connection.has_unsent():  # its client still reads an answer
                self.waiting.move_to_end(connection)
                continue
            self.count("waiting connections closed in favor of new ones")
            connection.abort()
            self.remove(connection)
            return True
        return False

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._sweep)

    def _sweep(self) -> None:
        """Close connections that are late. One pass over all of them takes less than a timer for each request."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        for connection in list(self._all):
            connection.check(now)
        if self._counts and now >= self._next_report:
            self._next_report = now + _REPORT_SECONDS
            counts, self._counts = self._counts, collections.Counter()
            log.warning("%s", ", ".join(f"{name}: {count}" for name, count in counts.items()))
        if self._all or self._counts:
            self._start_timer()
