"""Changes uvicorn's httptools protocol. This is the only module that uses uvicorn's private names.

A direct writer writes parts of a response to uvicorn's transport, without the coroutines of ASGI's `send`. It applies
HTTP's chunked transfer coding. With another server or protocol there is no direct writer, and `send` is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_KEY: Final = "tessera.direct_writer"
_INVALID: Final = "Invalid HTTP request received."


class HTTP11Protocol(HttpToolsProtocol):
    """uvicorn's protocol, except that it ignores offers to upgrade the connection, as HTTP allows.

    Java's HttpClient offers HTTP/2 (`Upgrade: h2c`) with every request. The parser stops at the end of such a head, and
    uvicorn would pass the request on without its body (https://github.com/Kludex/uvicorn/issues/2722). This class
    parses the head a second time, without the offer.

    Source: RFC 9110, section 7.8.
    """

    def data_received(self, data: bytes) -> None:
        """Parse data of the connection."""
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    data = b""
                except HttpParserUpgrade as offer:
                    data = self._head_without_offer() + data[offer.args[0] :]
                    self.parser = HttpRequestParser(self)
        except HttpParserError:
            self.logger.warning(_INVALID)
            self.send_400_response(_INVALID)

    def _should_upgrade(self) -> bool:
        """Keep uvicorn from starting a request at the first head; the second one starts it."""
        return True

    def _head_without_offer(self) -> bytes:
        """Render the head that was just parsed.

        Raises:
            HttpParserError: it has no Upgrade field, so its method is CONNECT.
        """
        fields = [(name, value) for name, value in self.headers if name != b"upgrade"]
        if len(fields) == len(self.headers):
            raise HttpParserError("CONNECT is for proxies")
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % field for field in fields]
        return b"\r\n".join([*lines, b"", b""])


class DirectWriter:
    """Writes to the connection of one response, once the response has begun.

    Args:
        cycle: uvicorn's state of the response. Its own `send` reads the same attributes.
    """

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def write(self, data: bytes) -> bool:
        """Write a part of the body other than the last one.

        Args:
            data: at least one byte.

        Returns:
            Whether it was written. If not, await `send` instead: the client is too slow, or has disconnected.
        """
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return False
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class DirectWriterMiddleware:
    """Puts a direct writer into the scope of each request. Must be the outermost middleware: it inspects `send`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        cycle = getattr(send, "__self__", None)
        if isinstance(cycle, RequestResponseCycle):
            scope[_KEY] = DirectWriter(cycle)
        await self._app(scope, receive, send)


def direct_writer(scope: Scope) -> DirectWriter | None:
    """Return the direct writer of a request's connection, or None if there is none."""
    return scope.get(_KEY)
