"""Refuses requests for another host than the service's.

They come from a page whose name was made to resolve to this machine (DNS rebinding). To a browser that page and the
service are of one origin, so it could read the answers of a service that listens on localhost only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.errors import ForbiddenError, TesseraError
from server.http.edge.probes import HEALTH_PATHS
from server.http.responses import ErrorBody, error_response

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from starlette.types import ASGIApp, Receive, Scope, Send


class AllowedHostsMiddleware:
    """ASGI middleware that refuses requests whose Host is not allowed; passes `send` through.

    A request without Host, which HTTP/1.0 allows, is accepted: browsers always send it. So are health checks, which
    containers and balancers send to an address.

    Args:
        app: the application.
        hosts: names or addresses without a port; `*.example.com` stands for all subdomains of a name.
        render: returns the status and body of the refusal for a path, in its dialect.
    """

    def __init__(
        self, app: ASGIApp, hosts: Iterable[str], render: Callable[[str, TesseraError], ErrorBody]
    ) -> None:
        self._app = app
        self._names = frozenset(host.lower().rstrip(".").encode() for host in hosts)
        self._suffixes = tuple(name[1:] for name in self._names if name.startswith(b"*."))
        self._render = render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if (
            scope["type"] != "http"
            or self._is_allowed(given_host(scope))
            or (scope["method"] in ("GET", "HEAD") and scope["path"] in HEALTH_PATHS)
        ):
            await self._app(scope, receive, send)
            return
        error = ForbiddenError("the Host of the request is not allowed: see --allowed-hosts")
        response = error_response(error, self._render(scope["path"], error))
        await response(scope, receive, send)

    def _is_allowed(self, host: bytes | None) -> bool:
        if host is None:
            return True
        name = without_port(host)
        name = name.removesuffix(b".")  # of a complete name
        return name in self._names or name.endswith(self._suffixes)


def given_host(scope: Scope) -> bytes | None:
    """Return a request's Host in lower case; None if it has none."""
    for name, value in scope["headers"]:
        if name == b"host":
            host: bytes = value.lower()
            return host
    return None


def without_port(host: bytes) -> bytes:
    """Return a Host without its port. An IPv6 address keeps its brackets."""
    name, colon, port = host.rpartition(b":")
    return name if colon and port.isdigit() else host
