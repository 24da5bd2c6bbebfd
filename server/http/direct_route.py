"""Calls a route's function without FastAPI's handling of parameters, which takes a tenth of a small request's time."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.routing import Match

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send


class DirectRoute(APIRoute):
    """A route whose function takes the request or nothing, and returns a response.

    FastAPI matches and documents it; the function reads body, query and headers itself. For the arguments see
    `APIRoute`.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Awaitable[Response]],
        **options: Any,  # noqa: ANN401 - those of FastAPI's route
    ) -> None:
        super().__init__(path, endpoint, **options)
        parameters = list(inspect.signature(endpoint).parameters)
        assert parameters in ([], ["request"]), f"{path} has parameters for FastAPI to fill"
        assert not self.dependant.dependencies, f"{path} has dependencies"

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            response = await (endpoint(Request(scope, receive, send)) if parameters else endpoint())
            await response(scope, receive, send)

        # Without the error handlers of a route: those of the application handle the same errors.
        self.app = serve

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request; a path without parameters, of an application that is not mounted, is compared directly."""
        if self.param_convertors or scope.get("root_path"):
            return super().matches(scope)
        if scope["path"] != self.path or scope["type"] != "http":
            return Match.NONE, {}
        allowed = not self.methods or scope["method"] in self.methods
        found = Match.FULL if allowed else Match.PARTIAL
        return found, {"endpoint": self.endpoint, "path_params": {}, "route": self}
