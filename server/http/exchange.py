"""Serves one generation request in any dialect, from the first byte of its body to the last byte of its answer.

A dialect parses the body and renders the answer. This module does the rest for all dialects: admission, abort when the
client disconnects, and metrics.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import TYPE_CHECKING, Protocol

from starlette.responses import Response

from server.errors import AbortedError, TesseraError
from server.http.body.request_body import ClientDisconnectedError, ClientWatch, read_json
from server.http.metrics.records import RequestRecord
from server.http.metrics.specs import Outcome
from server.http.metrics.usage import RequestUsage, usage_headers
from server.http.reply.deadline import expire_later, in_time
from server.http.reply.generation import GENERATION, Generation, Timings
from server.http.reply.streaming import StreamRenderer, TokenSender, open_event_stream
from server.http.request_id import RequestFigures, current_request
from server.http.responses import ErrorBody, Headers, send_json, warnings_header
from server.http.transport import direct_writer

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec
    from fastapi import FastAPI
    from pydantic import BaseModel
    from starlette.types import Receive, Scope, Send

    from server.engine.core.messages import EngineInfo
    from server.http.context import AppContext
    from server.http.token_routes import TokenForm


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A wire format: the routes, records and errors of one API. Registered in `server.http.app.DIALECTS`.

    Attributes:
        prefix: the dialect renders the errors of all paths with this prefix, including 404 and 405.
        endpoints: metric labels of its routes; see `RequestRecord`.
        install: adds the routes to an application.
        render_error: returns the status and body of the response to an error.
        error_reply: type of that body.
        bodies: types of request bodies, for the OpenAPI document.
        replies: types of replies, for the OpenAPI document.
        token_forms: its forms of /tokenize and /detokenize.
        id_header: name of a header with the request's id, beside `x-request-id`; None for none.
    """

    prefix: str
    endpoints: tuple[str, ...]
    install: Callable[[FastAPI, AppContext], None]
    render_error: Callable[[TesseraError], ErrorBody]
    error_reply: type[msgspec.Struct]
    bodies: tuple[type[BaseModel], ...]
    replies: tuple[type[msgspec.Struct], ...]
    token_forms: tuple[TokenForm, ...] = ()
    id_header: bytes | None = None


class Answer(Protocol):
    """A parsed request that submits its work to the engine and renders the result. Each dialect implements it.

    Attributes:
        operation: what the request asks for: `text_completion` or `chat`.
        num_sequences: sequences to generate.
        streaming: whether the answer is a stream of server-sent events.
        warnings: a sentence for each accepted field without effect; without text from the client, except
            names of fields. The answer also reports those of its `Generation`.
    """

    operation: str
    num_sequences: int
    streaming: bool
    warnings: tuple[str, ...]

    async def generate(self) -> Generation:
        """Tokenize the prompts and submit them.

        Raises:
            TesseraError: a prompt is not valid, or the engine is not ready.
        """

    def headers(self, generation: Generation, timings: Timings | None) -> Headers:
        """Render the response headers. `timings` is None for a stream: its headers precede the first token."""

    def reply(self, generation: Generation) -> bytes:
        """Render a finished generation as JSON."""

    def renderer(self, generation: Generation) -> StreamRenderer:
        """Make the renderer of a stream."""


