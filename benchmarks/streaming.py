"""What does one streamed token cost the front end, in processor time?

The engine is replaced by a loop that hands every stream its next token, step by step; the HTTP
layer, uvicorn and the sockets are real, the clients are another process. Two questions: tokens
that are sent one by one, and tokens of which several wait when the loop comes round (a busy
server), which are sent together. The best of some rounds counts, as a neighbour only slows.

    python -m benchmarks.streaming [--streams 128] [--tokens 400] [--model bundled]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import selectors
import socket
import time
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from benchmarks.report import write_report
from model.hub import resolve
from model.tokenizer import Tokenizer
from server.engine.client import RequestStream
from server.engine.plan_report import PlanReport
from server.engine.protocol import EngineInfo, EngineState, EngineStats
from server.engine.request import FinishReason, GenerateRequest, TokenEvent
from server.http.app import create_app
from server.http.config import HTTPConfig

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

_BODY = b'{"inputs": "def", "parameters": {"details": true}}'
_WAITING = (1, 4, 8)
_NO_PLAN = PlanReport(
    arch="none", arch_name="none", sm=0, num_sms=0, shared_memory_bytes=0, memory_bandwidth_gbs=0,
    peak_tflops=0.0, dtype="none", kv_dtype="none", num_heads=1, num_kv_heads=1, head_dim=1, block_size=1, phases=[],
)  # fmt: skip


class _Engine:
    """As much of `EngineClient` as the HTTP layer touches; keeps the streams it is given."""

    def __init__(self, vocab_size: int, tokens: int) -> None:
        self.state = EngineState.READY
        self.phase = "ready"
        self.stats = EngineStats()
        self.restarts = 0
        self.streams: list[RequestStream] = []
        self._ids = itertools.count(1)
        length = tokens + 1024
        self.info = EngineInfo(
            model_id="none", device="cpu", dtype="none", vocab_size=vocab_size,
            max_model_len=length, max_total_tokens=length, max_num_seqs=1, block_size=1,
            max_num_batched_tokens=1, num_blocks=1, kv_cache_dtype="none", num_parameters=0, plan=_NO_PLAN,
            startup_seconds={}, versions={},
        )  # fmt: skip

    def next_request_id(self) -> int:
        return next(self._ids)

    def submit(self, request: GenerateRequest) -> RequestStream:
        self.streams.append(RequestStream(request.request_id, self.abort))
        return self.streams[-1]

    def abort(self, request_id: int) -> None:
        pass


def read_streams(port: int, count: int, answers: Queue[int]) -> None:
    """Open streams, read them to their ends and report how many events came."""
    head = f"POST /generate_stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(_BODY)}\r\n\r\n"
    selector = selectors.DefaultSelector()
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + _BODY)
        selector.register(connection, selectors.EVENT_READ, connection)
    events = 0
    while selector.get_map():
        for key, _ in selector.select():
            data = key.data.recv(1 << 16)
            events += data.count(b"data:")
            if not data:
                selector.unregister(key.data)
                key.data.close()
    answers.put(events)


async def measure(tokenizer: Tokenizer, streams: int, tokens: int, waiting: int) -> dict[str, Any]:
    """Processor time of this process for each token of each stream."""
    engine = _Engine(tokenizer.vocab_size, tokens)
    config = HTTPConfig(model_id="none", max_concurrent_requests=streams)
    app = create_app(engine, tokenizer, config)  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0), backlog=streams)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    answers: Queue[int] = multiprocessing.Queue()
    clients = multiprocessing.Process(
        target=read_streams, args=(listener.getsockname()[1], streams, answers)
    )
    clients.start()
    while len(engine.streams) < streams:  # noqa: ASYNC110 - no event to wait for
        await asyncio.sleep(0.01)
    cpu, wall = time.process_time(), time.perf_counter()
    for step in range(tokens):
        reason = FinishReason.LENGTH if step == tokens - 1 else None
        for stream in engine.streams:
            token = TokenEvent(token_id=300 + step, logprob=-1.2345, finish_reason=reason)
            stream.push(token)
        if step % waiting == waiting - 1:
            await asyncio.sleep(0)
    while answers.empty():  # noqa: ASYNC110 - it comes from another process
        await asyncio.sleep(0.001)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    events = answers.get()
    assert events == streams * tokens, events
    server.should_exit = True
    await serving
    clients.join()
    return {
        "streams": streams,
        "tokens_each": tokens,
        "tokens_waiting": waiting,
        "cpu_us_per_token": round(1e6 * cpu / events, 2),
        "tokens_per_second": round(events / wall),
    }


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="bundled")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_folder(resolve(options.model))
    rows = []
    for waiting in _WAITING:
        rounds = [
            uvloop.run(measure(tokenizer, options.streams, options.tokens, waiting))
            for _ in range(options.rounds)
        ]
        rows.append(min(rounds, key=lambda row: row["cpu_us_per_token"]))
    write_report("streaming", rows, ("uvicorn", "uvloop", "httptools", "starlette", "msgspec"))


if __name__ == "__main__":
    main()
