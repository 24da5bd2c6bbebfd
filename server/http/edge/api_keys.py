"""Refuses requests without an API key, and gives each key a prefix cache, limits and a share of its own."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Any

from server.errors import TesseraError, UnauthorizedError, UnavailableError
from server.http.edge.client_name import client_of_address
from server.http.edge.key_limits import NO_LIMITS, KeyLimits
from server.http.edge.probes import HEALTH_PATHS
from server.http.request_id import current_request
from server.http.responses import ErrorBody, error_response

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from fastapi import FastAPI
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = HEALTH_PATHS | {"/"}
"""`GET` and `HEAD` of these paths need no key: health checks, and the page for browsers."""

STATIC_PATHS = ("/docs", "/page")
"""Nor do `GET` and `HEAD` of these paths and the paths below them: files of the package, the same in every service.

A browser opens a page without a key; what the page requests afterwards needs one.
"""

_BEARER = b"bearer "
_INDEX = "tessera.key"


class ApiKeys:
    """Finds the key of a request.

    Args:
        keys: of the service; may be none.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]
        self._clients = [digest.hex() for digest in self._digests]

    def find(self, scope: Scope) -> int | None:
        """Return the number of the first of the keys that a request has; None if it has none of them."""
        if not self._digests:
            return None
        if _INDEX not in scope:
            scope[_INDEX] = self._find(scope)
        index: int | None = scope[_INDEX]
        return index

    def client(self, index: int) -> str:
        """Return the name under which the requests with a key have their share."""
        return self._clients[index]

    def client_of(self, scope: Scope) -> str:
        """Return who sent a request: its key, or without a valid one its address."""
        index = self.find(scope)
        return client_of_address(scope) if index is None else self._clients[index]

    def _find(self, scope: Scope) -> int | None:
        for name, value in scope["headers"]:
            if name == b"authorization" and value[: len(_BEARER)].lower() == _BEARER:
                index = self._compare(value[len(_BEARER) :].strip())
            elif name == b"x-api-key":
                index = self._compare(value)
            else:
                continue
            if index is not None:
                return index
        return None

    def _compare(self, given: bytes) -> int | None:
        """Compare with every key. The time depends neither on the keys nor on where they differ."""
        digest, found = _digest(given), None
        for index, expected in enumerate(self._digests):
            if hmac.compare_digest(digest, expected):
                found = index
        return found


class ApiKeyMiddleware:
    """ASGI middleware that refuses requests without one of the keys; passes `send` through.

    Args:
        app: the application.
        keys: each of them gives access to everything.
        render: returns the status and body of the refusal for a path, in its dialect.
        isolate_caches: whether requests of different keys share no cached prefixes.
        limits: of the keys that have any.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        render: Callable[[str, TesseraError], ErrorBody],
        *,
        isolate_caches: bool,
        limits: Mapping[str, KeyLimits],
    ) -> None:
        keys = tuple(keys)
        self._app = app
        self._keys = ApiKeys(keys)
        self._limits = [limits.get(key, NO_LIMITS) for key in keys]
        self._namespaces = [
            _cache_namespace(key.encode()) if isolate_caches else None for key in keys
        ]
        self._render = render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if (
            scope["type"] != "http"
            or is_open(scope["method"], scope["path"])
            or self._accept(scope)
        ):
            await self._app(scope, receive, send)
            return
        error = UnauthorizedError()
        response = error_response(error, self._render(scope["path"], error))
        await response(scope, receive, send)

    def _accept(self, scope: Scope) -> bool:
        """Return whether the request has one of the keys; the first one that it has is the one that it uses."""
        index = self._keys.find(scope)
        if index is None:
            return False
        request = current_request()
        request.client = self._keys.client(index)
        request.cache_namespace = self._namespaces[index]
        request.limits = self._limits[index]
        return True


def document_keys(app: FastAPI) -> None:
    """Make the application's OpenAPI document say which routes need a key."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        _add_keys(document)
        return document

    app.openapi = openapi  # type: ignore[method-assign] # as FastAPI documents


def _add_keys(document: dict[str, Any]) -> None:
    document.setdefault("components", {})["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    document["security"] = [{"bearer": []}, {"header": []}]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if is_open(method.upper(), path):
                operation["security"] = []
            else:
                # Errors of a path have one body.
                body = operation["responses"].get(str(UnavailableError.status), {}).get("content")
                refusal = {"description": UnauthorizedError.__doc__}
                operation["responses"]["401"] = refusal | ({"content": body} if body else {})


def _digest(key: bytes) -> bytes:
    # Digests have one length: `compare_digest` would reveal the lengths of the keys.
    return hashlib.sha256(key).digest()


def _cache_namespace(key: bytes) -> bytes:
    """Return the name of a key's prefix caches, which reveals nothing about the key."""
    return hmac.digest(key, b"tessera: prefix cache", "sha256")


def is_open(method: str, path: str) -> bool:
    """Return whether a request needs no key."""
    return method in ("GET", "HEAD") and (
        path in OPEN_PATHS
        or any(path == static or path.startswith(f"{static}/") for static in STATIC_PATHS)
    )
