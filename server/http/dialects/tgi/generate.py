"""The generate routes: one request from its body to the last byte of its answer.

The answer is made inside the response object, not before it: what a request holds (its place, its
sequences in the engine) is then taken and given back in one stretch of code.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from server.errors import (
    ClientError,
    IncompleteGenerationError,
    OverloadedError,
    TesseraError,
    UnavailableError,
    ValidationError,
)
from server.http.dialects.tgi.limits import check
from server.http.dialects.tgi.replies import GenerateReply, StreamEvent
from server.http.dialects.tgi.schema import GenerateBody
from server.http.dialects.tgi.schema_errors import parse
from server.http.generation import Generation, encode_prompt
from server.http.metrics.registry import Endpoint, Outcome
from server.http.openapi import describe_route
from server.http.replying import header, send_error, send_json
from server.http.request_body import ClientDisconnectedError, ClientWatch, read_json
from server.http.streaming import stream_generation
from server.http.transport import wire_of

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Receive, Scope, Send

    from server.engine.core.messages import EngineInfo
    from server.http.context import AppContext
    from server.http.metrics.records import RequestRecord

_encode_json = msgspec.json.Encoder().encode


def install(app: FastAPI, context: AppContext) -> None:
    """Add the routes /generate, /generate_stream and POST /."""
    both = describe_route(GenerateBody, list[GenerateReply], events=StreamEvent)

    @app.post("/generate", **describe_route(GenerateBody, GenerateReply))
    async def generate() -> Response:
        """Continue a prompt."""
        return _Exchange(context, Endpoint.GENERATE)

    @app.post("/generate_stream", **describe_route(GenerateBody, events=StreamEvent))
    async def generate_stream() -> Response:
        """Continue a prompt, and send each token as soon as it is there."""
        return _Exchange(context, Endpoint.GENERATE_STREAM)

    @app.post("/", **both)
    async def compat() -> Response:
        """Continue a prompt: a stream where `stream` is true, else an array of one answer."""
        return _Exchange(context, Endpoint.COMPAT)


def outcome_of(error: TesseraError) -> Outcome:
    """The label that a failed request is counted under."""
    if isinstance(error, ClientError):
        return Outcome.VALIDATION
    if isinstance(error, OverloadedError):
        return Outcome.OVERLOADED
    return Outcome.UNAVAILABLE if isinstance(error, UnavailableError) else Outcome.ERROR


class _Exchange(Response):
    """Reads one request, has it generated, and answers; aborts it when the client goes away."""

    def __init__(self, context: AppContext, endpoint: Endpoint) -> None:
        self.background = None
        self._context = context
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request.

        Raises:
            TesseraError: nothing was sent yet, and this is the answer.
        """
        record = self._context.metrics.begin(self._endpoint)
        try:
            await self._serve(scope, receive, send, record)
        except ClientDisconnectedError:
            record.finish(Outcome.ABORT)
        except TesseraError as error:
            record.finish(outcome_of(error))
            raise
        except asyncio.CancelledError:
            record.finish(Outcome.ABORT)
            raise
        except Exception:
            record.finish(Outcome.ERROR)
            raise

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, record: RequestRecord
    ) -> None:
        context, config = self._context, self._context.config
        info = context.engine_info()
        body = parse(GenerateBody, await read_json(scope, receive, config))
        streaming = _is_stream(self._endpoint, body)
        full_text = self._endpoint is Endpoint.COMPAT
        options = check(body, streaming=streaming, full_text=full_text, config=config, info=info)
        with context.admit(options.best_of, info):
            prompt_ids, sampling = await encode_prompt(context, options, info)
            generation = Generation(context, options, prompt_ids, sampling)
            headers = _headers(generation, info)
            try:
                with ClientWatch(receive, generation.abort) as watch:
                    if streaming:
                        await stream_generation(
                            generation, send, headers, context, record, watch, wire_of(scope)
                        )
                    else:
                        await self._reply(generation, send, headers, record, watch)
            finally:
                generation.abort()
            transcript = generation.draws[0].transcript
            if transcript.finish_reason is not None:
                record.succeed(
                    Outcome(transcript.finish_reason),
                    queue_seconds=generation.queue_seconds,
                    prompt_tokens=len(prompt_ids),
                    generated_tokens=transcript.num_tokens,
                )

    async def _reply(
        self,
        generation: Generation,
        send: Send,
        headers: list[tuple[bytes, bytes]],
        record: RequestRecord,
        watch: ClientWatch,
    ) -> None:
        try:
            best = await generation.finish(record)
        except IncompleteGenerationError:
            if watch.gone:
                raise ClientDisconnectedError from None
            raise
        except asyncio.CancelledError:
            record.finish(Outcome.ERROR)
            await send_error(send, UnavailableError("the server is stopping"))
            raise
        reply = generation.reply()
        body = _encode_json([reply] if self._endpoint is Endpoint.COMPAT else reply)
        headers += _timing_headers(generation, record, best.transcript.num_tokens)
        if watch.gone:
            raise ClientDisconnectedError
        await send_json(send, body, headers)


def _is_stream(endpoint: Endpoint, body: GenerateBody) -> bool:
    """Whether the answer is a stream; on the routes that have no choice, `stream` may only agree.

    Raises:
        ValidationError: `stream` asks a route for what it does not do.
    """
    if endpoint is Endpoint.COMPAT:
        return bool(body.stream)
    streaming = endpoint is Endpoint.GENERATE_STREAM
    if body.stream is not None and body.stream is not streaming:
        other = "generate" if streaming else "generate_stream"
        raise ValidationError(
            f"`stream` must be {str(streaming).lower()} on /{endpoint.value}: use /{other}, or /. "
            f"Given: {str(body.stream).lower()}"
        )
    return streaming


def _headers(generation: Generation, info: EngineInfo) -> list[tuple[bytes, bytes]]:
    """What is known before the first token."""
    return [
        header("x-compute-type", "gpu+optimized" if info.device.startswith("cuda") else "cpu"),
        header("x-compute-characters", len(generation.options.inputs)),
        header("x-prompt-tokens", len(generation.prompt_ids)),
    ]


def _timing_headers(
    generation: Generation, record: RequestRecord, generated_tokens: int
) -> list[tuple[bytes, bytes]]:
    """Where the time went: x-compute-time in seconds, the others in whole milliseconds."""
    now = time.perf_counter()
    queue = generation.queue_seconds
    inference = max(0.0, now - generation.submitted - queue)
    return [
        header("x-compute-time", f"{now - record.started:.9f}"),
        header("x-total-time", _milliseconds(now - record.started)),
        header("x-validation-time", _milliseconds(generation.submitted - record.started)),
        header("x-queue-time", _milliseconds(queue)),
        header("x-inference-time", _milliseconds(inference)),
        header("x-time-per-token", _milliseconds(inference / generated_tokens)),
        header("x-generated-tokens", generated_tokens),
    ]


def _milliseconds(seconds: float) -> int:
    return int(1000 * seconds)
