"""Starts at most one request in each pass of the event loop.

Reading a request and submitting it to the engine takes the event loop as long as sending a step's tokens to dozens of
streams. Without this, requests that arrive together would all start before the loop looks at its sockets again, and a
step's tokens that arrived in the meantime would wait for all of them.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class FairStart:
    """ASGI middleware that starts each request in its own pass of the event loop, in order of arrival."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._started_one = False  # in this pass
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection; HTTP requests may wait before they start."""
        if scope["type"] == "http":
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
        # Runs in the next pass, after the loop has looked at its sockets.
        loop.call_soon(self._start_next)

    def _start_next(self) -> None:
        while self._waiting:
            start = self._waiting.popleft()
            if not start.done():
                start.set_result(None)
                return
        self._started_one = False
