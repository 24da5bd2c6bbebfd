"""Writes parts of a response directly to uvicorn's transport, without the coroutines of ASGI's `send`.

This is the only module that uses uvicorn's private names. They belong to its httptools protocol; with another server or
protocol there is no direct writer, and `send` is used. The writer applies HTTP's chunked transfer coding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_KEY = "tessera.direct_writer"


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
        # Imported here because httptools does not exist on Windows.
        from uvicorn.protocols.http.httptools_impl import RequestResponseCycle  # noqa: PLC0415

        self._app = app
        self._cycle_type = RequestResponseCycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        cycle = getattr(send, "__self__", None)
        if isinstance(cycle, self._cycle_type):
            scope[_KEY] = DirectWriter(cycle)
        await self._app(scope, receive, send)


def direct_writer(scope: Scope) -> DirectWriter | None:
    """Return the direct writer of a request's connection, or None if there is none."""
    return scope.get(_KEY)
