"""The routes of the Messages API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from server.errors import UnknownModelError
from server.http.dialects.anthropic.answer import count_tokens, read_messages_request
from server.http.dialects.anthropic.errors import render_error, status_of
from server.http.dialects.anthropic.replies import (
    EVENTS,
    MessageReply,
    MessagesErrorReply,
    TokenCount,
)
from server.http.dialects.anthropic.schema import CountTokensBody, MessagesBody
from server.http.exchange import Dialect, Exchange
from server.http.openapi import describe_error, describe_route
from server.http.token_routes import TokenExchange, TokenForm, describe_forms

if TYPE_CHECKING:
    from fastapi import FastAPI

    from server.http.context import AppContext
    from server.http.dialects.openai.frames import TokenTexts

_PATH = "/v1/messages"


def _install(app: FastAPI, context: AppContext) -> None:
    texts: TokenTexts = {}
    described = describe_route(
        MessagesBody,
        MessagesErrorReply,
        MessageReply,
        EVENTS,
        status_of=status_of,
        tag="Anthropic",
    )
    missing = describe_error(UnknownModelError, MessagesErrorReply)
    described["responses"][UnknownModelError.status] = missing

    @app.post(_PATH, **described)
    async def messages() -> Response:
        """Continue a conversation, with typed events, as in Anthropic's API."""
        return Exchange(
            ANTHROPIC,
            context,
            "messages",
            lambda body, info: read_messages_request(context, info, body, texts),
        )

    @app.post(f"{_PATH}/count_tokens", **describe_forms([_COUNT]))
    async def count() -> Response:
        """Count the tokens of a conversation."""
        return TokenExchange(context, [_COUNT])


_COUNT = TokenForm(
    endpoint="count_tokens",
    keys=("messages",),
    body=CountTokensBody,
    reply=TokenCount,
    error_reply=MessagesErrorReply,
    answer=count_tokens,
    render_error=render_error,
    status_of=status_of,
    errors=(UnknownModelError,),
)
ANTHROPIC = Dialect(
    prefix=_PATH,
    endpoints=("messages", "count_tokens"),
    install=_install,
    render_error=render_error,
    error_reply=MessagesErrorReply,
    bodies=(MessagesBody, CountTokensBody),
    replies=(*EVENTS, MessageReply, MessagesErrorReply, TokenCount),
    id_header=b"request-id",
)
