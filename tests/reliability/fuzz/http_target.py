"""Fuzzes everything between a connection and the engine: the parser, the protocol, the middleware, all routes.

The application and uvicorn's protocol are real; the socket and the engine are in memory. A case is the bytes of a
connection, in pieces. Findings are: an exception that reaches a log or the event loop, a reply with status 500, output
that is not HTTP, and requests that are still in flight after the connection has closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

import httptools
import msgspec
import uvicorn
from uvicorn.server import ServerState

from benchmarks.paced_engine import NO_PLAN
from model.hub.resolve import BUNDLED, resolve
from model.text.tokenizer import Tokenizer
from server.engine.core.messages import EngineInfo, StepMessage
from server.engine.core.request import FinishReason, GenerateRequest
from server.engine.link.front_end.client import EngineHandle
from server.engine.link.protocol import EngineReport, EngineState
from server.http.app import create_app
from server.http.config import HTTPConfig
from server.http.serving import with_middleware
from server.http.transport import Connections, HTTP11Protocol
from tests.reliability.malformed import SEEDS, mutate, random_document

if TYPE_CHECKING:
    import random

    from server.engine.core.messages import AbortRequests

_VOCABULARY = 4096
_LONGEST = 512
_SETTLE_SECONDS = 0.02
_GONE_SECONDS = 10.0
_CUT = b"\0--cut--\0"


class FuzzError(Exception):
    """The target did something that no input may make it do."""


class InstantEngine(EngineHandle):
    """Answers each request in the next pass of the event loop, all tokens at once; forgets what is aborted."""

    def __init__(self) -> None:
        super().__init__()
        info = EngineInfo(
            model_id="m", device="none", dtype="none", vocab_size=_VOCABULARY, max_model_len=_LONGEST,
            max_total_tokens=_LONGEST, max_num_seqs=64, max_num_batched_tokens=_LONGEST, max_prefill_tokens=_LONGEST,
            block_size=16, num_blocks=64, quantization="none", kv_cache_dtype="none", num_parameters=0, plan=NO_PLAN,
            startup_seconds={}, versions={},
        )  # fmt: skip
        self.reports = [EngineReport(state=EngineState.READY, phase="ready", info=info)]
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def in_flight(self) -> int:
        """Number of streams."""
        return len(self._streams)

    def _send(self, message: GenerateRequest | AbortRequests) -> None:
        self._encoder.encode(message)
        if isinstance(message, GenerateRequest):
            asyncio.get_running_loop().call_soon(self._answer, message)

    def _answer(self, request: GenerateRequest) -> None:
        count = min(request.sampling.max_new_tokens, 5)
        for i in range(count):
            reason = int(FinishReason.LENGTH) if i == count - 1 else 0
            step = StepMessage(
                request_ids=[request.request_id], token_ids=[300 + i], finish_reasons=[reason],
                logprobs={0: -1.0}, top_tokens={0: [(300, -1.0), (301, -2.0)]},
                prompt_logprobs={request.request_id: [-1.0] * (len(request.prompt_token_ids) - 1)},
            )  # fmt: skip
            self._deliver([step])


class _Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 80)}.get(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.closed:
            self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def write_eof(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class _Replies:
    """Parses what was written to a connection."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    def parse(self, data: bytes) -> None:
        """Parse replies one after another.

        Raises:
            FuzzError: they are not HTTP.
        """
        try:
            self._parser = httptools.HttpResponseParser(self)
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise FuzzError(f"the output is not HTTP: {error}: {data[:3000]!r}") from error

    def on_headers_complete(self) -> None:
        """Note the status."""
        self.statuses.append(self._parser.get_status_code())


class _Errors(logging.Handler):
    """Collects log records with an exception."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])


class HTTPTarget:
    """See the module."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine = InstantEngine()
        folder = resolve(BUNDLED)
        limits = HTTPConfig(model_id="m", access_log=False, max_body_bytes=300_000)
        app = create_app(self._engine, Tokenizer.from_folder(folder), limits)
        self._config = uvicorn.Config(
            with_middleware(app), lifespan="off", log_config=None, access_log=False
        )
        self._config.load()
        self._connections = Connections(limits)
        self._errors = _Errors()
        logging.getLogger().addHandler(self._errors)
        self._loop.set_exception_handler(self._on_loop_error)

    def close(self) -> None:
        """Close the event loop, and collect no more errors."""
        logging.getLogger().removeHandler(self._errors)
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _on_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._errors.errors.append(context.get("exception") or FuzzError(str(context["message"])))

    def make(self, rng: random.Random) -> bytes:
        """Make the bytes of a connection: one to three requests, correct or mutated, in one or several pieces."""
        parts = []
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            data = random_document(rng) if rng.random() < 0.3 else rng.choice(SEEDS)
            parts.append(data if rng.random() < 0.2 else mutate(data, rng))
        data = b"".join(parts)
        for _ in range(rng.choice([0, 0, 1, 3])):
            position = rng.randrange(len(data) + 1)
            data = data[:position] + _CUT + data[position:]
        return data

    def check(self, case: bytes) -> None:
        """Serve one connection."""
        self._errors.errors.clear()
        self._loop.run_until_complete(self._serve(case.split(_CUT)))
        if self._errors.errors:
            raise self._errors.errors[0]

    async def _serve(self, pieces: list[bytes]) -> None:
        transport = _Transport()
        state = ServerState()
        protocol = HTTP11Protocol(self._connections, self._config, state, {})
        protocol.connection_made(transport)
        for piece in pieces:
            if not transport.closed:
                protocol.data_received(piece)
            await asyncio.sleep(0)
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline and not transport.closed:
            written = len(transport.written)
            for _ in range(30):
                await asyncio.sleep(0)
            if written == len(transport.written) and not state.tasks:
                break
            await asyncio.sleep(0.001)
        protocol.connection_lost(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GONE_SECONDS):
                while state.tasks or self._engine.in_flight:  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.001)
        if state.tasks or self._engine.in_flight:
            raise FuzzError("a request is in flight after its connection has closed")
        if transport.written:
            replies = _Replies()
            replies.parse(bytes(transport.written))
            if 500 in replies.statuses:
                raise FuzzError(f"a reply has status 500: {bytes(transport.written[-300:])!r}")
