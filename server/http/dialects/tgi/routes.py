"""TGI's routes: /generate, /generate_stream, POST /, /chat_tokenize and /info; its form of /tokenize."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from server.errors import TesseraError, UnavailableError
from server.http.dialects.tgi.chat_tokenize import (
    ChatTokenizeBody,
    ChatTokenizeReply,
    held_bytes,
    span_pieces,
    tokenize_chat,
)
from server.http.dialects.tgi.generate import GenerateAnswer, read_request
from server.http.dialects.tgi.legacy import read_body
from server.http.dialects.tgi.replies import (
    ErrorReply,
    GenerateReply,
    InfoReply,
    PromptSpan,
    StreamEvent,
)
from server.http.dialects.tgi.schema import GenerateBody
from server.http.exchange import Dialect, Exchange
from server.http.openapi import describe_error, describe_route, describe_service_route
from server.http.responses import ErrorBody, json_response
from server.http.token_replies import TokenReply
from server.http.token_routes import TokenExchange, TokenForm, describe_forms
from server.version import version

if TYPE_CHECKING:
    from fastapi import FastAPI

    from server.engine.core.messages import EngineInfo
    from server.http.context import AppContext
    from server.http.dialects.tgi.frames import TokenHeads

# The release of TGI whose API this is. Clients parse it: llama-index reads `max_input_tokens` only from 2.1.0 on.
_TGI_VERSION = "3.3.6"


def _install(app: FastAPI, context: AppContext) -> None:
    heads: TokenHeads = {}

    def respond(endpoint: str, *, stream: bool | None) -> Response:
        def answer(body: object, info: EngineInfo) -> GenerateAnswer:
            return read_request(body, context, info, heads, endpoint=endpoint, stream=stream)

        return Exchange(TGI, context, endpoint, answer)

    @app.post("/generate", **describe_route(GenerateBody, ErrorReply, GenerateReply))
    async def generate() -> Response:
        """Continue a prompt."""
        return respond("generate", stream=False)

    @app.post("/generate_stream", **describe_route(GenerateBody, ErrorReply, events=StreamEvent))
    async def generate_stream() -> Response:
        """Continue a prompt and send each token as soon as it is generated."""
        return respond("generate_stream", stream=True)

    @app.post("/", **describe_route(GenerateBody, ErrorReply, list[GenerateReply], StreamEvent))
    async def compat() -> Response:
        """Continue a prompt: a stream if `stream` is true, else an array of one reply."""
        return respond("compat", stream=None)

    @app.post("/chat_tokenize", **describe_forms([_CHAT]))
    async def chat_tokenize() -> Response:
        """Return a conversation as the chat template renders it, and its tokens."""
        return TokenExchange(context, [_CHAT])

    info = describe_service_route(InfoReply)
    info["responses"][UnavailableError.status] = describe_error(UnavailableError, ErrorReply)

    @app.get("/info", **info)
    async def read_info() -> Response:
        """Report the served model and the limits of a request."""
        return json_response(_info(context))


def _render_error(error: TesseraError) -> ErrorBody:
    return error.status, ErrorReply(error.message, error.error_type)


async def _tokenize(context: AppContext, body: object) -> TokenReply:
    request, warnings = read_body(body)
    text = request.inputs
    spans = await context.tokenize(
        text, "inputs", lambda: context.tokenizer.encode_with_offsets(text)
    )
    if request.parameters is not None and request.parameters.truncate is not None:
        spans = spans[-request.parameters.truncate :]
    return TokenReply(span_pieces(spans), held_bytes(spans), warnings)


_CHAT = TokenForm(
    endpoint="chat_tokenize",
    keys=("messages",),
    body=ChatTokenizeBody,
    reply=ChatTokenizeReply,
    error_reply=ErrorReply,
    answer=tokenize_chat,
    render_error=_render_error,
)
TGI = Dialect(
    prefix="/",
    endpoints=("generate", "generate_stream", "compat", "chat_tokenize"),
    install=_install,
    render_error=_render_error,
    error_reply=ErrorReply,
    bodies=(GenerateBody, ChatTokenizeBody),
    replies=(ErrorReply, GenerateReply, InfoReply, PromptSpan, ChatTokenizeReply, StreamEvent),
    token_forms=(
        TokenForm(
            endpoint="tokenize",
            keys=("inputs",),
            body=GenerateBody,
            reply=list[PromptSpan],
            error_reply=ErrorReply,
            answer=_tokenize,
            render_error=_render_error,
        ),
    ),
)


def _info(context: AppContext) -> InfoReply:
    info, config = context.engine_info(), context.config
    chat = context.chat_template
    return InfoReply(
        model_id=config.model_id,
        model_sha=None,
        model_dtype=info.dtype,
        quantization=info.quantization,
        model_device_type=info.device,
        model_pipeline_tag="text-generation",
        model_use="completion" if chat is None or config.continues_text else "chat",
        chat_template=chat is not None,
        end_tokens=config.end_tokens,
        max_concurrent_requests=context.admission.limit(info),
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_top_n_tokens=config.max_top_n_tokens,
        max_input_tokens=info.max_total_tokens - 1,
        max_total_tokens=info.max_total_tokens,
        max_body_bytes=config.max_body_bytes,
        validation_workers=config.validation_workers,
        max_client_batch_size=config.max_client_batch_size,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_prefill_tokens=info.max_prefill_tokens,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        kv_cache_dtype=info.kv_cache_dtype,
        sampling_defaults=config.sampling_defaults,
        num_engines=len(context.client.reports),
        num_engines_ready=context.client.num_ready,
        router="tessera",
        version=_TGI_VERSION,
        tessera_version=version(),
        sha=None,
        docker_label=None,
    )
