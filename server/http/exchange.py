"""Serves one generation request in any dialect, from the first byte of its body to the last byte of its answer.

A dialect reads the body and renders the answer. Everything else happens here, once for all dialects: admission, abort
when the client disconnects, and counting.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Protocol

from starlette.responses import Response

from server.errors import IncompleteGenerationError, TesseraError, UnavailableError
from server.http.metrics.records import RequestRecord
from server.http.metrics.registry import Outcome
from server.http.request_body import ClientDisconnectedError, ClientWatch, read_json
from server.http.responses import error_response, send_json
from server.http.streaming import TokenSender, open_event_stream
from server.http.transport import direct_writer

if TYPE_CHECKING:
    from collections.abc import Callable

    import msgspec
    from fastapi import FastAPI
    from pydantic import BaseModel
    from starlette.types import Receive, Scope, Send

    from server.engine.core.messages import EngineInfo
    from server.http.context import AppContext
    from server.http.generation import Generation, Timings
    from server.http.responses import ErrorBody, Headers
    from server.http.streaming import StreamRenderer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A wire format: the routes, records and errors of one API. Registered in `server.http.app.DIALECTS`.

    Attributes:
        prefix: of the paths whose errors it renders, including 404 and 405.
        endpoints: labels that its routes are counted under, for `RequestRecord`.
        install: adds the routes.
        render_error: from an error to status and body of the response.
        error_reply: that body's type.
        bodies: types of request bodies, for the OpenAPI document.
        replies: types of replies, for the OpenAPI document.
    """

    prefix: str
    endpoints: tuple[str, ...]
    install: Callable[[FastAPI, AppContext], None]
    render_error: Callable[[TesseraError], ErrorBody]
    error_reply: type[msgspec.Struct]
    bodies: tuple[type[BaseModel], ...]
    replies: tuple[type[msgspec.Struct], ...]


class Answer(Protocol):
    """What a dialect makes of a request body: the work for the engine, and the rendering of its result.

    Attributes:
        num_sequences: sequences to generate.
        streaming: whether the answer is a stream of server-sent events.
    """

    num_sequences: int
    streaming: bool

    async def generate(self) -> Generation:
        """Tokenize the prompts and submit them.

        Raises:
            TesseraError: a prompt is not valid, or the engine does not run.
        """

    def headers(self, generation: Generation, timings: Timings | None) -> Headers:
        """Render the headers of the response; a stream's are sent before the first token, without timings."""

    def reply(self, generation: Generation) -> bytes:
        """Render a finished generation as JSON."""

    def renderer(self, generation: Generation) -> StreamRenderer:
        """Make the renderer of a stream."""


class Exchange(Response):
    """Reads one request, has it generated, and answers; aborts it when the client disconnects.

    The answer is made when the response is called: what a request holds (its place among those in flight, its sequences
    in the engine) is then acquired and released in one block of code.

    Args:
        dialect: of the route.
        context: of the application.
        endpoint: one of the dialect's.
        parse: from a decoded JSON body to the answer; raises `ValidationError`.
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
            TesseraError: nothing was sent yet; the application's error handler responds.
        """
        try:
            with RequestRecord(self._context.metrics, self._endpoint) as record:
                await self._serve(scope, receive, send, record)
        except ClientDisconnectedError:
            pass  # there is nobody to answer

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, record: RequestRecord
    ) -> None:
        context = self._context
        info = context.engine_info()
        answer = self._parse(await read_json(scope, receive, context.config), info)
        with context.admit(answer.num_sequences, info):
            generation = await answer.generate()
            try:
                with ClientWatch(receive, generation.abort) as watch:
                    if answer.streaming:
                        headers, writer = answer.headers(generation, None), direct_writer(scope)
                        async with open_event_stream(send, context.config, headers, writer) as out:
                            renderer = answer.renderer(generation)
                            await TokenSender(generation, renderer, out, record, watch).run()
                    else:
                        await self._finish(generation, scope, receive, send, record, watch)
                        body = answer.reply(generation)
                        headers = answer.headers(generation, generation.timings(record.started))
                        if watch.gone:
                            raise ClientDisconnectedError
                        await send_json(send, body, headers)
            finally:
                generation.abort()
            record.succeed(
                generation.returned[0].finish_reason,
                queue_seconds=generation.queue_seconds,
                prompt_tokens=generation.prompt_tokens,
                completion_tokens=generation.completion_tokens,
            )

    async def _finish(
        self,
        generation: Generation,
        scope: Scope,
        receive: Receive,
        send: Send,
        record: RequestRecord,
        watch: ClientWatch,
    ) -> None:
        """Wait for the completions of a plain answer."""
        try:
            await generation.finish(record)
        except IncompleteGenerationError:
            if watch.gone:
                raise ClientDisconnectedError from None
            raise
        except asyncio.CancelledError:
            record.finish(Outcome.ERROR)
            error = UnavailableError("the server is stopping")
            response = error_response(error, self._dialect.render_error(error))
            await response(scope, receive, send)
            raise
