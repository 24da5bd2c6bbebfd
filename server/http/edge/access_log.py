"""Logs one line for each request that has been answered, refused or abandoned by its client.

A line never contains text of a prompt or an answer. Text from the client (the request's id, the path of an unknown
route) is quoted where it contains anything but plain characters, so that it can forge neither a field nor a line.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from server.http.request_id import CurrentRequest, current_request
from server.log import Fields

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from server.http.generation import Generation
    from server.http.metrics.records import RequestRecord

log = logging.getLogger("tessera.access")

CLIENT_CLOSED = 499
PROBES = frozenset({"/health", "/health/live", "/ping", "/metrics"})
"""Routes that monitoring requests every few seconds; logged at level debug."""

_MAX_PATH_CHARACTERS = 200


class AccessLogMiddleware:
    """ASGI middleware that logs each request at its end. It does not wrap `send`; needs `RequestIdMiddleware`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = current_request()
        try:
            await self._app(scope, receive, send)
        finally:
            level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
            if log.isEnabledFor(level):
                log.log(level, _fields(scope, request))


def _fields(scope: Scope, request: CurrentRequest) -> Fields:
    """Return the line's fields."""
    client, route = scope.get("client"), scope.get("route")
    status = request.status
    fields = Fields(
        request_id=request.id,
        client=client[0] if client else None,
        method=scope["method"],
        route=route.path if route else scope["path"][:_MAX_PATH_CHARACTERS],
        status=CLIENT_CLOSED if status is None or request.disconnected else status,
        total_ms=round(1000 * (time.monotonic() - request.arrived), 1),
    )
    if request.details is not None:
        fields |= request.details()
    return fields


def generation_fields(record: RequestRecord, generation: Generation | None) -> dict[str, object]:
    """Return the fields of a generation request.

    Args:
        record: measures the request.
        generation: its completions; None if nothing was submitted to the engine.
    """
    fields: dict[str, object] = {}
    if generation is not None:
        fields["prompt_tokens"] = generation.prompt_tokens
        fields["cached_tokens"] = generation.cached_tokens
        fields["output_tokens"] = generation.completion_tokens
        fields["queue_ms"] = round(1000 * generation.queue_seconds, 1)
    if record.first_token_seconds is not None:
        fields["ttft_ms"] = round(1000 * record.first_token_seconds, 1)
    if record.outcome is not None:
        fields["outcome"] = record.outcome.value
    return fields
