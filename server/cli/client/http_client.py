"""A small HTTP/1.1 client that records when each piece of a response arrives.

It parses with httptools and reuses connections, which takes a few microseconds per token
(`docs/decisions/0015-benchmark-client.md`). It supports neither redirects nor compression.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias, cast
from urllib.parse import urlsplit

import httptools

OnBody: TypeAlias = Callable[[int, bytes, float], None]
"""(status, piece of the body, `time.perf_counter()` at its arrival)."""


class RequestError(Exception):
    """A request has no complete response.

    Attributes:
        kind: the category that it is counted under.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


@dataclass(slots=True)
class Response:
    """A complete response.

    Attributes:
        status: HTTP status.
        body: the whole body; empty where a callback received the pieces.
        headers: by name in lower case; of several with one name the last.
    """

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a server.

    Attributes:
        host: name or address.
        port: TCP port.
        tls: whether the connection is encrypted.
        prefix: path before that of every request, without a slash at its end.
        headers: sent with every request.
        keep_alive: whether a connection has several requests.
    """

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    keep_alive: bool = True

    @classmethod
    def from_url(cls, url: str, headers: tuple[tuple[str, str], ...] = ()) -> Target:
        """Parse an address.

        Raises:
            ValueError: it is not an http or https address.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an address like http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname, port, tls, parts.path.rstrip("/"), headers)

    def head(self, method: str, path: str, length: int) -> bytes:
        """Render a request up to its body."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {length}",
            *(f"{name}: {value}" for name, value in self.headers),
            *(() if self.keep_alive else ("Connection: close",)),
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Client:
    """Sends requests to one target, over connections that it reuses.

    For one event loop. Opens as many connections as there are concurrent requests.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if target.tls else None

    async def request(
        self, method: str, path: str, body: bytes = b"", on_body: OnBody | None = None
    ) -> Response:
        """Send a request and wait for the end of its response.

        Args:
            method: HTTP method.
            path: below the target's prefix.
            body: JSON.
            on_body: called with each piece of the body on arrival; None collects them in `Response.body`.

        Raises:
            RequestError: the connection fails or breaks, or the response is not HTTP.
        """
        message = self._target.head(method, path, len(body)) + body
        while True:
            reused = bool(self._idle)
            connection = self._idle.pop() if reused else await self._connect()
            try:
                response = await connection.exchange(message, on_body)
            except _UnansweredError as error:
                if reused:  # the server may close an idle connection at any time
                    continue
                raise RequestError("connection lost", str(error)) from error
            except BaseException:
                connection.close()
                raise
            if not self._target.keep_alive:
                connection.close()
            elif connection.reusable:
                self._idle.append(connection)
            return response

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> _Connection:
        loop, target = asyncio.get_running_loop(), self._target
        try:
            _, connection = await loop.create_connection(
                _Connection, target.host, target.port, ssl=self._tls
            )
        except OSError as error:
            raise RequestError("cannot connect", _reason(error)) from error
        return connection


def _reason(error: OSError) -> str:
    """Describe why there is no connection; asyncio's own words name the call and the address instead."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


class _UnansweredError(Exception):
    """The connection ended before the first byte of a response."""


class _Connection(asyncio.Protocol):
    """One connection, with at most one request at a time. Also implements the callbacks of its parser."""

    def __init__(self) -> None:
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[Response] | None = None
        self._on_body: OnBody | None = None
        self._pieces: list[bytes] = []
        self._status = 0
        self._answered = False
        self._headers: dict[str, str] = {}
        self._now = 0.0

    def exchange(self, message: bytes, on_body: OnBody | None) -> asyncio.Future[Response]:
        """Send a request; returns a future of the response."""
        self._done = asyncio.get_running_loop().create_future()
        if self._transport is None or self._transport.is_closing():
            self._fail(_UnansweredError("closed"))
            return self._done
        self._parser = httptools.HttpResponseParser(self)
        self._on_body = on_body
        self._pieces = []
        self._status = 0
        self._answered = self.reusable = False
        self._headers = {}
        self._transport.write(message)
        return self._done

    def close(self) -> None:
        """Close the connection at once, and forget its request."""
        self._done = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is of a class of its own

    def data_received(self, data: bytes) -> None:
        """Parse data; all of it has the same time of arrival."""
        self._now = time.perf_counter()
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(RequestError("not HTTP", str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        """End the response: successfully where only closing ends it, else with an error."""
        self.reusable = False
        if self._done is None or self._done.done():
            return
        has_end = "content-length" in self._headers or "transfer-encoding" in self._headers
        if error is None and self._status and not has_end:
            self._complete()
        elif self._answered:
            self._fail(RequestError("connection lost", str(error or "")))
        else:
            self._fail(_UnansweredError(str(error or "")))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Record a header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Record the status."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body."""
        if self._on_body is None:
            self._pieces.append(body)
        else:
            self._on_body(self._status, body, self._now)

    def on_message_complete(self) -> None:
        """Complete the response."""
        self.reusable = self._parser.should_keep_alive()
        self._complete()

    def _complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(Response(self._status, b"".join(self._pieces), self._headers))
        if not self.reusable and self._transport is not None:
            self._transport.close()

    def _fail(self, error: BaseException) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        if self._transport is not None:
            self._transport.abort()
