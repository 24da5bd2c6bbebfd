"""How many tokens a second can one process of `tessera bench serve` take before it is what is measured?

The server is another process that has nothing to compute: it sends all streams their next token, one write each, as
fast as it can, or so many steps a second. What counts is the client's processor time for a token; the tokens a second
of a whole core follow from it. httpx reads the same streams beside it. The best of some rounds counts, as a neighbour
only slows.

    python -m benchmarks.client [--streams 256] [--tokens 400] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from typing import TYPE_CHECKING, Any

import httpx
import uvloop

from benchmarks.report import write_report
from server.cli.bench.serve.apis import APIS, Name, Options
from server.cli.bench.serve.load import Job, Share, run_here
from server.cli.bench.serve.metrics import summarise

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_FRAMES: dict[Name, tuple[bytes, bytes]] = {
    "tgi": (
        b'data:{"index":7,"token":{"id":1094,"text":" return","logprob":-1.12974620,"special":false}'
        b',"generated_text":null,"details":null}\n\n',
        b'data:{"index":7,"token":{"id":1094,"text":" return","logprob":-1.12974620,"special":false}'
        b',"generated_text":"...","details":{"finish_reason":"length","generated_tokens":%d'
        b',"seed":null,"input_length":3}}\n\n',
    ),
    "openai": (
        b'data: {"id":"cmpl-4ac2b91f3a2e4f","object":"text_completion","created":1763731200,"model":"none",'
        b'"choices":[{"index":0,"text":" return","logprobs":null,"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"text":" return","logprobs":null,"finish_reason":"length"}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":%d}}\n\ndata: [DONE]\n\n',
    ),
}


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class _Stream(asyncio.Protocol):
    """Waits for a request, which is taken unread."""

    waiting: list[asyncio.Transport]

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - uvloop's is of a class of its own
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"POST"):
            self.waiting.append(self._transport)


def serve(pipe: Connection, api: Name, streams: int, tokens: int, steps_per_second: float) -> None:
    """Answer rounds of so many streams until the process is ended."""

    async def run() -> None:
        _Stream.waiting = []
        loop = asyncio.get_running_loop()
        server = await loop.create_server(_Stream, "127.0.0.1", 0, backlog=streams)
        pipe.send(server.sockets[0].getsockname()[1])
        frame, last = (chunk(data) for data in _FRAMES[api])
        last = chunk(_FRAMES[api][1] % tokens) + b"0\r\n\r\n"
        while True:
            while len(_Stream.waiting) < streams:  # noqa: ASYNC110 - no event to wait for
                await asyncio.sleep(0.001)
            transports, _Stream.waiting = _Stream.waiting, []
            begin = time.perf_counter()
            for step in range(tokens):
                data = _HEAD + frame if step == 0 else last if step == tokens - 1 else frame
                for transport in transports:
                    transport.write(data)
                wait = (
                    begin + step / steps_per_second - time.perf_counter() if steps_per_second else 0
                )
                await asyncio.sleep(max(0.0, wait))

    uvloop.run(run())


def ours(url: str, api: Name, streams: int, tokens: int) -> float:
    """Processor seconds of our client for a token."""
    jobs = [Job(APIS[api]().body("x", tokens, Options("none")), tokens, 1) for _ in range(streams)]
    share = Share(url, [], api, jobs, [], streams, 60.0)
    (outcome,) = run_here(share, lambda _: time.perf_counter())
    summary = summarise(outcome.records)
    assert not summary.failed, summary.errors
    assert summary.output_tokens == streams * tokens
    return outcome.busy * summary.seconds / summary.output_tokens


def with_httpx(url: str, api: Name, streams: int, tokens: int) -> float:
    """Processor seconds for a token of a client that only finds the lines with data."""

    async def read(client: httpx.AsyncClient) -> int:
        async with client.stream("POST", f"{url}{APIS[api].path}", content=b"{}") as response:
            return sum([line.startswith("data:") async for line in response.aiter_lines()])

    async def run() -> float:
        limits = httpx.Limits(max_connections=streams)
        async with httpx.AsyncClient(timeout=60.0, limits=limits) as client:
            start = time.process_time()
            events = sum(await asyncio.gather(*(read(client) for _ in range(streams))))
            seconds = time.process_time() - start
        assert events >= streams * tokens
        return seconds / (streams * tokens)

    return uvloop.run(run())


def measure(
    client: Callable[[str, Name, int, int], float],
    api: Name,
    streams: int,
    tokens: int,
    rounds: int,
    steps_per_second: float,
) -> dict[str, Any]:
    """A client's cost of a token."""
    pipe, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(
        target=serve, args=(theirs, api, streams, tokens, steps_per_second), daemon=True
    )
    server.start()
    url = f"http://127.0.0.1:{pipe.recv()}"
    seconds = min(client(url, api, streams, tokens) for _ in range(rounds))
    server.terminate()
    server.join()
    return {
        "client": client.__name__,
        "api": api,
        "streams": streams,
        "tokens_each": tokens,
        "steps_per_second": steps_per_second or None,
        "us_per_token": round(1e6 * seconds, 2),
        "tokens_per_core_second": round(1 / seconds),
    }


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = [
        measure(client, api, options.streams, options.tokens, options.rounds, steps)
        for client in (ours, with_httpx)
        for api in _FRAMES
        for steps in (0.0, 100.0)
    ]
    write_report("client", rows, ("httptools", "uvloop", "msgspec", "httpx"))


if __name__ == "__main__":
    main()
