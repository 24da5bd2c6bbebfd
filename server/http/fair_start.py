"""Lets requests begin one after the other, so that what others wait for is sent in between.

To read a request and hand it to the engine takes the event loop as long as to send a step's tokens to dozens of
streams. Of requests that come together all would begin before the loop looks at its sockets again, and a step's tokens,
which have come meanwhile, would wait for them all.
"""

from __future__ import annotations

import asyncio
import collections
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class InTurn:
    """Wraps an application: each request begins in a pass of the event loop of its own, in the order of arrival."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._taken = False
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection of ASGI once it is its turn."""
        if scope["type"] == "http":
            await self._take()
        await self._app(scope, receive, send)

    async def _take(self) -> None:
        loop = asyncio.get_running_loop()
        if self._taken:
            turn = loop.create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it was this one's turn already
                    self._pass_on()
                raise
        self._taken = True
        loop.call_soon(self._pass_on)  # in the next pass, which looks at the sockets first

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._taken = False
