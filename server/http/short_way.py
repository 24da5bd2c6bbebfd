"""A short way to the routes whose functions take nothing: found in a table, past FastAPI's routing and dependencies.

A request waits for these before its prompt is looked at, and they find nothing that such a route could use. Routes stay
declared to FastAPI, which documents them, and answers whatever has no place in the table.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from fastapi.routing import APIRoute

from server.errors import TesseraError
from server.http.replying import error_reply

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fastapi import FastAPI
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

Table = dict[tuple[str, str], "Callable[[], Awaitable[Response]]"]
"""The function of a route by its method and path."""


def install_short_way(app: FastAPI) -> None:
    """Let an app take it, with the routes that it has now."""
    app.add_middleware(ShortWay, table=_short_routes(app))


class ShortWay:
    """Middleware that serves what is in the table and hands on the rest.

    It stands within the middleware that answers bugs. A `TesseraError` is raised where nothing was sent yet, and is
    answered here.

    Args:
        app: what has the other routes.
        table: may not be changed any more.
    """

    def __init__(self, app: ASGIApp, table: Table) -> None:
        self._app = app
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection of ASGI."""
        answer = None
        if scope["type"] == "http":
            answer = self._table.get((scope["method"], scope["path"]))
        if answer is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await answer()
            await response(scope, receive, send)
        except TesseraError as error:
            await error_reply(error)(scope, receive, send)


def _short_routes(app: FastAPI) -> Table:
    """Routes at one path whose function takes nothing; of two at one path the first counts, as with FastAPI."""
    table: Table = {}
    for route in app.routes:
        if (
            isinstance(route, APIRoute)
            and not route.param_convertors
            and not inspect.signature(route.endpoint).parameters
        ):
            for method in route.methods or ():
                table.setdefault((method, route.path), route.endpoint)
    return table
