"""Answers a path with a slash at its end as the same path without it; a redirect would lose the body of a POST."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class TrailingSlashMiddleware:
    """Removes one slash from the end of a request's path, unless it is the whole path.

    Args:
        app: the ASGI application inside.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http":
            path, root = scope["path"], scope.get("root_path", "")
            if len(path) > 1 and path.endswith("/") and path[:-1] != root and path[-2] != "/":
                scope = {**scope, "path": path[:-1]}
        await self._app(scope, receive, send)
