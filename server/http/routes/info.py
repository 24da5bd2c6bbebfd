"""Routes that tell about the service: model, limits, attention kernels, and whether it can serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from server.engine.core.plan_report import PlanReport
from server.engine.link.protocol import EngineState
from server.errors import UnavailableError
from server.http.dialects.tgi.replies import HealthReply, InfoReply
from server.http.openapi import describe_error, describe_route
from server.http.replying import json_reply

if TYPE_CHECKING:
    from fastapi import FastAPI

    from server.http.context import AppContext

_UNAVAILABLE = 503


def install(app: FastAPI, context: AppContext) -> None:
    """Add the routes /info, /plan, /health, /health/live, /ping and GET /."""
    health = describe_route(reply=HealthReply)
    health["responses"][_UNAVAILABLE] = {
        "description": "Requests are not served; `phase` tells what the engine is doing.",
        "content": health["responses"][200]["content"],
    }
    info = describe_route(reply=InfoReply)
    plan = describe_route(reply=PlanReport)
    for route in (info, plan):
        route["responses"][_UNAVAILABLE] = describe_error(UnavailableError)

    async def read_info() -> Response:
        """Tell the model that is served, and the limits of a request."""
        return json_reply(_info(context))

    async def read_plan() -> Response:
        """Tell which attention kernels run here, how they are launched, and why."""
        return json_reply(context.engine_info().plan)

    async def read_health() -> Response:
        """Tell whether requests are served: the readiness probe."""
        return _health(context, healthy=context.client.state is EngineState.READY)

    async def read_liveness() -> Response:
        """Tell whether the service works or is on its way there: the liveness probe."""
        return _health(context, healthy=context.client.state is not EngineState.STOPPED)

    app.add_api_route("/info", read_info, methods=["GET"], **info)
    app.add_api_route("/plan", read_plan, methods=["GET"], **plan)
    for path in ("/", "/health", "/ping"):
        app.add_api_route(path, read_health, methods=["GET"], **health)
        app.add_api_route(path, read_health, methods=["HEAD"], include_in_schema=False)
    app.add_api_route("/health/live", read_liveness, methods=["GET"], **health)
    app.add_api_route("/health/live", read_liveness, methods=["HEAD"], include_in_schema=False)


def _health(context: AppContext, *, healthy: bool) -> Response:
    state, phase = context.client.state.value, context.phase()
    if healthy:
        return json_reply(HealthReply(state=state, phase=phase))
    error = context.unavailable()
    reply = HealthReply(state=state, phase=phase, error=error.message, error_type="healthcheck")
    response = json_reply(reply, _UNAVAILABLE)
    response.headers["retry-after"] = str(error.retry_after)
    return response


def _info(context: AppContext) -> InfoReply:
    info, config = context.engine_info(), context.config
    return InfoReply(
        model_id=config.model_id,
        model_sha=config.model_sha,
        model_dtype=info.dtype,
        quantization=info.quantization,
        model_device_type=info.device,
        model_pipeline_tag="text-generation",
        max_concurrent_requests=context.max_concurrent_requests(info),
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_top_n_tokens=config.max_top_n_tokens,
        max_input_tokens=info.max_total_tokens - 1,
        max_total_tokens=info.max_total_tokens,
        max_body_bytes=config.max_body_bytes,
        validation_workers=config.validation_workers,
        max_client_batch_size=config.max_client_batch_size,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        kv_cache_dtype=info.kv_cache_dtype,
        router="tessera",
        version=context.version,
        sha=None,
        docker_label=None,
    )
