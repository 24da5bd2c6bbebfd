"""Measures the CPU time that the HTTP process needs for a request and for a scrape of its metrics.

The application and uvicorn's protocol are real; the socket and the engine are not. The engine's messages are decoded
from bytes, one per token, in a callback of its own. Rounds alternate between the requests, and the fastest and the
median round are reported, because other load on the machine slows them. To compare two commits, run both at the same
time.

    python -m benchmarks.http_requests [--rounds 15] [--log-level info]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
import uvloop
from uvicorn.server import ServerState

from benchmarks.paced_engine import NO_PLAN
from benchmarks.report import add_bookkeeping, write_report
from model.hub.resolve import BUNDLED, resolve
from model.text.tokenizer import Tokenizer
from server.engine.core.messages import (
    EngineInfo,
    EngineMessage,
    EngineStats,
    SequenceStarted,
    StepMessage,
)
from server.engine.core.request import FinishReason, GenerateRequest, SequenceUsage
from server.engine.link.front_end.client import EngineHandle
from server.engine.link.protocol import EngineReport, EngineState
from server.http.app import create_app
from server.http.config import HTTPConfig
from server.http.serving import with_middleware
from server.http.transport import Connections, HTTP11Protocol
from server.log import configure_logging

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server.engine.core.messages import AbortRequests
    from server.http.transport.cycle import Cycle

_LIMIT = 1 << 20
_FIRST_TOKEN, _TOKENS = 300, 200
_REQUEST_ID = 1
_ROUND_SECONDS = 0.1
_PROMPT = "import os\nimport sys\n\n\ndef find_files(directory, suffix):\n"
_HEADERS = (
    "Host: localhost:8000\r\nUser-Agent: benchmark\r\nAccept: */*\r\nAccept-Encoding: gzip\r\n"
)


class ScriptedEngine(EngineHandle):
    """Answers one request at a time with prepared messages."""

    def __init__(self) -> None:
        super().__init__()
        info = EngineInfo(
            model_id="m", device="none", dtype="none", vocab_size=_LIMIT, max_model_len=_LIMIT, max_total_tokens=_LIMIT,
            max_num_seqs=64, max_num_batched_tokens=1, max_prefill_tokens=1, block_size=1, num_blocks=1,
            quantization="none", kv_cache_dtype="none", num_parameters=0, plan=NO_PLAN, startup_seconds={}, versions={},
        )  # fmt: skip
        self.reports = [EngineReport(state=EngineState.READY, phase="ready", info=info)]
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)
        self._prepared: dict[int, list[bytes]] = {}

    def next_request_id(self) -> int:
        """Return the id of the prepared messages."""
        return _REQUEST_ID

    def _send(self, message: GenerateRequest | AbortRequests) -> None:
        self._encoder.encode(message)
        if isinstance(message, GenerateRequest):
            count = message.sampling.max_new_tokens
            if count not in self._prepared:
                self._prepared[count] = [self._encoder.encode(step) for step in _steps(count)]
            self._continue(iter(self._prepared[count]))

    def _continue(self, messages: Iterator[bytes]) -> None:
        asyncio.get_running_loop().call_soon(self._receive, messages)

    def _receive(self, messages: Iterator[bytes]) -> None:
        if (data := next(messages, None)) is not None:
            step = self._decoder.decode(data)
            assert isinstance(step, StepMessage)
            self.reports[0].stats = step.stats or self.stats
            self._deliver([step])
            self._continue(messages)


def _steps(count: int) -> Iterator[StepMessage]:
    """Make the messages of a request with `count` tokens."""
    for i in range(count):
        last = i == count - 1
        yield StepMessage(
            request_ids=[_REQUEST_ID],
            token_ids=[_FIRST_TOKEN + i % _TOKENS],
            finish_reasons=[int(FinishReason.LENGTH) if last else 0],
            logprobs={0: -1.23456789},
            started=[] if i else [SequenceStarted(_REQUEST_ID, 0.0001, 0)],
            usage={0: SequenceUsage(prefill_seconds=0.001, num_steps=count)} if last else {},
            stats=EngineStats(num_running=1, num_blocks=1, num_steps=i),
        )


class DroppingTransport(asyncio.Transport):
    """Accepts and drops everything."""

    __slots__ = ()

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - of asyncio
        """Return the addresses."""
        return {"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 80)}.get(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Drop data."""

    def is_closing(self) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Do nothing."""

    def get_write_buffer_size(self) -> int:
        """Return 0."""
        return 0

    def pause_reading(self) -> None:
        """Do nothing."""

    def resume_reading(self) -> None:
        """Do nothing."""


class _Protocol(HTTP11Protocol):
    """Reports the end of a response."""

    answered: asyncio.Future[None]

    def on_response_complete(self, cycle: Cycle) -> None:
        super().on_response_complete(cycle)
        self.answered.set_result(None)


def post(path: str, body: dict[str, Any]) -> bytes:
    """Render a request with a JSON body."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\n{_HEADERS}Content-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def _generate(path: str, tokens: int) -> bytes:
    parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return post(path, {"inputs": _PROMPT, "parameters": parameters})