class Exchange(Response):
    """Reads a request, generates and sends the answer, and aborts when the client disconnects.

    All of this happens when the response is called, so that one block of code acquires and releases what a request
    holds: its share of the admission limit and its sequences in the engine.

    Args:
        dialect: the route's dialect.
        context: the application's context.
        endpoint: one of the dialect's `endpoints`.
        parse: makes the answer from a decoded JSON body; raises `ValidationError`.
    """

    def __init__(
        self,
        dialect: Dialect,
        context: AppContext,
        endpoint: str,
        parse: Callable[[object, EngineInfo], Answer],
    ) -> None:
        self.background = None
        self._dialect = dialect
        self._context = context
        self._endpoint = endpoint
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request.

        Raises:
            TesseraError: raised before anything was sent; the application's error handler responds.
        """
        request = current_request()
        try:
            with RequestRecord(self._context.metrics, self._endpoint) as record:
                request.figures = functools.partial(_figures, record, None)
                try:
                    await self._serve(scope, receive, send, record)
                except asyncio.CancelledError:
                    if not self._context.lifecycle.is_ending:
                        # Other servers than ours cancel a request whose client has disconnected.
                        record.finish(Outcome.ABORT)
                    raise
        except ClientDisconnectedError:
            request.disconnected = True  # no response can be sent

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, record: RequestRecord
    ) -> None:
        context = self._context
        info = context.engine_info()
        admission = context.admission
        admission.check(info)
        request = current_request()
        with admission.buffer() as buffer:
            body = await read_json(scope, receive, context.config, buffer)
            await in_time(context.adapters.look(body), request.deadline)
            answer = self._parse(body, info)
            del body  # it may be large
            request.operation = answer.operation
            with admission.admit(answer.num_sequences, info), ClientWatch(receive) as watch:
                generation = await in_time(self._generate(answer), request.deadline)
                expiry = expire_later(generation, request.deadline)
                buffer.release()
                watch.on_gone = generation.abort
                request.figures = functools.partial(_figures, record, generation)
                scope[GENERATION] = generation
                usage: RequestUsage | None = None
                try:
                    await generation.accepted()
                    if answer.streaming:
                        headers = _headers(answer, generation, None)
                        writer = direct_writer(scope)
                        async with open_event_stream(send, context.config, headers, writer) as out:
                            renderer = answer.renderer(generation)
                            await TokenSender(
                                generation, renderer, out, record, watch, context.lifecycle
                            ).run()
                    else:
                        await self._finish(generation, record, watch)
                        body = answer.reply(generation)
                        timings = generation.timings(record.started)
                        headers = _headers(answer, generation, timings)
                        usage = generation.usage()
                        headers += usage_headers(usage)
                        if watch.gone:
                            raise ClientDisconnectedError
                        await send_json(send, body, headers)
                finally:
                    if expiry is not None:
                        expiry.cancel()
                    generation.abort()
        record.succeed(
            generation.returned[0].finish_reason,
            usage=usage or generation.usage(),
            submitted=generation.submitted,
            prompt_tokens=generation.prompt_tokens,
            completion_tokens=generation.completion_tokens,
            longest=max(completion.num_tokens for completion in generation.completions),
            max_new_tokens=generation.max_new_tokens,
        )

    async def _generate(self, answer: Answer) -> Generation:
        """Submit a request, once its adapter was found."""
        request = current_request()
        if request.adapter_name is not None:
            request.adapter = await self._context.adapters.find(request.adapter_name)
        return await answer.generate()

    async def _finish(
        self, generation: Generation, record: RequestRecord, watch: ClientWatch
    ) -> None:
        """Wait for the completions of an answer that is not a stream."""
        try:
            await generation.finish(record)
        except AbortedError:
            if watch.gone:
                raise ClientDisconnectedError from None
            raise


def _figures(record: RequestRecord, generation: Generation | None) -> RequestFigures:
    """Return what the access log shows of a request. `generation` is None if nothing was submitted to the engine."""
    ttft, outcome = record.first_token_seconds, record.outcome
    ttft_ms = None if ttft is None else 1000 * ttft
    name = None if outcome is None else outcome.value
    if generation is None:
        return RequestFigures(None, None, None, None, ttft_ms, name)
    return RequestFigures(
        generation.prompt_tokens,
        generation.cached_tokens,
        generation.completion_tokens,
        1000 * generation.queue_seconds,
        ttft_ms,
        name,
    )


def _headers(answer: Answer, generation: Generation, timings: Timings | None) -> Headers:
    warnings = (*answer.warnings, *generation.warnings)
    return [*answer.headers(generation, timings), *warnings_header(warnings)]
