"""A short way for the bytes of a stream: straight to uvicorn's transport, past the coroutines of ASGI's `send`.

A middleware leaves it in the scope; where the server is another one, there is none and ASGI's way is taken. Knows
chunked transfer coding and nothing of what is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_KEY = "tessera.wire"


class Wire:
    """Writes to the connection of one response, once the response has begun.

    Args:
        cycle: uvicorn's side of the response. What is read here of it, its own `send` reads too.
    """

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def write(self, data: bytes) -> bool:
        """Write a part of the body that is not the last.

        Args:
            data: at least one byte.

        Returns:
            Whether it was written. If not, `send` has to be awaited: the client is too slow, or gone.
        """
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return False
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class WithWires:
    """Wraps an application so that `wire_of` finds something; to be wrapped by nothing that replaces `send`."""

    def __init__(self, app: ASGIApp) -> None:
        # Not everywhere: there are no httptools on Windows.
        from uvicorn.protocols.http.httptools_impl import RequestResponseCycle  # noqa: PLC0415

        self._app = app
        self._kind = RequestResponseCycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection of ASGI."""
        cycle = getattr(send, "__self__", None)
        if isinstance(cycle, self._kind):
            scope[_KEY] = Wire(cycle)
        await self._app(scope, receive, send)


def wire_of(scope: Scope) -> Wire | None:
    """Return the short way to a request's client, where there is one."""
    return scope.get(_KEY)