def _complete(tokens: int, *, stream: bool) -> bytes:
    body = {"model": "m", "prompt": _PROMPT, "temperature": 0, "ignore_eos": True}
    return post("/v1/completions", {**body, "max_tokens": tokens, "stream": stream})


REQUESTS = {
    "POST /generate, 16 tokens": _generate("/generate", 16),
    "POST /generate_stream, 1 token": _generate("/generate_stream", 1),
    "POST /generate_stream, 64 tokens": _generate("/generate_stream", 64),
    "POST /v1/completions, 16 tokens": _complete(16, stream=False),
    "POST /v1/completions, stream of 64 tokens": _complete(64, stream=True),
    "GET /metrics": f"GET /metrics HTTP/1.1\r\n{_HEADERS}\r\n".encode(),
}


async def measure(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of CPU time of each request, by round."""
    folder = resolve(BUNDLED)
    limits = HTTPConfig(model_id="m")
    app = create_app(ScriptedEngine(), Tokenizer.from_folder(folder), limits)
    config = uvicorn.Config(
        with_middleware(app), lifespan="off", log_config=None, access_log=False, server_header=False
    )
    config.load()
    protocol = _Protocol(Connections(limits), config, ServerState(), {})
    protocol.connection_made(DroppingTransport())
    loop = asyncio.get_running_loop()

    async def seconds(request: bytes, count: int) -> float:
        start = time.process_time()
        for _ in range(count):
            protocol.answered = loop.create_future()
            protocol.data_received(request)
            await protocol.answered
        return (time.process_time() - start) / count

    for request in REQUESTS.values():
        await seconds(request, 20)
    gc.collect()
    gc.freeze()
    counts = {
        name: max(1, int(_ROUND_SECONDS / await seconds(request, 20)))
        for name, request in REQUESTS.items()
    }
    times: dict[str, list[float]] = {name: [] for name in REQUESTS}
    for _ in range(rounds):
        for name, request in REQUESTS.items():
            times[name].append(await seconds(request, counts[name]))
            await asyncio.sleep(0.02)  # for the last lines of the access log
    return times


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--log-level", default="info", help="at `warning` there is no access log")
    add_bookkeeping(parser)
    options = parser.parse_args()
    configure_logging(options.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        times = runner.run(measure(options.rounds))
    rows = [
        {
            "request": name,
            "log_level": options.log_level,
            "cpu_us_fastest": round(1e6 * min(seconds), 1),
            "cpu_us_median": round(1e6 * statistics.median(seconds), 1),
        }
        for name, seconds in times.items()
    ]
    libraries = ("uvicorn", "uvloop", "httptools", "fastapi", "starlette", "pydantic", "msgspec")
    write_report("requests", rows, libraries, folder=options.out, revision=options.commit)


if __name__ == "__main__":
    main()
