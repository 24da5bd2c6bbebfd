"""Puts the layers of the edge around an application, in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware

from server.http.edge.access_log import AccessLogMiddleware
from server.http.edge.api_keys import ApiKeyMiddleware, document_keys
from server.http.edge.drain import DrainMiddleware
from server.http.edge.hosts import AllowedHostsMiddleware
from server.http.edge.origins import OriginMiddleware
from server.http.edge.trailing_slash import TrailingSlashMiddleware
from server.http.request_id import RequestIdMiddleware

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from server.errors import TesseraError
    from server.http.config import HTTPConfig
    from server.http.lifecycle import Lifecycle
    from server.http.responses import ErrorBody


def install_edge(
    app: FastAPI,
    config: HTTPConfig,
    lifecycle: Lifecycle,
    render: Callable[[str, TesseraError], ErrorBody],
    id_headers: Mapping[str, bytes],
) -> None:
    """Make every request pass the edge before anything else of the application, its error handlers included.

    Args:
        app: the application; it must not have served a request yet.
        config: says which layers there are.
        lifecycle: of the front end.
        render: returns the status and body of an error for a path.
        id_headers: names of a second header with the request's id, by the prefix of its path.
    """
    build = app.build_middleware_stack
    if config.api_key:
        document_keys(app)

    def build_with_edge() -> ASGIApp:
        # Inside of what compares paths: what resembles a path without protection has none.
        stack: ASGIApp = TrailingSlashMiddleware(build())
        stack = DrainMiddleware(stack, lifecycle, render)
        if config.api_key:
            isolate = config.prefix_cache_sharing == "key"
            stack = ApiKeyMiddleware(
                stack, config.api_key, render, isolate_caches=isolate, limits=config.key_limits
            )
        stack = OriginMiddleware(stack, config.cors_allow_origin, render)
        if config.cors_allow_origin:
            # Outside of the keys: a browser asks for permission without one.
            stack = CORSMiddleware(
                stack,
                allow_origins=config.cors_allow_origin,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["*"],
            )
        if config.allowed_hosts:
            stack = AllowedHostsMiddleware(stack, config.allowed_hosts, render)
        if config.otlp_endpoint:
            # Imports OpenTelemetry, which most services need not have.
            from server.http.tracing import Tracing, TracingMiddleware  # noqa: PLC0415 - an extra

            app.state.tracing = tracing = Tracing(config)
            stack = TracingMiddleware(stack, tracing)
        if config.access_log:
            stack = AccessLogMiddleware(stack)
        return RequestIdMiddleware(stack, id_headers)

    app.build_middleware_stack = build_with_edge  # type: ignore[method-assign] # outside the error handlers
