"""Sends JSON, and turns every error into it: one shape, no traceback, nothing of the request repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    TesseraError,
)
from server.http.dialects.tgi.replies import ErrorReply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.types import Scope, Send

_encode = msgspec.json.Encoder().encode
# What is left of the body is not worth reading.
_CLOSING = (BodyTooLargeError, BodyTimeoutError)


def header(name: str, value: object) -> tuple[bytes, bytes]:
    """One header as ASGI has it."""
    return name.encode("ascii"), str(value).encode("ascii")


def json_reply(value: object, status: int = 200) -> Response:
    """A response with a msgspec record, or a list of them."""
    return Response(_encode(value), status, media_type="application/json")


async def send_json(
    send: Send, body: bytes, headers: list[tuple[bytes, bytes]], status: int = 200
) -> None:
    """Send a complete response.

    Args:
        send: of the ASGI server.
        body: encoded JSON.
        headers: beside type and length.
        status: HTTP status code.
    """
    headers = [
        *headers,
        (b"content-type", b"application/json"),
        header("content-length", len(body)),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: TesseraError) -> None:
    """Send the complete response to a request that failed before its answer began."""
    body = _encode(ErrorReply(error.message, error.error_type))
    headers = [header(name, value) for name, value in _error_headers(error).items()]
    await send_json(send, body, headers, error.status)


def error_reply(error: TesseraError) -> Response:
    """The response to a request that failed before its answer began."""
    response = json_reply(ErrorReply(error.message, error.error_type), error.status)
    response.headers.update(_error_headers(error))
    return response


def _error_headers(error: TesseraError) -> dict[str, str]:
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if isinstance(error, MethodNotAllowedError):
        headers["allow"] = ", ".join(error.allowed)
    if isinstance(error, _CLOSING):
        headers["connection"] = "close"
    return headers


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error that reaches the app, whoever raised it."""

    async def on_ours(_request: Request, error: Exception) -> Response:
        assert isinstance(error, TesseraError)
        return error_reply(error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_reply(_of_status(error.status_code, app.routes, request.scope))

    async def on_bug(_request: Request, _error: Exception) -> Response:
        # Starlette raises the error again once this is sent, and the server logs it.
        return error_reply(TesseraError())

    app.add_exception_handler(TesseraError, on_ours)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_bug)


def allowed_methods(routes: Sequence[BaseRoute], scope: Scope) -> tuple[str, ...]:
    """Methods that a path has, over all routes: Starlette itself names only those of the first."""
    methods: set[str] = set()
    for route in routes:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return tuple(sorted(methods))


def _of_status(status: int, routes: Sequence[BaseRoute], scope: Scope) -> TesseraError:
    if status == 404:
        return NotFoundError("there is no such route")
    if status == 405:
        allowed = allowed_methods(routes, scope)
        return MethodNotAllowedError(f"this route answers {', '.join(allowed)} only", allowed)
    return ClientError("the request cannot be served")
