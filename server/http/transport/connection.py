"""HTTP/1.1 on one connection: parses requests with httptools, within limits, and runs them one after another."""

from __future__ import annotations

import asyncio
import collections
import functools
import socket
import urllib.parse
from typing import TYPE_CHECKING, Any

import httptools

from server.http.edge.client_name import client_of_address
from server.http.transport import replies
from server.http.transport.connections import Connections
from server.http.transport.cycle import Cycle, install_direct_writer

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Scope
    from uvicorn import Config
    from uvicorn.server import ServerState

    from server.http.config import HTTPConfig

MAX_BUFFERED_BODY = 1 << 16
"""Bytes of a body that may wait for the application before reading pauses. What one read returns (256 KB with uvloop)
comes on top: that is what an unread body takes at most."""

MAX_PIPELINED = 8
"""Requests that may wait behind the running one, with `MAX_BUFFERED_BODY` bytes in each body."""

MAX_SKIPPED_BODY = 1 << 18
"""An unread rest of a body up to this size is skipped; before a larger one the connection is closed."""

_OVERHEAD_PER_BODY_BYTE = 8  # a chunk of one byte takes six more
_LINGER_SECONDS = 2.0
_AT_ONCE_SECONDS = 1.0
_FIRST_PROBE_SECONDS = 0.01
_PROBE_SECONDS = 1.0
_ASK_SECONDS = 5.0
_NEVER = float("inf")


class _RefusedError(Exception):
    """Ends the parsing of a connection."""


def protocol_factory(config: HTTPConfig) -> Callable[..., HTTP11Protocol]:
    """Return what uvicorn calls for each connection: `uvicorn.Config(http=protocol_factory(config))`.

    Call it when the limit of descriptors is final.
    """
    return functools.partial(HTTP11Protocol, Connections(config))


