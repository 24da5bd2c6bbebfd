"""JSON responses and error responses. An error response never contains a traceback or text of the prompt."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from server.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    ClientError,
    MethodNotAllowedError,
    NotFoundError,
    OverloadedError,
    TesseraError,
    UnauthorizedError,
)
from server.http.request_id import current_request
from server.http.unknown_routes.answer import UnknownRoutes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.types import Scope, Send

Headers: TypeAlias = list[tuple[bytes, bytes]]
JSON_HEADER = (b"content-type", b"application/json")
ErrorBody: TypeAlias = tuple[int, msgspec.Struct]
"""Status and JSON body of an error response."""

_encode = msgspec.json.Encoder().encode
# After these errors the rest of the body is not read, so the connection cannot be reused.
_CLOSING = (BodyTooLargeError, BodyTimeoutError)


def header(name: bytes, value: object) -> tuple[bytes, bytes]:
    """Encode a header for ASGI."""
    return name, str(value).encode("ascii")


def warnings_header(warnings: Sequence[str]) -> Headers:
    """Render the header that lists accepted fields without effect, as a JSON list in ASCII; none without warnings."""
    return [header(b"x-tessera-warnings", json.dumps(warnings))] if warnings else []


def json_response(value: object, status: int = 200) -> Response:
    """Make a JSON response from a msgspec record or a list of records."""
    return Response(_encode(value), status, media_type="application/json")


def error_response(error: TesseraError, body: ErrorBody) -> Response:
    """Make the response to a request that failed before its response began."""
    status, record = body
    response = json_response(record, status)
    if error.retry_after is not None:
        response.headers["retry-after"] = str(error.retry_after)
    if isinstance(error, MethodNotAllowedError):
        response.headers["allow"] = ", ".join(error.allowed)
    if isinstance(error, UnauthorizedError):
        response.headers["www-authenticate"] = "Bearer"
    if isinstance(error, _CLOSING):
        response.headers["connection"] = "close"
    return response


async def send_json(send: Send, body: bytes, headers: Headers) -> None:
    """Send a complete response with status 200."""
    headers = [*headers, JSON_HEADER, header(b"content-length", len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def install_error_handlers(
    app: FastAPI,
    render: Callable[[str, TesseraError], ErrorBody],
    hold: Callable[[str], Awaitable[None]],
) -> None:
    """Install handlers that respond to every error that reaches the application.

    Args:
        app: the application.
        render: returns the response's status and body for a request's path and an error.
        hold: returns when the refusal of a client's request may be answered.
    """
    unknown = UnknownRoutes(app.routes)

    def respond(request: Request, error: TesseraError) -> Response:
        return error_response(error, render(request.scope["path"], error))

    async def on_ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, TesseraError)
        if isinstance(error, OverloadedError):
            await hold(current_request().client)
        return respond(request, error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return respond(request, _of_status(error.status_code, app.routes, request.scope, unknown))

    async def on_bug(request: Request, _error: Exception) -> Response:
        # Starlette raises the error again after this response, and the server logs it.
        return respond(request, TesseraError())

    app.add_exception_handler(TesseraError, on_ours)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_bug)


def _of_status(
    status: int, routes: Sequence[BaseRoute], scope: Scope, unknown: UnknownRoutes
) -> TesseraError:
    if status == 404:
        return NotFoundError(unknown.message(scope["path"]))
    if status == 405:
        allowed = _allowed_methods(routes, scope)
        return MethodNotAllowedError(f"this route answers {', '.join(allowed)} only", allowed)
    return ClientError("the request cannot be served")


def _allowed_methods(routes: Sequence[BaseRoute], scope: Scope) -> tuple[str, ...]:
    """Return the methods of all routes with this path. Starlette itself reports only those of the first route."""
    methods: set[str] = set()
    for route in routes:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return tuple(sorted(methods))
