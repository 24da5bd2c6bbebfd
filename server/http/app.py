"""Builds the HTTP application from the dialects and the service's own routes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from server.http import abort, service_routes, token_routes
from server.http.adapters import routes as adapter_routes
from server.http.context import AppContext
from server.http.dialects.anthropic.routes import ANTHROPIC
from server.http.dialects.openai.routes import OPENAI
from server.http.dialects.sagemaker.routes import SAGEMAKER
from server.http.dialects.tgi.routes import TGI
from server.http.direct_route import DirectRoute
from server.http.docs_page import routes as docs_page
from server.http.edge.stack import install_edge
from server.http.lifecycle import Lifecycle
from server.http.metrics.registry import Metrics
from server.http.openapi import install_openapi
from server.http.responses import ErrorBody, install_error_handlers
from server.version import version

if TYPE_CHECKING:
    from model.text.chat_template import ChatTemplate
    from model.text.tokenizer import Tokenizer
    from server.engine.link.front_end.client import EngineHandle
    from server.errors import TesseraError
    from server.http.config import HTTPConfig
    from server.http.exchange import Dialect
    from server.http.metrics.shared_counters import SharedCounters

DIALECTS: tuple[Dialect, ...] = (ANTHROPIC, OPENAI, SAGEMAKER, TGI)
"""All dialects. The first dialect whose prefix matches a path renders that path's errors; the last prefix is "/"."""


def create_app(
    client: EngineHandle,
    tokenizer: Tokenizer,
    config: HTTPConfig,
    counters: SharedCounters | None = None,
    chat_template: ChatTemplate | None = None,
) -> FastAPI:
    """Create the ASGI application.

    Args:
        client: the engine's client; the engine need not be ready yet.
        tokenizer: the served model's tokenizer.
        config: limits and intervals.
        counters: shared with the other front ends; None if this process is the only one.
        chat_template: the served model's chat template; None if it has none.

    Returns:
        The application. It owns threads and processes that tokenize and compile grammars; they end with it, or when
        `app.state.close` is called.
    """
    app = FastAPI(
        title="Tessera",
        version=version(),
        description="Text generation with a small decoder model.",
        openapi_url=None,  # see `install_openapi`
        docs_url=None,  # loads its scripts from another host; `docs_page` does not
        redoc_url=None,
        redirect_slashes=False,
        # `server.http.tracing` makes the spans. FastAPI's would also wrap each stream, if OpenTelemetry is set up.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.router.route_class = DirectRoute
    endpoints = [endpoint for dialect in DIALECTS for endpoint in dialect.endpoints]
    endpoints += token_routes.ENDPOINTS
    lifecycle = Lifecycle(client, config)
    metrics = Metrics(client, config, version(), endpoints, counters, lifecycle)
    context = AppContext(client, tokenizer, config, metrics, lifecycle, chat_template)
    for dialect in DIALECTS:
        dialect.install(app, context)
    forms = [form for dialect in DIALECTS for form in dialect.token_forms]
    token_routes.install(app, context, forms)
    service_routes.install(app, context, DIALECTS[-1].error_reply)
    docs_page.install(app)
    abort.install(app, context, DIALECTS[-1].error_reply)
    adapter_routes.install(app, context, OPENAI.error_reply)
    install_error_handlers(app, _render_error, context.refusals.hold)
    install_openapi(
        app,
        [body for dialect in DIALECTS for body in dialect.bodies],
        [
            *service_routes.REPLIES,
            *abort.RECORDS,
            *adapter_routes.RECORDS,
            *(reply for dialect in DIALECTS for reply in dialect.replies),
        ],
    )
    app.state.lifecycle = lifecycle
    app.state.close = context.close
    id_headers = {d.prefix: d.id_header for d in DIALECTS if d.id_header is not None}
    install_edge(app, config, lifecycle, _render_error, id_headers)
    return app


def _render_error(path: str, error: TesseraError) -> ErrorBody:
    dialect = next((d for d in DIALECTS if path.startswith(d.prefix)), DIALECTS[-1])
    return dialect.render_error(error)
