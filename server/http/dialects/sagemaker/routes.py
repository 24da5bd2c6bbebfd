"""POST /invocations: serves a body as the API would whose field it has."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

from starlette.responses import Response

from server.errors import TesseraError, UnknownModelError, ValidationError
from server.http.dialects.openai.chat import ChatAnswer
from server.http.dialects.openai.completions import CompletionAnswer
from server.http.dialects.openai.frames import END_MARK, TokenTexts
from server.http.dialects.openai.replies import (
    ChatChunk,
    ChatReply,
    CompletionReply,
    OpenAIErrorReply,
    ResponseEvent,
    ResponseReply,
)
from server.http.dialects.openai.responses_api.answer import ResponseAnswer
from server.http.dialects.openai.routes import OPENAI
from server.http.dialects.openai.schema import ChatBody, CompletionBody, ResponseBody
from server.http.dialects.tgi.generate import read_request
from server.http.dialects.tgi.replies import ErrorReply, GenerateReply, StreamEvent
from server.http.dialects.tgi.routes import TGI
from server.http.dialects.tgi.schema import GenerateBody
from server.http.exchange import Answer, Dialect, Exchange
from server.http.openapi import describe_error, describe_route
from server.http.responses import ErrorBody, error_response

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fastapi import FastAPI
    from starlette.types import Receive, Scope, Send

    from server.engine.core.messages import EngineInfo
    from server.http.context import AppContext
    from server.http.dialects.tgi.frames import TokenHeads

    Reader: TypeAlias = Callable[[object, EngineInfo], Answer]

_ENDPOINT = "invocations"


class Invocation(Response):
    """Serves one request, and renders its errors as the API of its body does.

    Args:
        context: the application's context.
        readers: by the field that only one API has: the API's dialect, and what makes the answer from the body. The
            first entry renders the errors of a body that has none of the fields.
    """

    def __init__(self, context: AppContext, readers: Mapping[str, tuple[Dialect, Reader]]) -> None:
        self.background = None
        self._context = context
        self._readers = readers
        self._chosen = next(iter(readers.values()))[0]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request."""
        dialect = dataclasses.replace(SAGEMAKER, render_error=self._render_error)
        try:
            await Exchange(dialect, self._context, _ENDPOINT, self._read)(scope, receive, send)
        except TesseraError as error:
            await error_response(error, self._render_error(error))(scope, receive, send)

    def _read(self, body: object, info: EngineInfo) -> Answer:
        if not isinstance(body, dict):
            raise ValidationError("the body must be a JSON object")
        for field, (dialect, read) in self._readers.items():
            if body.get(field) is not None:
                self._chosen = dialect
                return read(body, info)
        names = ", ".join(f"`{field}`" for field in self._readers)
        raise ValidationError(f"the body must have one of the fields {names}")

    def _render_error(self, error: TesseraError) -> ErrorBody:
        return self._chosen.render_error(error)


def _install(app: FastAPI, context: AppContext) -> None:
    heads: TokenHeads = {}
    texts: TokenTexts = {}
    readers: dict[str, tuple[Dialect, Reader]] = {
        "inputs": (
            TGI,
            lambda body, info: read_request(
                body, context, info, heads, endpoint=_ENDPOINT, stream=None
            ),
        ),
        "messages": (OPENAI, lambda body, info: ChatAnswer.of_body(context, info, body, texts)),
        "prompt": (OPENAI, lambda body, info: CompletionAnswer(context, info, body, texts)),
        "input": (OPENAI, lambda body, info: ResponseAnswer(context, info, body, texts)),
    }
    errors = (ErrorReply, OpenAIErrorReply)
    described = describe_route(
        (GenerateBody, ChatBody, CompletionBody, ResponseBody),
        errors,
        (list[GenerateReply], ChatReply, CompletionReply, ResponseReply),
        (StreamEvent, ChatChunk, CompletionReply, ResponseEvent),
        end_mark=END_MARK,
    )
    described["responses"][UnknownModelError.status] = describe_error(UnknownModelError, errors)

    @app.post("/invocations", **described)
    async def invoke() -> Response:
        """Continue a prompt or a conversation, in the format of TGI or of the OpenAI API."""
        return Invocation(context, readers)


SAGEMAKER = Dialect(
    prefix="/invocations",
    endpoints=(_ENDPOINT,),
    install=_install,
    render_error=TGI.render_error,
    error_reply=ErrorReply,
    bodies=(),
    replies=(),
)
