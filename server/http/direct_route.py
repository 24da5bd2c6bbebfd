"""Calls a route's function without FastAPI's handling of parameters, which takes a tenth of a small request's time."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from fastapi.routing import APIRoute
from starlette.routing import Match, request_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Scope


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

        async def call(request: Request) -> Response:
            return await (endpoint(request) if parameters else endpoint())

        self.app = request_response(call)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request. Most routes that a request passes before its own have another path without parameters."""
        if not self.param_convertors and scope["path"] != self.path and not scope.get("root_path"):
            return Match.NONE, {}
        return super().matches(scope)
