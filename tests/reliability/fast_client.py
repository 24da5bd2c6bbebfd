"""A client that keeps a service busy with little work of its own: raw protocols on uvloop, each with one request."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, cast

import httptools

from tests.reliability.exchange import HOST

if TYPE_CHECKING:
    from collections.abc import Sequence


class Client(asyncio.Protocol):
    """One connection. It sends the next request when a reply is complete, and connects again when it is closed.

    Args:
        run: that it belongs to.
    """

    def __init__(self, run: ClientRun) -> None:
        self._run = run
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._leaving: asyncio.TimerHandle | None = None
        self._waiting = False
        self._left = False
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has another base class
        self._send()

    def _send(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._tail = b""
        request = self._run.next_request()
        if request is None:
            self._transport.close()
            return
        self._waiting = True
        self._transport.write(request)
        if (seconds := self._run.leave_after()) is not None:
            loop = asyncio.get_running_loop()
            self._leaving = loop.call_later(seconds, self._leave)

    def _leave(self) -> None:
        self._left = True
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse a part of a reply."""
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Remember the end of the body."""
        self._tail = body

    def on_message_complete(self) -> None:
        """Count the reply and send the next request."""
        self._waiting = False
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        self._run.note(self._parser.get_status_code(), self._tail)
        keeps = self._parser.should_keep_alive() and not self._run.reconnects()
        asyncio.get_running_loop().call_soon(self._send if keeps else self._transport.close)

    def connection_lost(self, _: Exception | None) -> None:
        """Connect again."""
        if self._waiting:
            self._run.note_closed(by_client=self._left)
        if self._leaving is not None:
            self._leaving.cancel()
        self._run.connection_lost(self)


class ClientRun:
    """A number of connections that send requests until a limit.

    Attributes:
        done: number of requests with a complete reply, or whose client left.
        statuses: number of replies by status; -1 are clients that left, -2 connections that closed without a reply, -3
            streams with an error.
        samples: the end of one body for each unusual status.

    Args:
        port: of the service.
        requests: encoded; sent in a random order.
        connections: number of requests in flight.
        count: number of requests to send; None for no limit.
        disconnects: share of the requests whose client leaves after a random time.
        leave_seconds: longest such time.
        seed: of the random choices.
        address: of this side of the connections; None for any.
    """

    def __init__(
        self,
        port: int,
        requests: Sequence[bytes],
        connections: int,
        count: int | None,
        disconnects: float = 0.0,
        leave_seconds: float = 1.0,
        seed: int = 1,
        address: str | None = None,
    ) -> None:
        self.done = 0
        self.statuses: dict[int, int] = {}
        self.samples: dict[int, bytes] = {}
        self._port = port
        self._requests = requests
        self._num_connections = connections
        self._left = count
        self._disconnects = disconnects
        self._leave_seconds = leave_seconds
        self._random = random.Random(seed)
        self._local_address = None if address is None else (address, 0)
        self._open = 0
        self._finished = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Send all requests; return when every connection is closed."""
        for _ in range(self._num_connections):
            self._connect()
        await self._finished.wait()

    def stop(self) -> None:
        """Send no further requests."""
        self._left = 0

    def next_request(self) -> bytes | None:
        """Return the next request; None at the end."""
        if self._left is not None:
            if self._left <= 0:
                return None
            self._left -= 1
        return self._random.choice(self._requests)

    def leave_after(self) -> float | None:
        """Return after how many seconds the client of the next request leaves; None if it stays."""
        if not self._disconnects or self._random.random() >= self._disconnects:
            return None
        return self._random.random() * self._leave_seconds

    def reconnects(self) -> bool:
        """Whether a connection is closed although it could be used again: one in 50."""
        return self._random.random() < 0.02

    def note(self, status: int, tail: bytes) -> None:
        """Count a reply."""
        if status == 200 and b'"error_type"' in tail:
            status = -3
        if status not in (200, -1, -2):
            self.samples.setdefault(status, tail[:300])
        self.done += 1
        self.statuses[status] = self.statuses.get(status, 0) + 1

    def note_closed(self, *, by_client: bool) -> None:
        """Count a request whose connection was closed before the reply was complete."""
        self.note(-1 if by_client else -2, b"")

    def connection_lost(self, _: Client) -> None:
        """Replace a connection."""
        self._open -= 1
        if self._left is None or self._left > 0:
            self._connect()
        elif not self._open:
            self._finished.set()

    def _connect(self) -> None:
        self._open += 1
        task = asyncio.ensure_future(self._open_connection())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open_connection(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.create_connection(
                    lambda: Client(self), HOST, self._port, local_addr=self._local_address
                )
            except OSError:
                await asyncio.sleep(0.1)
            else:
                return
