"""Starts requests that arrive together one by one, with passes of the event loop in between.

Reading a request and submitting it to the engine takes the event loop as long as sending a step's tokens to dozens of
streams. Without this, requests that arrive together would all start before the loop looks at its sockets again, and a
step's tokens that arrived in the meantime would wait for all of them.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING, Final

from server.http.edge.probes import HEALTH_PATHS

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_PASSES_BETWEEN_STARTS: Final = 4
"""uvloop accepts one connection in a pass. With a start in every pass, what arrives behind a burst of connections, such
as a health check, would wait in the queue of the listening socket until each of them has started its request."""


class FairStart:
    """ASGI middleware that starts requests one by one in order of arrival, with passes of the event loop in between.

    Health checks do not wait.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._started_one = False  # in the last passes
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection; HTTP requests may wait before they start."""
        if scope["type"] == "http" and scope["path"] not in HEALTH_PATHS:
            await self._wait()
        await self._app(scope, receive, send)

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        if self._started_one:
            start = loop.create_future()
            self._waiting.append(start)
            try:
                await start
            except asyncio.CancelledError:
                if not start.cancelled():  # its start was due in this pass: start another request
                    self._start_next()
                raise
        self._started_one = True
        self._pass(_PASSES_BETWEEN_STARTS, loop)

    def _pass(self, left: int, loop: asyncio.AbstractEventLoop) -> None:
        """Start the next request after as many passes, in each of which the loop looks at its sockets."""
        if left:
            loop.call_soon(self._pass, left - 1, loop)
        else:
            self._start_next()

    def _start_next(self) -> None:
        while self._waiting:
            start = self._waiting.popleft()
            if not start.done():
                start.set_result(None)
                return
        self._started_one = False