class HTTP11Protocol(asyncio.Protocol):
    """One connection.

    The connection is always read, so that its end is noticed while a request runs (`eof_received`), except while an
    unread body is larger than `MAX_BUFFERED_BODY`. Requests that arrive while another runs wait within `MAX_PIPELINED`;
    what exceeds it is dropped, and the connection is closed after the responses before it.

    Offers to upgrade the connection are ignored, as HTTP allows: Java's HttpClient offers HTTP/2 (`Upgrade: h2c`) with
    every request. The parser stops at the end of such a head; it is parsed a second time, without the offer.

    Source: RFC 9110, section 7.8 (Upgrade); RFC 9112, sections 9.3.2 (pipelining) and 9.6 (closing).

    Args:
        connections: all connections of the front end.
        config: of uvicorn; has the application.
        server_state: of uvicorn; it waits for the connections and tasks in it before it stops.
        app_state: unused; the application has no lifespan.
        _loop: the event loop; None for the running one. The name is uvicorn's.

    Attributes:
        transport: of the connection.
        write_paused: whether the transport's buffer is full.
    """

    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],  # noqa: ARG002 - of uvicorn
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.transport: asyncio.Transport
        self.write_paused = False
        self._loop = _loop or asyncio.get_running_loop()
        self._app = config.loaded_app
        self._connections = connections
        self._limits = connections.config
        self._state = server_state
        self._parser = httptools.HttpRequestParser(self)
        self._scope: Scope = {}
        # The request that runs, those that wait for it, and the one whose body arrives, which is the last of these.
        self._running: Cycle | None = None
        self._pipelined: collections.deque[Cycle] = collections.deque()
        self._arriving: Cycle | None = None
        # The message that is parsed.
        self._in_head = False
        self._began = False  # in this call of `data_received`
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False
        self._hosts = 0
        self._header_bytes = 0
        self._fed_bytes = 0
        self._body_bytes = 0
        # No more requests are read. If one was refused, the client may still be sending, and `_final_reply` is written
        # after the responses to the requests before it.
        self._stopped = False
        self._refused = False
        self._lingering = False
        self._final_reply = b""
        self._read_paused = False
        self._drained: asyncio.Event | None = None
        self._deadline = _NEVER
        self._asked = 0.0
        self._unsent = 0
        self._unsent_since = 0.0

    # Called by the event loop.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # always TCP
        """Admit the connection, or refuse it."""
        self.transport = transport
        client, server = (transport.get_extra_info(name) for name in ("peername", "sockname"))
        address = tuple(client[:2]) if client else None
        if not self._connections.admit(self, client_of_address({"client": address})):
            self._stopped = True
            transport.write(replies.TOO_MANY_CONNECTIONS)
            transport.close()
            return
        self._state.connections.add(self)  # type: ignore[arg-type] # uvicorn calls `shutdown` only
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http" if transport.get_extra_info("sslcontext") is None else "https",
            "client": address,
            "server": tuple(server[:2]) if server else None,
            "root_path": "",
        }
        self._wait(self._limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - of asyncio
        """End all requests of the connection."""
        self._state.connections.discard(self)
        self._connections.remove(self)
        self._stopped = True
        for cycle in (self._running, *self._pipelined):
            if cycle is not None:
                cycle.disconnect()
        self._pipelined.clear()
        self.resume_writing()
        # These refer to this object: without them it is freed at once, and not by a garbage collection, which stops the
        # event loop for as long as tens of requests take.
        del self._parser
        self._running = self._arriving = None

    def data_received(self, data: bytes) -> None:
        """Parse data of the connection."""
        if self._stopped:
            self._fed_bytes += len(data)
            if self._fed_bytes > MAX_SKIPPED_BODY and self._lingering:
                self._pause_reading()
            return
        self._began = False
        try:
            while data:
                try:
                    self._parser.feed_data(data)
                    break
                except httptools.HttpParserUpgrade as offer:
                    rest = data[offer.args[0] :]
                    data = self._head_without_offer() + rest
                    self._parser = httptools.HttpRequestParser(self)
            self._check_overhead(len(data))
        except _RefusedError:
            pass
        except httptools.HttpParserError:
            if not self._stopped:
                self._refuse(replies.MALFORMED, "malformed requests")

    def eof_received(self) -> bool:
        """Take note that the client sends nothing more: it has left, or waits for the answers and has closed one side.

        Only something written to it can tell: a client that has left resets the connection. HTTP/1.0 has nothing that
        may be written before the response. There, who has closed one side did so with the end of the request, and who
        does it later has left.

        Returns:
            Whether the connection stays open for the answers.
        """
        cycle = self._running
        if cycle is None or cycle.complete or self._arriving or self._in_head or self._refused:
            return False
        is_at_once = self._loop.time() < self._asked + _AT_ONCE_SECONDS
        if not (cycle.harmless() or cycle.started or is_at_once):
            return False
        self._stopped = True
        self._ask(_ASK_SECONDS)
        self._probe(_FIRST_PROBE_SECONDS)
        return True

    def pause_writing(self) -> None:
        """Take note that the transport's buffer is full."""
        self.write_paused = True
        if self._running is not None:
            self._running.allow_direct(False)

    def resume_writing(self) -> None:
        """Take note that the transport accepts data."""
        self.write_paused = False
        if self._running is not None:
            self._running.allow_direct(True)
        if self._drained is not None:
            self._drained.set()
            self._drained = None

    # Called by the parser.

    def on_message_begin(self) -> None:
        """Begin the head of a request."""
        if len(self._pipelined) >= MAX_PIPELINED:
            self._refuse(b"", "connections with too many pipelined requests")
            raise _RefusedError
        self._in_head = self._began = True
        self._url = b""
        self._headers = []
        self._expects_continue = False
        self._hosts = 0
        self._header_bytes = self._fed_bytes = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL."""
        self._url += url
        if len(self._url) > self._limits.max_url_bytes:
            self._refuse(replies.URL_TOO_LONG, "requests with a long URL")
            raise _RefusedError

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header field; a field after the body, which nobody uses, is only counted."""
        self._header_bytes += len(name) + len(value) + 4
        if (
            self._header_bytes > self._limits.max_header_bytes
            or len(self._headers) >= self._limits.max_header_count
        ):
            self._refuse(replies.HEAD_TOO_LARGE, "requests with large headers")
            raise _RefusedError
        if self._in_head:
            name = name.lower()
            value = value.rstrip(b" \t")  # the parser has only removed what is before it
            if name == b"host":
                self._hosts += 1
            elif name == b"expect" and value.lower() == b"100-continue":
                self._expects_continue = True
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Run the request, or queue it behind the running one."""
        self._in_head = False
        parser = self._parser
        if parser.should_upgrade():
            return  # see `data_received`
        url = httptools.parse_url(self._url)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        version = parser.get_http_version()
        if url.host is not None:
            # The host of a target in absolute form takes the place of the header (RFC 9112, 3.2.2).
            others = [field for field in self._headers if field[0] != b"host"]
            self._headers = [(b"host", _authority(url)), *others]
        scope = {
            **self._scope,
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "headers": self._headers,
        }
        self._check_head(version)
        self._arriving = cycle = Cycle(
            self,
            scope,
            keep_alive=version == "1.1" and parser.should_keep_alive(),
            expects_continue=self._expects_continue and version == "1.1",
        )
        install_direct_writer(cycle)
        if self._running is None:
            self._run(cycle)
        else:
            self._pipelined.append(cycle)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body; it is dropped if its response is complete."""
        self._body_bytes += len(body)
        cycle = self._arriving
        if cycle is None or cycle.complete:
            return
        cycle.feed(body)
        if cycle.buffered > MAX_BUFFERED_BODY:
            if cycle is not self._running:
                self._refuse(b"", "connections with too many pipelined requests")
                raise _RefusedError
            self._pause_reading()

    def on_message_complete(self) -> None:
        """Take the end of a request."""
        cycle, self._arriving = self._arriving, None
        if cycle is None:
            return  # see `on_headers_complete`
        self._asked = self._loop.time()
        cycle.end_body()
        if not cycle.keep_alive:
            self._stopped = True  # what follows is no request
        if cycle.complete and cycle is self._running:
            self._run_next()

    # Called by cycles.

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every response."""
        return self._state.default_headers

    def write(self, data: bytes) -> None:
        """Write to the connection."""
        self.transport.write(data)

    async def drain(self) -> None:
        """Wait until the transport accepts data or the connection has ended."""
        while self.write_paused:
            if self._drained is None:
                self._drained = asyncio.Event()
            await self._drained.wait()

    def resume_reading(self) -> None:
        """Read again after an unread body had become too large."""
        if self._read_paused:
            self._read_paused = False
            self.transport.resume_reading()

    def can_skip_body(self, cycle: Cycle) -> bool:
        """Return whether the rest of the request's body is small enough to skip it after the response."""
        declared = next((v for n, v in cycle.scope["headers"] if n == b"content-length"), b"")
        return bool(declared) and int(declared) - self._body_bytes <= MAX_SKIPPED_BODY

    def on_response_complete(self, cycle: Cycle) -> None:
        """Continue with the next request, or close the connection."""
        self._state.total_requests += 1
        if self.transport.is_closing():
            return
        self.resume_reading()
        if not cycle.keep_alive:
            self._close()
        elif cycle.more_body:
            self._wait(self._limits.header_timeout)
        else:
            self._run_next()

    def fail(self, cycle: Cycle) -> None:
        """End a request whose application failed."""
        if cycle.disconnected:
            return
        if cycle.started or self.transport.is_closing():
            self.transport.close()  # an incomplete response
        else:
            cycle.started = cycle.complete = True
            self.write(replies.FAILED)
            self._close()

    # Called by `Connections` and uvicorn.

    def check(self, now: float) -> None:
        """Close the connection if it is late: with the head of a request, or in reading a response.

        Args:
            now: time of the event loop.
        """
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        elif unsent and now >= self._unsent_since + self._limits.send_timeout_seconds:
            self._connections.count("clients that stopped reading")
            self.abort()
        elif not unsent and now >= self._deadline:
            self._deadline = _NEVER
            if self._in_head and not self._stopped:
                self._refuse(replies.HEAD_TIMEOUT, "requests whose head took too long")
            else:
                self.abort()

    def has_unsent(self) -> bool:
        """Return whether the client has not yet accepted all of what was written."""
        return self.transport.get_write_buffer_size() > 0

    @property
    def has_begun(self) -> bool:
        """Whether a response has started and not ended."""
        cycle = self._running
        return cycle is not None and cycle.started and not cycle.complete

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def shutdown(self) -> None:
        """Close the connection after the running request: the server stops."""
        if self._running is None or self._running.complete:
            self.transport.close()
        else:
            self._running.keep_alive = False

    # Internal.

    def _run(self, cycle: Cycle) -> None:
        self._connections.end_wait(self)
        self._deadline = _NEVER
        self._running = cycle
        task = self._loop.create_task(cycle.run(self._app))
        task.add_done_callback(self._state.tasks.discard)
        self._state.tasks.add(task)

    def _run_next(self) -> None:
        self._running = None
        if self._pipelined:
            self._run(self._pipelined.popleft())
        elif self._stopped:
            self.write(self._final_reply)
            self._close()
        elif self._in_head:
            self._wait(self._limits.header_timeout)
        else:
            self._wait(self._limits.keep_alive_timeout)

    def _wait(self, seconds: float) -> None:
        """Wait for data for so long; the connection may be closed in favor of another."""
        self._connections.begin_wait(self)
        self._deadline = self._loop.time() + seconds

    def _pause_reading(self) -> None:
        if not self._read_paused:
            self._read_paused = True
            self.transport.pause_reading()

    def _check_head(self, version: str) -> None:
        """Refuse what the parser accepts and HTTP/1 or this server does not.

        Source: RFC 9112, sections 2.3 (versions), 3.2 (Host) and 6.1 (transfer codings).
        """
        if version not in ("1.0", "1.1"):
            raise httptools.HttpParserError("only HTTP/1.0 and HTTP/1.1 are spoken")
        if self._hosts > 1 or (self._hosts == 0 and version == "1.1"):
            raise httptools.HttpParserError("a request has one Host")
        codings = [value for name, value in self._headers if name == b"transfer-encoding"]
        if codings and (version != "1.1" or [value.lower() for value in codings] != [b"chunked"]):
            raise httptools.HttpParserError("the only transfer coding is chunked, in HTTP/1.1")

    def _check_overhead(self, size: int) -> None:
        """Count bytes that are not of a body, which the parser keeps or skips without telling.

        These are an unfinished head or header field, extensions of chunks, and trailers. What was read together with
        the beginning of the message is not counted.
        """
        if self._began:
            if self._in_head and self._running is None:
                self._wait(self._limits.header_timeout)
            return
        if not self._in_head and self._arriving is None:
            return
        self._fed_bytes += size
        limits = self._limits
        allowed = limits.max_header_bytes + limits.max_url_bytes
        if self._fed_bytes > allowed + _OVERHEAD_PER_BODY_BYTE * self._body_bytes:
            long_url = self._in_head and not self._headers and len(self._url) > limits.max_url_bytes
            self._refuse(
                replies.URL_TOO_LONG if long_url else replies.HEAD_TOO_LARGE,
                "requests with large headers",
            )

    def _refuse(self, reply: bytes, what: str) -> None:
        """Read no more requests, and close the connection after the responses to those before.

        Args:
            reply: answers the request that is refused; empty for none.
            what: counted in the log.
        """
        self._connections.count(what)
        self._stopped, self._refused, self._final_reply = True, True, reply
        refused, self._arriving = self._arriving, None
        if refused is not None and refused is self._running:
            refused.disconnect()
            if refused.started:
                self.transport.close()
                return
            self._running = None
        elif refused is not None and self._pipelined:
            self._pipelined.pop()
        if self._running is None or self._running.complete:
            self._run_next()
        elif not reply:
            (self._pipelined or [self._running])[-1].keep_alive = False

    def _ask(self, seconds: float) -> None:
        """Write what resets the connection if the client has left; once more after some seconds, and so on.

        It may leave later, and would not say so again. The time grows because clients accept few interim responses.
        """
        if self._running is not None and not self.transport.is_closing():
            self.write(self._running.harmless())
            self._loop.call_later(seconds, self._ask, 4 * seconds)

    def _probe(self, seconds: float) -> None:
        """Close the connection if the client has reset it, which nobody notices when nothing is read any more."""
        if self.transport.is_closing():
            return
        connected: socket.socket = self.transport.get_extra_info("socket")
        if connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.abort()
        else:
            self._loop.call_later(seconds, self._probe, min(2 * seconds, _PROBE_SECONDS))

    def _close(self) -> None:
        """Close the connection, but let the client read the response if it may still be sending.

        Closing a socket with unread data resets the connection, which can destroy what was written before. What comes
        is dropped for a while, and then not read any more.
        """
        if self._refused or self._arriving is not None:
            self._stopped = self._lingering = True
            self._arriving = None
            self._fed_bytes = 0
            self.transport.write_eof()
            self._wait(_LINGER_SECONDS)
        else:
            self.transport.close()

    def _head_without_offer(self) -> bytes:
        """Render the head that was just parsed.

        Raises:
            HttpParserError: it has no Upgrade field, so its method is CONNECT.
        """
        fields = [(name, value) for name, value in self._headers if name != b"upgrade"]
        if len(fields) == len(self._headers):
            raise httptools.HttpParserError("CONNECT is for proxies")
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, version)]
        lines += [b"%b: %b" % field for field in fields]
        return b"\r\n".join([*lines, b"", b""])


def _authority(url: httptools.parser.url_parser.URL) -> bytes:
    """Return host and port of a URL, as in the header Host."""
    host: bytes = b"[%b]" % url.host if b":" in url.host else url.host
    return host if url.port is None else b"%b:%d" % (host, url.port)
