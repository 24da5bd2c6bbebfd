"""GET /metrics: everything `server.http.metrics.registry` counts, in the format the scraper asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import Request
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

if TYPE_CHECKING:
    from fastapi import FastAPI

    from server.http.context import AppContext


def install(app: FastAPI, context: AppContext) -> None:
    """Add the route /metrics."""
    described: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
    }

    @app.get("/metrics", tags=["Service"], response_class=Response, responses=described)
    async def metrics(request: Request) -> Response:
        """Prometheus metrics; OpenMetrics where `Accept` asks for it."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(context.metrics.registry), headers={"content-type": content_type})
