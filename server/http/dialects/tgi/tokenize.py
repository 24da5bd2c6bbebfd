"""POST /tokenize: the tokens of a text, as the generate routes would see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Request
from starlette.responses import Response

from model.errors import TokenizerError
from server.errors import TesseraError, ValidationError
from server.http.dialects.tgi.replies import PromptSpan
from server.http.dialects.tgi.schema import GenerateBody
from server.http.dialects.tgi.schema_errors import parse
from server.http.metrics.registry import Endpoint, Outcome
from server.http.openapi import describe_route
from server.http.replying import json_reply
from server.http.request_body import ClientDisconnectedError, read_json

if TYPE_CHECKING:
    from fastapi import FastAPI

    from server.http.context import AppContext

_CLIENT_CLOSED = 499


def install(app: FastAPI, context: AppContext) -> None:
    """Add the route /tokenize."""

    @app.post("/tokenize", **describe_route(GenerateBody, list[PromptSpan], generates=False))
    async def tokenize(request: Request) -> Response:
        """Tell the tokens of a prompt, with the characters that each covers."""
        record = context.metrics.begin(Endpoint.TOKENIZE)
        try:
            value = await read_json(request.scope, request.receive, context.config)
            body = parse(GenerateBody, value)
            spans = await context.on_text(len(body.inputs), lambda: _spans(context, body))
        except ClientDisconnectedError:
            record.finish(Outcome.ABORT)
            return Response(status_code=_CLIENT_CLOSED)  # nobody will read it
        except TesseraError:
            record.finish(Outcome.VALIDATION)
            raise
        except BaseException:
            record.finish(Outcome.ERROR)
            raise
        record.finish(Outcome.OK)
        return json_reply(spans)


def _spans(context: AppContext, body: GenerateBody) -> list[PromptSpan]:
    try:
        spans = context.tokenizer.encode_with_offsets(body.inputs)
    except TokenizerError as error:
        raise ValidationError(f"`inputs` cannot be tokenized: {error}") from None
    if body.parameters is not None and body.parameters.truncate is not None:
        spans = spans[-body.parameters.truncate :]
    return [PromptSpan(span.id, span.text, span.start, span.stop) for span in spans]
