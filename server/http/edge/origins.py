"""Refuses requests that pages of other origins make a browser send.

A browser asks for permission (CORS) before it sends JSON for a page of another origin, but sends a form or plain text
without asking. The page could not read the answer, but the request would run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.errors import ForbiddenError, TesseraError
from server.http.edge.hosts import given_host
from server.http.responses import ErrorBody, error_response

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from starlette.types import ASGIApp, Receive, Scope, Send

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN_SITES = (b"same-origin", b"none")  # none: the user's own action


class OriginMiddleware:
    """ASGI middleware that refuses requests from pages of other origins; passes `send` through.

    A request passes if its Origin is allowed; else if `Sec-Fetch-Site`, which no page can set, says that it is of the
    service's own origin; else, without that header, if it has no Origin or that of its Host. Programs other than
    browsers send neither header.

    Args:
        app: the application.
        origins: allowed ones, or `*` for all.
        render: returns the status and body of the refusal for a path, in its dialect.
    """

    def __init__(
        self, app: ASGIApp, origins: Iterable[str], render: Callable[[str, TesseraError], ErrorBody]
    ) -> None:
        self._app = app
        self._origins = frozenset(origin.lower().encode() for origin in origins)
        self._render = render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if (
            scope["type"] != "http"
            or scope["method"] in _SAFE_METHODS
            or b"*" in self._origins
            or self._is_allowed(scope)
        ):
            await self._app(scope, receive, send)
            return
        error = ForbiddenError("the page's origin is not allowed: see --cors-allow-origin")
        response = error_response(error, self._render(scope["path"], error))
        await response(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        origin = site = None
        for name, value in scope["headers"]:
            if name == b"origin":
                origin = value.lower()
            elif name == b"sec-fetch-site":
                site = value
        if origin in self._origins:
            return True
        if site is not None:
            return site in _OWN_SITES
        return origin is None or origin.partition(b"://")[2] == (given_host(scope) or b"")
