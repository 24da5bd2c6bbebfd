"""One request on a connection and its response, as ASGI sees them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final, Protocol

from server.http.transport import replies

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope

log = logging.getLogger("tessera.http")

_KEY: Final = "tessera.direct_writer"
_DISCONNECT: Final[dict[str, Any]] = {"type": "http.disconnect"}
_BODILESS: Final = frozenset({204, 304})
_COMMENT: Final = b":\n\n"


class Connection(Protocol):
    """What a cycle needs of `HTTP11Protocol`."""

    transport: asyncio.Transport
    write_paused: bool

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every response."""

    def write(self, data: bytes) -> None:
        """Write to the connection."""

    async def drain(self) -> None:
        """Wait until the transport accepts data or the connection has ended."""

    def resume_reading(self) -> None:
        """Read again after an unread body had become too large."""

    def can_skip_body(self, cycle: Cycle) -> bool:
        """Return whether the rest of the request's body is small enough to skip it after the response."""

    def on_response_complete(self, cycle: Cycle) -> None:
        """Continue with the next request, or close the connection."""

    def fail(self, cycle: Cycle) -> None:
        """End a request whose application failed."""


class Cycle:
    """A request and its response. Its connection feeds it the body; the application calls `receive` and `send`.

    Args:
        connection: that received the request.
        scope: of the request.
        keep_alive: whether the connection may serve another request afterwards.
        expects_continue: whether the client waits for `100 Continue` before it sends the body.

    Attributes:
        keep_alive: as given, until something requires that the connection is closed.
        more_body: whether the body has not arrived completely.
        buffered: bytes of the body that arrived and were not received yet.
        disconnected: whether nothing can be received or sent any more.
        started: whether the response has begun.
        complete: whether the response has ended.
        writer: writes parts of the body directly.
    """

    __slots__ = (
        "_arrived", "_chunked", "_connection", "_expected", "_expects_continue", "_has_events", "_head", "_parts",
        "_received_all", "buffered", "complete", "disconnected", "keep_alive", "more_body", "scope", "started",
        "writer",
    )  # fmt: skip

    def __init__(
        self, connection: Connection, scope: Scope, *, keep_alive: bool, expects_continue: bool
    ) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.more_body = True
        self.buffered = 0
        self.disconnected = False
        self.started = False
        self.complete = False
        self.writer = DirectWriter(connection.transport)
        self._connection = connection
        self._expects_continue = expects_continue
        self._parts: list[bytes] = []
        self._arrived: asyncio.Event | None = None
        self._received_all = False
        self._chunked = False
        self._has_events = False
        self._expected: int | None = None
        self._head = b""

    async def run(self, app: ASGIApp) -> None:
        """Serve the request."""
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:  # the server is stopping
            self._connection.fail(self)
            raise
        except Exception:
            log.exception("a request failed")
            self._connection.fail(self)
        else:
            if not (self.complete or self.disconnected):
                log.error("the application returned without completing its response")
                self._connection.fail(self)

    # What the connection calls.

    def feed(self, data: bytes) -> None:
        """Take a part of the body."""
        self._parts.append(data)
        self.buffered += len(data)
        self._wake()

    def end_body(self) -> None:
        """Take the end of the body."""
        self.more_body = False
        self._wake()

    def disconnect(self) -> None:
        """Take note that nothing can be received or sent any more."""
        self.disconnected, self.writer.is_open = True, False
        self._wake()

    def harmless(self) -> bytes:
        """Return what a client that reads the response takes for nothing; empty if there is no such thing now.

        Source: RFC 9110, section 15.2 (interim responses, which HTTP/1.0 does not have); the HTML standard, section
        9.2.5 (comments in an event stream).
        """
        if not self.started:
            return replies.CONTINUE if self.scope["http_version"] == "1.1" else b""
        if self.complete or not self._has_events:
            return b""
        return b"%x\r\n%b\r\n" % (len(_COMMENT), _COMMENT) if self._chunked else _COMMENT

    def allow_direct(self, writable: bool) -> None:
        """Take note of whether the transport accepts data."""
        self.writer.is_open = writable and self._chunked and self.started and not self.disconnected

    def _wake(self) -> None:
        if self._arrived is not None:
            self._arrived.set()

    # What the application calls.

    async def receive(self) -> Message:
        """Return the next part of the body, or wait until the client has disconnected or the response is complete."""
        if self._expects_continue:
            self._expects_continue = False
            # Else the client has sent the body without asking.
            waits = self.more_body and not self._parts
            if waits and not self.started:
                self._connection.write(replies.CONTINUE)
        while not (self.disconnected or self.complete):
            if self._parts or not (self.more_body or self._received_all):
                return self._next_part()
            self._connection.resume_reading()
            if self._arrived is None:
                self._arrived = asyncio.Event()
            self._arrived.clear()
            await self._arrived.wait()
        return _DISCONNECT.copy()

    def _next_part(self) -> Message:
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts, self.buffered = [], 0
        self._received_all = not self.more_body
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        """Send the head or a part of the body. Returns when the transport accepts data, or the client is gone."""
        if self._connection.write_paused and not self.disconnected:
            await self._connection.drain()
        if self.disconnected:
            return
        if not self.started:
            assert message["type"] == "http.response.start", message["type"]
            self._start(message)
        else:
            assert message["type"] == "http.response.body", message["type"]
            assert not self.complete, "the response is complete"
            self._send_body(message.get("body", b""), more=message.get("more_body", False))

    def _start(self, message: Message) -> None:
        self.started = True
        connection, status = self._connection, message["status"]
        bodiless = self.scope["method"] == "HEAD" or status in _BODILESS
        if self.more_body and self.keep_alive:
            self.keep_alive = not self._expects_continue and connection.can_skip_body(self)
        lines = [b"%b: %b" % field for field in connection.default_headers]
        length, closing = None, False
        for name, value in message.get("headers", ()):
            lowered = name.lower()
            if lowered == b"content-length":
                length = int(value)
            elif lowered == b"connection" and b"close" in value.lower():
                self.keep_alive, closing = False, True
            elif lowered == b"content-type":
                self._has_events = not bodiless and value.startswith(b"text/event-stream")
            lines.append(b"%b: %b" % (name, value))
        if length is None and not bodiless:
            if self.scope["http_version"] == "1.1":
                self._chunked = True
                lines.append(b"transfer-encoding: chunked")
            else:
                self.keep_alive = False  # the end of the connection is the end of the body
        if not (self.keep_alive or closing):
            lines.append(b"connection: close")
        head = b"\r\n".join(lines)
        breaks = len(lines) - 1
        if head.count(b"\n") != breaks or head.count(b"\r") != breaks or b"\0" in head:
            raise RuntimeError("a response header contains a control character")
        head = b"%b%b\r\n\r\n" % (replies.status_line(status), head)
        self._expected = 0 if bodiless else length
        if length is None or bodiless:
            connection.write(head)
            self.allow_direct(not connection.write_paused)
        else:
            self._head = head  # the body follows at once: one packet

    def _send_body(self, body: bytes, *, more: bool) -> None:
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                data += b"0\r\n\r\n"
        elif self._expected is None:
            data = body
        elif self.scope["method"] == "HEAD":
            data = b""
        else:
            self._expected -= len(body)
            if self._expected < 0 or (self._expected and not more):
                raise RuntimeError("the body has another length than Content-Length")
            data, self._head = self._head + body, b""
        if data:
            self._connection.write(data)
        if not more:
            self.complete, self.writer.is_open = True, False
            self._wake()
            self._connection.on_response_complete(self)


class DirectWriter:
    """Writes to the connection of one response, once the response has begun, without a coroutine.

    Applies HTTP's chunked transfer coding.

    Attributes:
        is_open: whether a part of the body may be written now; set by the response's `Cycle`.
    """

    __slots__ = ("_transport", "is_open")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.is_open = False
        self._transport = transport

    def write(self, data: bytes) -> bool:
        """Write a part of the body other than the last one.

        Args:
            data: at least one byte.

        Returns:
            Whether it was written. If not, await `send` instead: the client is too slow, or has disconnected.
        """
        if not self.is_open:
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


def install_direct_writer(cycle: Cycle) -> None:
    """Put a direct writer into the scope of a request."""
    cycle.scope[_KEY] = cycle.writer


def direct_writer(scope: Scope) -> DirectWriter | None:
    """Return the direct writer of a request's connection, or None if another server runs the application."""
    return scope.get(_KEY)
