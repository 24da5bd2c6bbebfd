"""Logs one line for each request that has been answered, refused or abandoned by its client.

A line never contains text of a prompt or an answer. Text from the client (the request's id, the path of an unknown
route) is quoted where it contains anything but plain characters, so that it can forge neither a field nor a line.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from server.errors import UnauthorizedError
from server.http.edge.probes import PROBES
from server.http.request_id import CLIENT_CLOSED, CurrentRequest, RequestFigures, current_request
from server.log import quoted, written_together

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger("tessera.access")

MAX_DELAY_SECONDS = 0.01
"""Lines are written together, up to this much later: a line by itself takes three times as long."""

_MAX_PATH_CHARACTERS = 200


class AccessLine(NamedTuple):
    """The line of one request.

    Attributes:
        request_id: see `CurrentRequest`.
        client: the address of the connection; None if it has none.
        method: of HTTP.
        route: the route's path, or the path of the request if there is no such route.
        status: of the response; 499 if the client disconnected before its end.
        total_ms: from the request's arrival to the end of its response.
        figures: of a request that generates; None for others.
    """

    request_id: str
    client: str | None
    method: str
    route: str
    status: int
    total_ms: float
    figures: RequestFigures | None

    def __str__(self) -> str:
        """Return the line's text: `name=value`, separated by spaces."""
        text = (
            f"request_id={quoted(self.request_id)} client={self.client or '-'} method={self.method} "
            f"route={quoted(self.route)} status={self.status} total_ms={self.total_ms:.1f}"
        )
        return text if self.figures is None else f"{text} {self.figures}"

    def fields(self) -> dict[str, Any]:
        """Return the line's values."""
        values = self._asdict()
        figures = values.pop("figures")
        values["total_ms"] = round(self.total_ms, 1)
        return values if figures is None else values | figures.fields()


class AccessLogMiddleware:
    """ASGI middleware that logs each request at its end. It does not wrap `send`; needs `RequestIdMiddleware`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._pending: list[logging.LogRecord] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = current_request()
        try:
            await self._app(scope, receive, send)
        finally:
            is_probe = scope["path"] in PROBES and request.status != UnauthorizedError.status
            level = logging.DEBUG if is_probe else logging.INFO
            if log.isEnabledFor(level):
                self._add(level, _line(scope, request))

    def _add(self, level: int, line: AccessLine) -> None:
        # Unlike `log.log`, this does not search the stack for the caller.
        self._pending.append(logging.LogRecord(log.name, level, __file__, 0, line, None, None))
        if len(self._pending) == 1:
            asyncio.get_running_loop().call_later(MAX_DELAY_SECONDS, self._write)

    def _write(self) -> None:
        pending, self._pending = self._pending, []
        with written_together():
            for record in pending:
                log.handle(record)


def _line(scope: Scope, request: CurrentRequest) -> AccessLine:
    client, route, status = scope.get("client"), scope.get("route"), request.status
    return AccessLine(
        request.id,
        client[0] if client else None,
        scope["method"],
        route.path if route else scope["path"][:_MAX_PATH_CHARACTERS],
        CLIENT_CLOSED if status is None or request.disconnected else status,
        1000 * (time.monotonic() - request.arrived),
        None if request.figures is None else request.figures(),
    )
