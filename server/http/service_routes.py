"""The routes that are the same for all dialects: the page for browsers, health, load, the kernel plan and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from server.engine.core.plan_report import PlanReport
from server.engine.link.protocol import EngineState
from server.errors import UnavailableError
from server.http.openapi import describe_error, describe_service_route
from server.http.page import routes as page
from server.http.responses import json_response
from server.version import version

if TYPE_CHECKING:
    from server.http.context import AppContext

_UNAVAILABLE = 503


class HealthReply(msgspec.Struct, frozen=True, kw_only=True):
    """Whether requests are served; `error` and `error_type` are present only if they are not."""

    state: str
    phase: str
    error: str | UnsetType = UNSET
    error_type: str | UnsetType = UNSET


class VersionReply(msgspec.Struct, frozen=True, kw_only=True):
    """The version of Tessera, in the form of vLLM's `/version`."""

    version: str


class LoadReply(msgspec.Struct, frozen=True, kw_only=True):
    """How much the service has to do.

    Attributes:
        server_load: sequences admitted and not yet answered, under vLLM's name.
        requests_running: sequences in the engine's batch.
        requests_waiting: sequences in the engine's queue.
        kv_cache_usage_ratio: share of the KV cache's blocks that running sequences hold, 0 to 1.
    """

    server_load: int
    requests_running: int
    requests_waiting: int
    kv_cache_usage_ratio: float


REPLIES = (HealthReply, LoadReply, PlanReport, VersionReply)


def install(app: FastAPI, context: AppContext, error_reply: type[msgspec.Struct]) -> None:
    """Add the routes /plan, /version, /load, those of health checks, /metrics, and GET / with its page's files.

    Args:
        app: the application.
        context: the application's context.
        error_reply: type of an error's body on these routes, for the OpenAPI document.
    """
    assets = page.load_assets()
    health = describe_service_route(HealthReply)
    health["responses"][_UNAVAILABLE] = {
        "description": "Requests are not served; `phase` says what the engine is doing.",
        "content": health["responses"][200]["content"],
    }
    root = describe_service_route(HealthReply)
    root["responses"] = {
        **health["responses"],
        200: {"content": health["responses"][200]["content"] | {"text/html": {}}},
    }
    plan = describe_service_route(PlanReport)
    plan["responses"][_UNAVAILABLE] = describe_error(UnavailableError, error_reply)
    exposition: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
    }

    async def read_plan() -> Response:
        """Report which attention kernels run here, how they are launched, and why."""
        return json_response(context.engine_info().plan)

    async def read_version() -> Response:
        """Report the version of Tessera."""
        return json_response(VersionReply(version=version()))

    async def read_load() -> Response:
        """Report how many requests run and wait, and how full the KV cache is."""
        stats = context.client.stats
        return json_response(
            LoadReply(
                server_load=context.metrics.in_flight,
                requests_running=stats.num_running,
                requests_waiting=stats.num_waiting,
                kv_cache_usage_ratio=stats.kv_usage,
            )
        )

    async def read_health() -> Response:
        """Report whether requests are served: the readiness probe."""
        return _health(context, healthy=context.is_ready)

    async def read_root(request: Request) -> Response:
        """Return a page to try the service out if `Accept` names HTML, else the same as `/health`."""
        if page.prefers_html(request.headers.get("accept", "")):
            return page.respond(assets[page.INDEX], request, vary="accept")
        response = _health(context, healthy=context.is_ready)
        response.headers["vary"] = "accept"
        return response

    async def read_liveness() -> Response:
        """Report whether the service works or is starting: the liveness probe."""
        return _health(context, healthy=context.client.state is not EngineState.STOPPED)

    @app.get("/metrics", tags=["Service"], response_class=Response, responses=exposition)
    async def metrics(request: Request) -> Response:
        """Report metrics in Prometheus' text format, or in OpenMetrics if `Accept` asks for it."""
        text, content_type = context.metrics.render(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    app.add_api_route("/plan", read_plan, methods=["GET"], **plan)
    app.add_api_route("/version", read_version, **describe_service_route(VersionReply))
    app.add_api_route("/load", read_load, **describe_service_route(LoadReply))
    for path, read, described in (
        ("/", read_root, root),
        ("/health", read_health, health),
        ("/health/ready", read_health, health),
        ("/ping", read_health, health),
        ("/healthz", read_health, health),
        ("/readyz", read_health, health),
        ("/health/live", read_liveness, health),
        ("/livez", read_liveness, health),
    ):
        app.add_api_route(path, read, methods=["GET"], **described)
        app.add_api_route(path, read, methods=["HEAD"], include_in_schema=False)
    page.install(app, assets)


def _health(context: AppContext, *, healthy: bool) -> Response:
    state, phase = context.client.state.value, context.phase()
    if context.lifecycle.is_draining:
        state, phase = "draining", "the server is stopping"
    if healthy:
        return json_response(HealthReply(state=state, phase=phase))
    error = context.unavailable()
    reply = HealthReply(state=state, phase=phase, error=error.message, error_type="healthcheck")
    response = json_response(reply, _UNAVAILABLE)
    response.headers["retry-after"] = str(error.retry_after)
    return response
