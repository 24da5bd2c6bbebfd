"""The routes of the OpenAI API."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from server.errors import NotFoundError, TesseraError, UnavailableError, UnknownModelError
from server.http.body.validation import quote
from server.http.dialects.openai import replies
from server.http.dialects.openai.chat import ChatAnswer
from server.http.dialects.openai.completions import CompletionAnswer
from server.http.dialects.openai.errors import render_error, status_of
from server.http.dialects.openai.frames import END_MARK, TokenTexts
from server.http.dialects.openai.models import find_model, list_models
from server.http.dialects.openai.responses_api.answer import ResponseAnswer
from server.http.dialects.openai.schema import ChatBody, CompletionBody, ResponseBody
from server.http.dialects.openai.tokens import TOKEN_FORMS
from server.http.exchange import Dialect, Exchange
from server.http.openapi import describe_error, describe_route, describe_service_route
from server.http.responses import json_response

if TYPE_CHECKING:
    from pydantic import BaseModel

    from server.http.context import AppContext


def _install(app: FastAPI, context: AppContext) -> None:
    created = int(time.time())
    texts: TokenTexts = {}

    @app.post(
        "/v1/completions",
        **_describe(CompletionBody, replies.CompletionReply, replies.CompletionReply, END_MARK),
    )
    async def completions() -> Response:
        """Continue prompts."""
        return Exchange(
            OPENAI,
            context,
            "completions",
            lambda body, info: CompletionAnswer(context, info, body, texts),
        )

    @app.post(
        "/v1/chat/completions",
        **_describe(ChatBody, replies.ChatReply, replies.ChatChunk, END_MARK),
    )
    async def chat() -> Response:
        """Continue a conversation."""
        return Exchange(
            OPENAI,
            context,
            "chat_completions",
            lambda body, info: ChatAnswer.of_body(context, info, body, texts),
        )

    @app.post(
        "/v1/responses", **_describe(ResponseBody, replies.ResponseReply, replies.ResponseEvent)
    )
    async def responses() -> Response:
        """Continue a conversation, with typed events. Nothing is stored."""
        return Exchange(
            OPENAI,
            context,
            "responses",
            lambda body, info: ResponseAnswer(context, info, body, texts),
        )

    async def stored(request: Request) -> Response:
        """Refuse what needs a stored response: nothing is stored."""
        name = quote("", request.path_params["name"])
        raise NotFoundError(f"there is no response {name}: nothing is stored between requests")

    missing = describe_service_route(replies.OpenAIErrorReply, tag="OpenAI")
    missing["responses"][NotFoundError.status] = describe_error(
        NotFoundError, replies.OpenAIErrorReply
    )
    missing["responses"].pop(200, None)
    missing["openapi_extra"] = _path_parameter("name")
    for method in ("GET", "POST", "DELETE"):  # one by one, since each is an operation of its own
        app.add_api_route("/v1/responses/{name:path}", stored, methods=[method], **missing)

    @app.get("/v1/models", **_describe_lookup(replies.ModelList))
    async def models() -> Response:
        """List the names of the served model and of its adapters."""
        await context.adapters.look_for_all()
        return json_response(list_models(context, created))

    # Not a parameter of the function: FastAPI would document its own validation error.
    one = _describe_lookup(replies.Model)
    one["openapi_extra"] = _path_parameter("name")

    async def model(request: Request) -> Response:
        """Describe a model."""
        name = request.path_params["name"]
        await context.adapters.look_for(name)
        return json_response(find_model(name, context, created))

    app.add_api_route("/v1/models/{name:path}", model, methods=["GET"], **one)


def _describe(
    body: type[BaseModel], reply: type, events: type, end_mark: str | None = None
) -> dict[str, Any]:
    described = describe_route(
        body,
        replies.OpenAIErrorReply,
        reply,
        events,
        end_mark=end_mark,
        status_of=status_of,
        tag="OpenAI",
    )
    missing = describe_error(UnknownModelError, replies.OpenAIErrorReply)
    described["responses"][UnknownModelError.status] = missing
    return described


def _path_parameter(name: str) -> dict[str, Any]:
    parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    return {"parameters": [parameter]}


def _describe_lookup(reply: type) -> dict[str, Any]:
    described = describe_service_route(reply, tag="OpenAI")
    errors: tuple[type[TesseraError], ...] = (UnavailableError, UnknownModelError)
    for error in errors:
        described["responses"][error.status] = describe_error(error, replies.OpenAIErrorReply)
    return described


OPENAI = Dialect(
    prefix="/v1",
    endpoints=("completions", "chat_completions", "responses"),
    install=_install,
    render_error=render_error,
    error_reply=replies.OpenAIErrorReply,
    bodies=(ChatBody, CompletionBody, ResponseBody, *(form.body for form in TOKEN_FORMS)),
    token_forms=TOKEN_FORMS,
    replies=(
        replies.ChatChunk,
        replies.ChatReply,
        replies.CompletionReply,
        replies.DetokenizeReply,
        replies.Model,
        replies.ModelList,
        replies.OpenAIErrorReply,
        replies.ResponseReply,
        replies.ResponseEvent,
        replies.TokenizeReply,
    ),
)
