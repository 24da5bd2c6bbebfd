"""Registers the requests in progress; refuses requests, and has connections closed, while the service ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from server.errors import StoppingError, TesseraError
from server.http.edge.probes import PROBES
from server.http.lifecycle import Lifecycle, Stage
from server.http.request_id import current_request
from server.http.responses import ErrorBody, error_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_CLOSE = (b"connection", b"close")
_SERVED_TO_THE_END = PROBES | {"/abort"}
"""Requests in progress may be aborted while new ones are refused."""


class DrainMiddleware:
    """ASGI middleware for the stages of `server.http.lifecycle`; needs `RequestIdMiddleware`.

    Args:
        app: the application.
        lifecycle: the current stage.
        render: returns the status and body of an error for a path, in its dialect.
    """

    def __init__(
        self, app: ASGIApp, lifecycle: Lifecycle, render: Callable[[str, TesseraError], ErrorBody]
    ) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._render = render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        lifecycle = self._lifecycle
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        def send_last(message: Message) -> Awaitable[None]:
            # When the response begins, not when its request did: clients must not use the connection again.
            if lifecycle.is_draining and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), _CLOSE]
            return send(message)

        if scope["path"] in _SERVED_TO_THE_END:
            await self._app(scope, receive, send_last)
        elif lifecycle.stage >= Stage.REFUSING:
            await self._refuse(scope, receive, send_last)
        else:
            await self._serve(scope, receive, send_last)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        lifecycle = self._lifecycle
        task = asyncio.current_task()
        assert task is not None
        lifecycle.add_request(task)
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not lifecycle.is_ending:
                raise
            # The service ends; the server would log the exception. A response that has begun has been ended.
            if not current_request().status:
                await self._refuse(scope, receive, send)
        finally:
            lifecycle.remove_request(task)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = StoppingError()
        await error_response(error, self._render(scope["path"], error))(scope, receive, send)
