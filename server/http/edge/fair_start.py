"""Starts requests that arrive together one by one, by turns of their clients, with passes of the event loop in between.

Reading a request and submitting it to the engine takes the event loop as long as sending a step's tokens to dozens of
streams. Without this, requests that arrive together would all start before the loop looks at its sockets again, and a
step's tokens that arrived in the meantime would wait for all of them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from server.http.edge.probes import HEALTH_PATHS
from server.http.load.fair_queue import FairPlaces

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

_PASSES_BETWEEN_STARTS: Final = 4
"""uvloop accepts one connection in a pass. With a start in every pass, what arrives behind a burst of connections, such
as a health check, would wait in the queue of the listening socket until each of them has started its request."""


class FairStart:
    """ASGI middleware that starts requests one by one, with passes of the event loop in between.

    Clients take turns, and the requests of one client start in order of arrival. Health checks do not wait.

    Args:
        app: the application.
        client_of: returns the client that sent a request.
    """

    def __init__(self, app: ASGIApp, client_of: Callable[[Scope], str]) -> None:
        self._app = app
        self._client_of = client_of
        self._next_start = FairPlaces(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection; HTTP requests may wait before they start."""
        if scope["type"] == "http" and scope["path"] not in HEALTH_PATHS:
            client = self._client_of(scope)
            await self._next_start.acquire(client)
            self._pass(_PASSES_BETWEEN_STARTS, asyncio.get_running_loop(), client)
        await self._app(scope, receive, send)

    def _pass(self, left: int, loop: asyncio.AbstractEventLoop, client: str) -> None:
        """Let the next request start after as many passes, in each of which the loop looks at its sockets."""
        if left:
            loop.call_soon(self._pass, left - 1, loop, client)
        else:
            self._next_start.release(client)
