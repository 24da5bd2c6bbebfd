"""All connections of one front end: their limit, their deadlines, and one line of the log for what was refused."""

from __future__ import annotations

import asyncio
import collections
import logging
import resource
from typing import TYPE_CHECKING, Protocol, TypeAlias

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


_Ordered: TypeAlias = "collections.OrderedDict[Connection, None]"


class Connection(Protocol):
    """What this module needs of `HTTP11Protocol`."""

    def check(self, now: float) -> None:
        """Close the connection if it is late."""

    def has_unsent(self) -> bool:
        """Return whether the client has not yet accepted all of what was written."""

    @property
    def has_begun(self) -> bool:
        """Whether a response has started and not ended."""

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


class _Client:
    """The connections of one address, at least one.

    Attributes:
        all: in the order in which they were accepted, or passed over by `Connections`.
        waiting: those on which no request runs, in the order in which they began to wait.
    """

    __slots__ = ("all", "waiting")

    def __init__(self) -> None:
        self.all: _Ordered = collections.OrderedDict()
        self.waiting: _Ordered = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self.all)


class Connections:
    """Admits connections, closes those that are late, and reports what was refused.

    At the limit, addresses have equal shares. A new connection of one that has its share takes the place of that
    address's connection that has waited longest for its next request, and is refused if a request runs on each. A new
    connection of another address takes the place of one of the address with the most connections: of the one that has
    waited longest, or else of the oldest on which no response has started. If nobody has more than a share, it takes
    the place of the one of all that has waited longest.

    Args:
        config: limits and intervals.

    Attributes:
        config: as given.
        capacity: limit of connections.
    """

    def __init__(self, config: HTTPConfig) -> None:
        self.config = config
        self.capacity = connection_capacity(config.max_connections)
        self._waiting: _Ordered = collections.OrderedDict()
        self._all: dict[Connection, str] = {}
        self._clients: dict[str, _Client] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._counts: collections.Counter[str] = collections.Counter()
        self._next_report = 0.0
        shortest = min(
            config.header_timeout, config.keep_alive_timeout, config.send_timeout_seconds
        )
        self._interval = min(_SWEEP_SECONDS, shortest / 4)

    def admit(self, connection: Connection, client: str = "") -> bool:
        """Take a new connection; returns False if it must be refused.

        Args:
            connection: the new one.
            client: its address, as `server.http.edge.client_name.client_of_address`.
        """
        if len(self._all) >= self.capacity and not self._evict(client):
            self.count("connections refused")
            return False
        self._all[connection] = client
        self._clients.setdefault(client, _Client()).all[connection] = None
        self._start_timer()
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection that was closed or refused."""
        client = self._all.pop(connection, None)
        if client is None:
            return
        self._waiting.pop(connection, None)
        held = self._clients[client]
        held.waiting.pop(connection, None)
        del held.all[connection]
        if not held:
            del self._clients[client]

    def begin_wait(self, connection: Connection) -> None:
        """Note that a connection waits for data from now on; it may be closed in favor of another."""
        client = self._all.get(connection)
        if client is None:
            return
        for waiting in (self._waiting, self._clients[client].waiting):
            waiting[connection] = None
            waiting.move_to_end(connection)  # a request that has started must not be cut off first

    def end_wait(self, connection: Connection) -> None:
        """Note that a request runs on a connection."""
        client = self._all.get(connection)
        if client is not None:
            self._waiting.pop(connection, None)
            self._clients[client].waiting.pop(connection, None)

    def count(self, what: str) -> None:
        """Count an event; the log gets one line for all events of an interval.

        Args:
            what: a fixed phrase, without text from clients.
        """
        self._counts[what] += 1
        self._start_timer()

    def _evict(self, client: str) -> bool:
        """Close a connection, so that a new one of an address can be accepted."""
        clients = self._clients
        known = clients.get(client)
        share = max(1, self.capacity // (len(clients) + (known is None)))
        if known is not None and len(known) >= share:
            return self._close_waiting(known.waiting)
        most = max(clients.values(), key=len)
        if len(most) <= share:
            return self._close_waiting(self._waiting)
        return self._close_waiting(most.waiting) or self._close_busy(most.all)

    def _close_waiting(self, waiting: _Ordered) -> bool:
        for _ in range(min(_EVICTION_ATTEMPTS, len(waiting))):
            connection = next(iter(waiting))
            if not connection.has_unsent():
                return self._close(connection, "waiting connections closed in favor of new ones")
            waiting.move_to_end(connection)  # its client still reads an answer
        return False

    def _close_busy(self, connections: _Ordered) -> bool:
        for _ in range(min(_EVICTION_ATTEMPTS, len(connections))):
            connection = next(iter(connections))
            if not (connection.has_begun or connection.has_unsent()):
                return self._close(connection, "connections of an address above its share closed")
            connections.move_to_end(connection)
        return False

    def _close(self, connection: Connection, what: str) -> bool:
        self.count(what)
        connection.abort()
        self.remove(connection)
        return True

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
