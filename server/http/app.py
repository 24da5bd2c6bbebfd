"""Puts the HTTP application together. Knows the routes by name only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from server.http.context import AppContext
from server.http.dialects.tgi import generate, tokenize
from server.http.openapi import install_openapi
from server.http.replying import install_error_handlers
from server.http.routes import info, metrics
from server.version import version

if TYPE_CHECKING:
    from model.text.tokenizer import Tokenizer
    from server.engine.link.client import EngineHandle
    from server.http.config import HTTPConfig
    from server.http.metrics.shared_counters import Board


def create_app(
    client: EngineHandle, tokenizer: Tokenizer, config: HTTPConfig, board: Board | None = None
) -> FastAPI:
    """Make the ASGI application of one service.

    Args:
        client: of the engine that computes; it need not be ready yet.
        tokenizer: of the model that is served.
        config: limits and intervals.
        board: for the counts, where other processes of the service count too.

    Returns:
        The application; it owns a few tokenizer threads and no other resources.
    """
    context = AppContext(client, tokenizer, config, version(), board)
    app = FastAPI(
        title="Tessera",
        version=version(),
        description="Text generation with a small decoder model.",
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
    )
    for routes in (generate, info, tokenize, metrics):
        routes.install(app, context)
    install_error_handlers(app)
    install_openapi(app)
    return app
