"""Attacks by load: floods, disconnects, slow readers, long prompts, retries and aborts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import statistics
import time
from typing import TYPE_CHECKING, Any

from tests.attacks.record import Attack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.attacks.record import Target

_MAX_REFUSAL_P99_MS = 50.0
_MAX_TTFT_RATIO = 2.0
_TIMEOUT = 60.0
_SMALL_BUFFER = 4096
_SENDERS = 4
"""Connections from which a flood is sent: more would measure how fast this process reads the answers."""


class _Client:
    """Sends requests to a target, each on a connection of its own."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._headers = "".join(f"{k}: {v}\r\n" for k, v in target.headers.items())

    async def get(self, path: str) -> Any:
        """Return the JSON of a GET."""
        reader, writer = await self._open()
        writer.write(f"GET {path} HTTP/1.1\r\n{self._head()}\r\n".encode())
        await _read_head(reader)
        body = await reader.read()
        writer.close()
        return json.loads(body)

    async def start(
        self, path: str, body: dict[str, Any], headers: str = "", *, is_slow: bool = False
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a POST; the answer is not read."""
        reader, writer = await self._open(is_slow=is_slow)
        data = json.dumps(body).encode()
        head = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n{headers}"
        writer.write(f"POST {path} HTTP/1.1\r\n{self._head()}{head}\r\n".encode() + data)
        return reader, writer

    async def post(self, path: str, body: dict[str, Any], headers: str = "") -> tuple[int, int]:
        """Send a POST and read the whole answer.

        Returns:
            The status, and Retry-After or 0.
        """
        async with asyncio.timeout(_TIMEOUT):
            reader, writer = await self.start(path, body, headers)
            status, retry_after = await _read_head(reader)
            await reader.read()
            writer.close()
        return status, retry_after

    async def first_token_seconds(self, prompt: str, max_tokens: int) -> float:
        """Return the time until the first token of a stream, which is read to its end."""
        async with asyncio.timeout(_TIMEOUT):
            start = time.perf_counter()
            reader, writer = await self.start("/generate_stream", _body(prompt, max_tokens))
            status, _ = await _read_head(reader)
            assert status == 200, f"a normal request got {status}"
            while not (await reader.readline()).startswith(b"data:"):
                assert not reader.at_eof(), "a stream without a token"
            seconds = time.perf_counter() - start
            await reader.read()
            writer.close()
        return seconds

    async def _open(
        self, *, is_slow: bool = False
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not is_slow:
            return await asyncio.open_connection(self._target.host, self._target.port)
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        connection.setblocking(False)
        address = (self._target.host, self._target.port)
        await asyncio.get_running_loop().sock_connect(connection, address)
        return await asyncio.open_connection(sock=connection, limit=_SMALL_BUFFER)

    def _head(self) -> str:
        return f"Host: {self._target.host}\r\nConnection: close\r\n{self._headers}"


def _body(prompt: str, max_tokens: int) -> dict[str, Any]:
    parameters = {"max_new_tokens": max_tokens, "ignore_eos": True}
    return {"inputs": prompt, "parameters": parameters}


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, int]:
    line = await reader.readline()
    assert line, "a connection was closed without an answer"
    retry_after = 0
    while header := (await reader.readline()).strip().lower():
        if header.startswith(b"retry-after:"):
            retry_after = int(header.partition(b":")[2])
    return int(line.split()[1]), retry_after


@contextlib.asynccontextmanager
async def _saturated(client: _Client) -> AsyncIterator[int]:
    """Hold as many streams as the service allows; yields their number. They end by disconnects."""
    limit = (await client.get("/info"))["max_concurrent_requests"]
    held = [
        await client.start("/generate_stream", _body("x", 1500), is_slow=True) for _ in range(limit)
    ]
    try:
        for reader, _ in held:
            async with asyncio.timeout(_TIMEOUT):
                status, _ = await _read_head(reader)
            assert status in (200, 429), f"one of the streams that fill the service got {status}"
        yield limit
    finally:
        for _, writer in held:
            writer.close()


async def flood_queue(target: Target) -> None:
    """C1: ten times as many requests as the service allows at once."""
    client = _Client(target)
    refusals, statuses = [], set()
    async with _saturated(client) as limit:
        todo = iter(range(10 * limit))

        async def send() -> None:
            for _ in todo:
                start = time.perf_counter()
                status, retry_after = await client.post("/generate", _body("x", 4))
                statuses.add(status)
                if status == 429:
                    refusals.append(1e3 * (time.perf_counter() - start))
                    assert retry_after >= 1, "429 without Retry-After"

        await asyncio.gather(*(send() for _ in range(_SENDERS)))
    assert statuses <= {200, 429}, f"answers other than 200 and 429: {sorted(statuses)}"
    assert refusals, "nothing was refused"
    p99 = sorted(refusals)[int(0.99 * len(refusals))]
    assert p99 < _MAX_REFUSAL_P99_MS, f"429 took {p99:.0f} ms at p99"


async def disconnect(target: Target) -> None:
    """C2: 1,000 clients disconnect at random moments, some of them within the request."""
    client, rng = _Client(target), random.Random(2)
    todo = iter(range(1000))

    async def send() -> None:
        for _ in todo:
            _, writer = await client.start("/generate_stream", _body("def f(", 100))
            await asyncio.sleep(rng.choice((0.001, 0.01, 0.1, 0.5)) * rng.random())
            if rng.random() < 0.5:
                writer.transport.abort()
            writer.close()

    await asyncio.gather(*(send() for _ in range(16)))


async def read_slowly(target: Target) -> None:
    """C3: 100 clients that do not read their streams, beside normal ones."""
    client = _Client(target)
    medians = []
    for is_slow in (False, True):
        streams = [
            await client.start(
                "/generate_stream",
                {"inputs": "x", "parameters": {"max_new_tokens": 48, "top_n_tokens": 5, "ignore_eos": True}},
                is_slow=is_slow,
            )
            for _ in range(100)
        ]  # fmt: skip
        readers = [] if is_slow else [asyncio.create_task(reader.read()) for reader, _ in streams]
        times = [await client.first_token_seconds("def f(", 4) for _ in range(6)]
        medians.append(statistics.median(times))
        await asyncio.gather(*readers)
        for _, writer in streams:
            writer.transport.abort()
    ratio = medians[1] / medians[0]
    assert ratio < _MAX_TTFT_RATIO, f"slow readers delay normal first tokens {ratio:.1f} times"


async def send_long_prompts(target: Target) -> None:
    """C4: the longest prompts one after the other, and short ones."""
    client = _Client(target)
    longest = (await client.get("/info"))["max_input_tokens"]
    stop = time.perf_counter() + 8
    model = (await client.get("/v1/models"))["data"][0]["id"]
    rng = random.Random(4)
    long_times: list[float] = []

    async def send() -> None:
        while time.perf_counter() < stop:
            prompt = [rng.randint(100, 4000) for _ in range(longest - 4)]
            start = time.perf_counter()
            status, _ = await client.post(
                "/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 1}
            )
            assert status in (200, 429), f"a long prompt got {status}"
            if status == 200:
                long_times.append(time.perf_counter() - start)

    senders = [asyncio.create_task(send()) for _ in range(4)]
    times = []
    while time.perf_counter() < stop:
        times.append(await client.first_token_seconds("def f(", 1))
        await asyncio.sleep(0.1)
    await asyncio.gather(*senders)
    short, long = statistics.median(times), statistics.median(long_times)
    assert 2 * short < long, f"short prompts wait {short:.2f} s, the longest {long:.2f} s"
    assert max(times) < max(long_times), f"a short prompt waited {max(times):.2f} s"


async def retry_at_once(target: Target) -> None:
    """C5: clients that retry without waiting, and clients that wait as they are told."""
    client = _Client(target)
    obedient: list[asyncio.Task[bool]] = []

    async def wait_and_retry() -> bool:
        for _ in range(20):
            status, retry_after = await client.post("/generate", _body("x", 1))
            if status == 200:
                return True
            assert (status, retry_after > 0) == (429, True), f"{status}, Retry-After {retry_after}"
            await asyncio.sleep(retry_after)
        return False

    async with _saturated(client):
        stop = time.perf_counter() + 5

        async def storm() -> None:
            while time.perf_counter() < stop:
                status, retry_after = await client.post("/generate", _body("x", 1))
                assert status == 200 or (status == 429 and retry_after >= 1), f"got {status}"

        obedient = [asyncio.create_task(wait_and_retry()) for _ in range(20)]
        await asyncio.gather(*(storm() for _ in range(_SENDERS)))
    assert all(await asyncio.gather(*obedient)), "a client that waited as told was never served"


async def flood_aborts(target: Target) -> None:
    """C6: aborts of unknown ids, and of requests that have just begun."""
    client = _Client(target)
    todo = iter(range(500))

    async def send() -> None:
        for i in todo:
            name = f"abort-flood-{i}"
            unknown = [f"unknown-{i}-{j}" for j in range(64)]
            given = f"X-Request-Id: {name}\r\n"
            _, writer = await client.start("/generate_stream", _body("x", 200), given)
            for ids in (unknown, [name], [name], unknown):
                status, _ = await client.post("/abort", {"request_ids": ids})
                assert status == 200, f"/abort got {status}"
            writer.close()

    await asyncio.gather(*(send() for _ in range(_SENDERS)))


ATTACKS: list[Attack] = [
    Attack("C1", "ten times as many requests as allowed", flood_queue),
    Attack("C2", "1,000 disconnects at random moments", disconnect),
    Attack("C3", "100 clients that do not read", read_slowly),
    Attack("C4", "the longest prompts beside short ones", send_long_prompts),
    Attack("C5", "retries without waiting", retry_at_once),
    Attack("C6", "aborts of known and unknown requests", flood_aborts),
]
