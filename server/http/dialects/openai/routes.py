"""The routes of the OpenAI API."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from server.errors import TesseraError, UnavailableError, UnknownModelError
from server.http.dialects.openai.chat import ChatAnswer
from server.http.dialects.openai.completions import CompletionAnswer
from server.http.dialects.openai.errors import render_error, status_of
from server.http.dialects.openai.models import find_model, list_models
from server.http.dialects.openai.replies import (
    ChatChunk,
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    Model,
    ModelList,
    OpenAIErrorReply,
    TokenizeReply,
)
from server.http.dialects.openai.schema import ChatBody, CompletionBody
from server.http.dialects.openai.tokens import TOKEN_FORMS
from server.http.exchange import Dialect, Exchange
from server.http.openapi import describe_error, describe_route, describe_service_route
from server.http.responses import json_response

if TYPE_CHECKING:
    from fastapi import FastAPI
    from pydantic import BaseModel

    from server.http.context import AppContext
    from server.http.dialects.openai.frames import TokenTexts


def _install(app: FastAPI, context: AppContext) -> None:
    created = int(time.time())
    texts: TokenTexts = {}

    @app.post("/v1/completions", **_describe(CompletionBody, CompletionReply, CompletionReply))
    async def completions() -> Response:
        """Continue prompts."""
        return Exchange(
            OPENAI,
            context,
            "completions",
            lambda body, info: CompletionAnswer(context, info, body, texts),
        )

    @app.post("/v1/chat/completions", **_describe(ChatBody, ChatReply, ChatChunk))
    async def chat() -> Response:
        """Continue a conversation."""
        return Exchange(
            OPENAI,
            context,
            "chat_completions",
            lambda body, info: ChatAnswer(context, info, body, texts),
        )

    @app.get("/v1/models", **_describe_lookup(ModelList))
    async def models() -> Response:
        """List the names of the served model."""
        return json_response(list_models(context, created))

    # Not a parameter of the function: FastAPI would document its own validation error.
    one = _describe_lookup(Model)
    one["openapi_extra"] = {
        "parameters": [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    }

    async def model(request: Request) -> Response:
        """Describe a model."""
        return json_response(find_model(request.path_params["name"], context, created))

    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"], **one)


def _describe(body: type[BaseModel], reply: type, events: type | None = None) -> dict[str, Any]:
    described = describe_route(
        body, OpenAIErrorReply, reply, events, status_of=status_of, tag="OpenAI"
    )
    missing = describe_error(UnknownModelError, OpenAIErrorReply)
    described["responses"][UnknownModelError.status] = missing
    return described


def _describe_lookup(reply: type) -> dict[str, Any]:
    described = describe_service_route(reply, tag="OpenAI")
    errors: tuple[type[TesseraError], ...] = (UnavailableError, UnknownModelError)
    for error in errors:
        described["responses"][error.status] = describe_error(error, OpenAIErrorReply)
    return described


OPENAI = Dialect(
    prefix="/v1",
    endpoints=("completions", "chat_completions"),
    install=_install,
    render_error=render_error,
    error_reply=OpenAIErrorReply,
    bodies=(ChatBody, CompletionBody, *(form.body for form in TOKEN_FORMS)),
    token_forms=TOKEN_FORMS,
    replies=(
        ChatChunk,
        ChatReply,
        CompletionReply,
        DetokenizeReply,
        TokenizeReply,
        Model,
        ModelList,
        OpenAIErrorReply,
    ),
)
