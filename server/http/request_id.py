"""Identifies each request by the client's `X-Request-Id` or a generated id, and sends the id with every response."""

from __future__ import annotations

import contextvars
import re
import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from server.http.edge.client_name import client_of_address
from server.http.edge.key_limits import NO_LIMITS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from server.engine.core.request import AdapterRef

MAX_ID_CHARACTERS = 128

CLIENT_CLOSED = 499
"""Status that stands for a response that its client did not wait for; it is logged, never sent."""

_KEY = "tessera.request"
_HEADER = b"x-request-id"
_is_valid = re.compile(rb"[\x20-\x7e]{1,%d}" % MAX_ID_CHARACTERS).fullmatch


class RequestFigures(NamedTuple):
    """What the access log shows of a request that generates.

    Attributes:
        prompt_tokens: tokens of the prompts; like the next three, None if nothing was submitted to the engine.
        cached_tokens: prompt tokens taken from the prefix cache.
        output_tokens: tokens of the answer.
        queue_ms: how long the first completion waited in the engine.
        ttft_ms: time until the first token; None if there was none.
        outcome: how the request ended, as in the metrics.
    """

    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    queue_ms: float | None
    ttft_ms: float | None
    outcome: str | None

    def __str__(self) -> str:
        """Return `name=value` of all figures, separated by spaces."""
        if self.prompt_tokens is None or self.ttft_ms is None:
            return " ".join([f"{name}={value}" for name, value in self.fields().items()])
        return (
            f"prompt_tokens={self.prompt_tokens} cached_tokens={self.cached_tokens} "
            f"output_tokens={self.output_tokens} queue_ms={self.queue_ms:.1f} ttft_ms={self.ttft_ms:.1f} "
            f"outcome={self.outcome}"
        )

    def fields(self) -> dict[str, Any]:
        """Return the figures that are not None."""
        return {
            name: round(value, 1) if isinstance(value, float) else value
            for name, value in self._asdict().items()
            if value is not None
        }


class CurrentRequest:
    """State of a request that is being answered.

    Attributes:
        id: the client's id, or a generated one. Several requests may have the same id.
        arrived: when the request arrived, `time.monotonic` seconds.
        body_bytes: size of its body; 0 until it was read.
        status: of the response; None until it begins.
        disconnected: whether the client disconnected before the end of the response.
        figures: returns the figures of a request that generates; None for others.
        client: who sent it, for equal shares: a digest of its API key, else `client_of_address`.
        limits: what the operator allows its API key.
        cache_namespace: names the prefix caches of its API key; None if the request shares those of all requests.
        operation: of a request that generates, in OpenTelemetry's terms; None until its body was accepted.
        model: the name that the request gives the model; None for none.
        adapter_name: the adapter that the request chooses; None for none.
        adapter: that adapter, once it was found.
        deadline: when the request must have ended, `time.monotonic` seconds; None for never, and until its body was
            accepted.
    """

    __slots__ = (
        "adapter", "adapter_name", "arrived", "body_bytes", "cache_namespace", "client", "deadline", "disconnected",
        "figures", "id", "limits", "model", "operation", "status",
    )  # fmt: skip

    def __init__(self, request_id: str, client: str = "") -> None:
        self.id = request_id
        self.client = client
        self.limits = NO_LIMITS
        self.arrived = time.monotonic()
        self.body_bytes = 0
        self.status: int | None = None
        self.disconnected = False
        self.figures: Callable[[], RequestFigures] | None = None
        self.cache_namespace: bytes | None = None
        self.operation: str | None = None
        self.model: str | None = None
        self.deadline: float | None = None
        self.adapter_name: str | None = None
        self.adapter: AdapterRef | None = None


_current: contextvars.ContextVar[CurrentRequest] = contextvars.ContextVar(_KEY)


def current_request() -> CurrentRequest:
    """Return the request that the calling task is answering. Outside of one, the result is new and has an empty id."""
    return _current.get(None) or CurrentRequest("")


def request_id(scope: Scope) -> str:
    """Return the id of a request that has passed `RequestIdMiddleware`."""
    request: CurrentRequest = scope[_KEY]
    return request.id


class RequestIdMiddleware:
    """ASGI middleware that gives each request its id and adds the id to the headers of the response.

    It touches only the first message of a response, so a stream's frames cost nothing here.

    Args:
        app: the application.
        headers: names of a second header with the id, by the prefix of the request's path.
    """

    def __init__(self, app: ASGIApp, headers: Mapping[str, bytes]) -> None:
        self._app = app
        self._headers = tuple(headers.items())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        value = _given(scope) or secrets.token_hex(16).encode("ascii")
        path, more = scope["path"], self._headers
        scope[_KEY] = request = CurrentRequest(value.decode("ascii"), client_of_address(scope))

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                ids = [(name, value) for prefix, name in more if path.startswith(prefix)]
                message["headers"] = [*message.get("headers", ()), (_HEADER, value), *ids]
            return send(message)

        token = _current.set(request)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            _current.reset(token)


def _given(scope: Scope) -> bytes | None:
    """Return the client's id; None if there is none, or it is too long or not printable ASCII."""
    for name, value in scope["headers"]:
        if name == _HEADER:
            return value if _is_valid(value) else None
    return None
