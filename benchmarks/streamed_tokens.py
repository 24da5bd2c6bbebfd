"""Measures the CPU time of the HTTP process for a token of many streams, with and without the sockets.

The application and the protocol are real, the engine is not: prepared messages of a step, with a token for every
stream, are decoded and distributed in this process. `together` messages are handled at once, as in a front end that is
behind; every stream then gets one write for them. With the transport "none" the bytes are dropped; with "sockets" a
second process reads them over loopback, and the difference is what uvloop and the operating system take. `send` is the
floor: the same number of `socket.send` of a token's frame to as many connections, and nothing else. With a pause the
process is idle between the messages, which leaves its caches to others, as at low rates.

The cases alternate within each round; the medians of the rounds are reported.

    python -m benchmarks.streamed_tokens [--streams 256] [--rounds 7]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import multiprocessing
import select
import socket
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import uvicorn
import uvloop
from uvicorn.server import ServerState

from benchmarks.http_requests import DroppingTransport, ScriptedEngine, post
from benchmarks.report import add_bookkeeping, write_report
from model.hub.resolve import BUNDLED, resolve
from model.text.tokenizer import Tokenizer
from server.engine.core.messages import EngineStats, StepMessage
from server.engine.core.request import GenerateRequest
from server.http.app import create_app
from server.http.config import HTTPConfig
from server.http.serving import with_middleware
from server.http.transport import protocol_factory
from server.log import configure_logging

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server.engine.core.messages import AbortRequests

_PROMPT = "def find_files(directory, suffix):\n"
_LIMIT = 1 << 20
_FIRST_TOKEN, _TOKENS, _STRIDE = 300, 1000, 7
_TOKENS_PER_CASE = 60  # of each stream and round
_PAUSE = 1 / 60
_REQUESTS = {
    "tgi": post(
        "/generate_stream",
        {"inputs": _PROMPT, "parameters": {"max_new_tokens": _LIMIT // 2, "temperature": 0}},
    ),
    "openai": post(
        "/v1/completions",
        {
            "model": "m", "prompt": _PROMPT, "max_tokens": _LIMIT // 2, "temperature": 0, "stream": True,
        },
    ),
}  # fmt: skip
_FRAME = (
    b'data:{"index":100,"token":{"id":300,"text":" import","logprob":-1.23456789,"special":false},'
    b'"generated_text":null,"details":null}\n\n'
)


class _Case(NamedTuple):
    """What is measured: messages that are handled together, and the pause after them in seconds."""

    together: int
    pause: float = 0.0


_CASES = (_Case(1, _PAUSE), _Case(1), _Case(2), _Case(4), _Case(16))


class _Engine(ScriptedEngine):
    """Sends a token to all streams for each message.

    Attributes:
        request_ids: of the streams.
        submitted: set when all streams are submitted.
    """

    def __init__(self, streams: int, *, logprobs: bool) -> None:
        super().__init__()
        self.request_ids: list[int] = []
        self.submitted = asyncio.Event()
        self._streams_expected = streams
        self._free_ids = itertools.count(1)
        self._logprobs = logprobs
        self._steps = 0

    def next_request_id(self) -> int:
        return next(self._free_ids)

    def _send(self, message: GenerateRequest | AbortRequests) -> None:
        if isinstance(message, GenerateRequest):
            self.request_ids.append(message.request_id)
            if len(self.request_ids) == self._streams_expected:
                self.submitted.set()

    def message(self) -> bytes:
        """Encode the message of the next step."""
        count = len(self.request_ids)
        self._steps += 1
        return self._encoder.encode(
            StepMessage(
                request_ids=self.request_ids,
                token_ids=[_FIRST_TOKEN + self._steps * _STRIDE % _TOKENS] * count,
                finish_reasons=[0] * count,
                logprobs=dict.fromkeys(range(count), -1.23456789) if self._logprobs else {},
                stats=EngineStats(num_running=count, num_blocks=1, num_steps=self._steps),
            )
        )

    def receive(self, messages: list[bytes]) -> None:
        """Handle messages that arrived together."""
        decoded = map(self._decoder.decode, messages)
        self._deliver([message for message in decoded if isinstance(message, StepMessage)])


def _read(port: int, streams: int, request: bytes) -> None:
    """Open connections, send a request on each, and read what comes until all are closed."""
    poll, open_sockets = select.epoll(), {}
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        open_sockets[connection.fileno()] = connection
        poll.register(connection, select.EPOLLIN)
    while open_sockets:
        for fd, _ in poll.poll():
            if not open_sockets[fd].recv(1 << 20):
                poll.unregister(fd)
                open_sockets.pop(fd).close()


@contextlib.contextmanager
def _reader(port: int, streams: int, request: bytes) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(
        target=_read, args=(port, streams, request), daemon=True
    )
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


async def _front_end(
    api: str, streams: int, *, sockets: bool, stack: contextlib.ExitStack
) -> _Engine:
    """Start the application with running streams; return its engine."""
    limits = HTTPConfig(model_id="m", max_concurrent_requests=streams)
    engine = _Engine(streams, logprobs=api == "tgi")
    app = create_app(engine, Tokenizer.from_folder(resolve(BUNDLED)), limits)
    config = uvicorn.Config(
        with_middleware(app), lifespan="off", log_config=None, access_log=False, server_header=False
    )
    config.load()
    new_protocol, state = protocol_factory(limits), ServerState()
    if sockets:
        server = await asyncio.get_running_loop().create_server(
            lambda: new_protocol(config, state, {}), "127.0.0.1", 0, backlog=streams
        )
        port = server.sockets[0].getsockname()[1]
        stack.enter_context(_reader(port, streams, _REQUESTS[api]))
    else:
        for _ in range(streams):
            protocol = new_protocol(config, state, {})
            protocol.connection_made(DroppingTransport())
            protocol.data_received(_REQUESTS[api])
    await engine.submitted.wait()
    for _ in range(_TOKENS):  # all texts are cached
        engine.receive([engine.message()])
        await asyncio.sleep(0)
    return engine


async def _tokens(engine: _Engine, case: _Case) -> float:
    """Return the seconds of CPU time of this thread for each token."""
    batches = [
        [engine.message() for _ in range(case.together)]
        for _ in range(max(1, _TOKENS_PER_CASE // case.together))
    ]
    start = time.thread_time()
    for messages in batches:
        engine.receive(messages)
        await asyncio.sleep(case.pause)
    seconds = time.thread_time() - start
    return seconds / (len(batches) * case.together * len(engine.request_ids))


def _sends(connections: list[socket.socket], pause: float) -> float:
    """Return the seconds of CPU time of this thread for each `send` of a frame."""
    start = time.thread_time()
    for _ in range(_TOKENS_PER_CASE):
        for connection in connections:
            connection.send(_FRAME)
        time.sleep(pause)
    return (time.thread_time() - start) / (_TOKENS_PER_CASE * len(connections))


async def measure(streams: int, rounds: int) -> list[dict[str, Any]]:
    """Return a record for each case."""
    times: dict[tuple[str, str, _Case], list[float]] = {}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=streams))
        stack.enter_context(_reader(listener.getsockname()[1], streams, b""))
        connections = [listener.accept()[0] for _ in range(streams)]
        for connection in connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        engines = {
            (api, "sockets" if sockets else "none"): await _front_end(
                api, streams, sockets=sockets, stack=stack
            )
            for api in _REQUESTS
            for sockets in (False, True)
        }
        gc.collect()
        gc.freeze()
        for _ in range(rounds):
            for pause in (_PAUSE, 0.0):
                seconds = _sends(connections, pause)
                times.setdefault(("send", "sockets", _Case(1, pause)), []).append(seconds)
            for (api, transport), engine in engines.items():
                for case in _CASES:
                    seconds = await _tokens(engine, case)
                    times.setdefault((api, transport, case), []).append(seconds)
    return [
        {
            "api": api,
            "transport": transport,
            "streams": streams,
            "together": case.together,
            "pause_ms": round(1000 * case.pause, 1),
            "cpu_us_per_token": round(1e6 * statistics.median(seconds), 2),
            "fastest_us": round(1e6 * min(seconds), 2),
            "tokens_per_second_of_a_core": round(1 / statistics.median(seconds), -3),
        }
        for (api, transport, case), seconds in times.items()
    ]


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    add_bookkeeping(parser)
    options = parser.parse_args()
    configure_logging("warning")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(measure(options.streams, options.rounds))
    libraries = ("uvicorn", "uvloop", "httptools", "starlette", "msgspec")
    write_report("streamed-tokens", rows, libraries, folder=options.out, revision=options.commit)


if __name__ == "__main__":
    main()
