"""Attacks on connections, framing and headers."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import time
from typing import TYPE_CHECKING

from tests.attacks.raw import (
    check,
    connections,
    exchange,
    head,
    post,
    read_to_end,
    statuses,
)
from tests.attacks.record import Attack
from tests.control import Control

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.attacks.raw import Connection
    from tests.attacks.record import Target

_MIB = 1 << 20
_BODY = b'{"inputs": "x", "parameters": {"max_new_tokens": 2}}'
_HEADER_SECONDS = 10.0
_BODY_SECONDS = 30.0
_SLACK_SECONDS = 3.0


async def half_heads(target: Target) -> None:
    """Begin a request on 500 connections and send no more."""
    with Control() as control:
        start = time.perf_counter()
        async with connections(target, 500) as opened:
            for _, writer in opened:
                writer.write(b"POST /generate HTTP/1.1\r\nHost: a\r\nX: ")
            answers = await _answers(opened)
        seconds = time.perf_counter() - start
    limit = control.allowed(_HEADER_SECONDS + _SLACK_SECONDS)
    check(seconds < limit, True, f"closed after {seconds:.1f} s")
    check({tuple(statuses(a)) for a in answers} <= {(408,), ()}, True, "statuses")


async def half_bodies(target: Target) -> None:
    """Begin bodies on 100 connections and send no more."""
    await _slow_bodies(target, 100, interval=None)


async def slow_bodies(target: Target) -> None:
    """Send bodies at one byte a second on 100 connections."""
    await _slow_bodies(target, 100, interval=1.0)


async def _slow_bodies(target: Target, count: int, interval: float | None) -> None:
    with Control() as control:
        start = time.perf_counter()
        async with connections(target, count) as opened:
            for _, writer in opened:
                writer.write(post(target, b" " * 1000)[:-999])
            trickling = asyncio.ensure_future(_trickle(opened, interval)) if interval else None
            answers = await _answers(opened, _BODY_SECONDS + 15)
            if trickling is not None:
                trickling.cancel()
        seconds = time.perf_counter() - start
    limit = control.allowed(_BODY_SECONDS + 2 * _SLACK_SECONDS)
    check(seconds < limit, True, f"answered after {seconds:.1f} s")
    # Those that find no place among the admitted requests are refused at once.
    found = {status for answer in answers for status in statuses(answer)}
    check(found <= {408, 429}, True, f"statuses {found}")


async def _trickle(opened: list[Connection], interval: float) -> None:
    while True:
        for _, writer in opened:
            with contextlib.suppress(ConnectionError):
                writer.write(b" ")
        await asyncio.sleep(interval)


async def _answers(opened: list[Connection], seconds: float = 30.0) -> list[bytes]:
    return await asyncio.gather(*(read_to_end(reader, seconds) for reader, _ in opened))


async def large_heads(target: Target) -> None:
    """Send a header of 50 MiB, 10,000 headers, a URL of 1 MiB, and endless trailers and extensions of chunks."""
    chunked = head(target, "POST /generate", "Transfer-Encoding: chunked")
    cases: dict[str, tuple[int, Iterator[bytes]]] = {
        "a header of 50 MiB": (431, _long(head(target, "GET /info")[:-2] + b"X: ")),
        "10,000 headers": (431, iter([head(target, "GET /info")[:-2], b"X: x\r\n" * 10_000])),
        "a long URL": (414, _long(b"GET /")),
        "endless trailers": (431, _long(chunked + b"0\r\nX: ")),
        "many trailers": (431, itertools.chain([chunked + b"0\r\n"], [b"X: x\r\n" * 10_000] * 10)),
        "an endless extension": (431, _long(chunked + b"1;x=")),
    }
    for name, (status, parts) in cases.items():
        found = statuses(await exchange(target, parts))
        check(found in ([status], []), True, f"{name}: {found}")


def _long(start: bytes) -> Iterator[bytes]:
    yield start
    for _ in range(50):
        yield b"x" * _MIB


async def declared_large_bodies(target: Target) -> None:
    """Declare bodies of 1 GB."""
    for path in ("/generate", "/v1/completions", "/tokenize"):
        request = head(target, f"POST {path}", "Content-Length: 1000000000")
        check(statuses(await exchange(target, [request])), [413], path)


async def endless_bodies(target: Target) -> None:
    """Send bodies without a declared length, of up to 50 MiB."""
    for path in ("/generate", "/v1/completions", "/tokenize"):
        start = head(target, f"POST {path}", "Transfer-Encoding: chunked")
        chunk = b"%x\r\n%b\r\n" % (_MIB, b" " * _MIB)
        found = statuses(await exchange(target, itertools.chain([start], [chunk] * 50)))
        check(found in ([413], []), True, f"{path}: {found}")


async def compressed_bodies(target: Target) -> None:
    """Send bodies that decompress to 100 MB."""
    body = gzip.compress(b" " * 100_000_000)
    for coding in ("gzip", "deflate", "br", "zstd", "gzip, gzip"):
        request = post(target, body, f"Content-Encoding: {coding}", "Connection: close")
        check(statuses(await exchange(target, [request])), [415], coding)


async def smuggled_requests(target: Target) -> None:
    """Try to reach routes without a key, by framing, paths and hosts that parts of a server could read differently."""
    hidden = b"GET /info HTTP/1.1\r\nHost: a\r\n\r\n"
    length = len(hidden)
    close = "Connection: close"
    cases = {
        "both lengths": (
            [400],
            head(target, "POST /generate", f"Content-Length: {length}", "Transfer-Encoding: chunked")
            + b"0\r\n\r\n" + hidden,
        ),
        "two lengths": (
            [400],
            head(target, "POST /generate", f"Content-Length: {length}", "Content-Length: 0") + hidden,
        ),
        "an unknown coding": (
            [400],
            head(target, "POST /generate", "Transfer-Encoding: chunked, identity") + hidden,
        ),
        "a bad method": ([400], head(target, "NONSENSE /info", key=False)),
        "no Host": ([400], b"GET /info HTTP/1.1\r\n\r\n"),
        "two Hosts": ([400], head(target, "GET /info", "Host: b", key=False)),
        "a path in Host": (
            [401],
            b"GET /info HTTP/1.1\r\nHost: a/health?x=\r\nConnection: close\r\n\r\n",
        ),
        "an absolute URL": ([401], head(target, "GET http://a/info", close, key=False)),
        "an absolute URL of an open route": (
            [401],
            head(target, "GET http://a/health/../info", close, key=False),
        ),
    }  # fmt: skip
    paths = [
        "//info", "/./info", "/health/../info", "/docs/../info", "/docs/..%2finfo", "/docs/%2e%2e/info", "/INFO",
        "/V1/models", "/v1%2fmodels", "/health%2f..%2finfo", "/health;/info", "/health%00/info", "/info/",
        "/health//info", "//health/info", "/page/../info", "/docs//info",
    ]  # fmt: skip
    for path in paths:
        cases[path] = ([401, 404], head(target, f"GET {path}", close, key=False))
        cases[f"POST {path}"] = (
            [401, 404],
            post(target, _BODY, close, path=path.replace("info", "generate"), key=False),
        )
    for name, (expected, request) in cases.items():
        found = statuses(await exchange(target, [request]))
        check(len(found) == 1 and found[0] in expected, True, f"{name}: {found}")
    # The second request of a connection needs its own key.
    pipelined = head(target, "GET /info") + head(target, "GET /info", close, key=False)
    check(statuses(await exchange(target, [pipelined])), [200, 401], "pipelining")


async def idle_connections(target: Target) -> None:
    """Hold 10,000 connections: silent ones, and ones that were used once."""
    used = head(target, "GET /health")
    async with connections(target, 10_000) as opened:
        for _, writer in opened[::2]:
            with contextlib.suppress(ConnectionError):
                writer.write(used)
        check(len(opened) > 9_000, True, f"{len(opened)} connections")
        await asyncio.sleep(5)


async def other_media_types(target: Target) -> None:
    """Send bodies as forms, parts, text and XML."""
    for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded",
                 "application/xml", "application/json; charset=utf-16"):  # fmt: skip
        request = head(
            target, "POST /generate", f"Content-Type: {kind}", f"Content-Length: {len(_BODY)}"
        )
        check(statuses(await exchange(target, [request + _BODY], 1)), [415], kind)


async def other_methods(target: Target) -> None:
    """Use methods that a route does not have."""
    close = "Connection: close"
    for method in ("HEAD", "OPTIONS", "TRACE", "PUT", "DELETE", "PATCH"):
        answer = await exchange(target, [head(target, f"{method} /generate", close)])
        check(statuses(answer), [405], method)
        check(b"key-of-the" in answer, False, f"{method} echoes the key")
    check(statuses(await exchange(target, [head(target, "HEAD /health", close)])), [200], "HEAD")
    check(statuses(await exchange(target, [head(target, "CONNECT a:80", close)])), [400], "CONNECT")


async def upgrades(target: Target) -> None:
    """Ask for WebSocket and HTTP/2."""
    socket = ("Upgrade: websocket", "Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13")
    for fields in (
        ("Connection: Upgrade, close", *socket),
        ("Connection: Upgrade, close", "Upgrade: h2c"),
    ):
        found = statuses(await exchange(target, [post(target, _BODY, *fields)]))
        check(found, [200], fields[1])
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    check(statuses(await exchange(target, [preface])) in ([400], []), True, "HTTP/2's preface")


async def foreign_pages(target: Target) -> None:
    """Send what a browser sends for a page of another origin."""
    origin, close = "Origin: https://evil.example", "Connection: close"
    answer = await exchange(
        target,
        [head(target, "OPTIONS /generate", origin, "Access-Control-Request-Method: POST", close)],
    )
    check(b"access-control-allow" in answer.lower(), False, "a preflight is allowed")
    for fields in ((origin,), ("Sec-Fetch-Site: cross-site",), ("Origin: null",)):
        request = post(target, _BODY, *fields, close)
        check(statuses(await exchange(target, [request])), [403], fields[0])


async def ranges(target: Target) -> None:
    """Ask for thousands of parts of a reply."""
    parts = ",".join(f"{n}-{n + 1}" for n in range(3000))
    for path in ("/openapi.json", "/docs/swagger-ui-bundle.js", "/metrics"):
        request = head(target, f"GET {path}", f"Range: bytes={parts}", "Connection: close")
        (status,) = statuses(await exchange(target, [request]))
        check(status in (200, 206, 400, 416), True, f"{path}: {status}")


async def hidden_disconnects(target: Target) -> None:
    """Leave 50 connections whose request runs while a second one waits behind it."""
    body = json.dumps({"inputs": "x", "parameters": {"max_new_tokens": 1000, "ignore_eos": True}})
    request = post(target, body.encode())
    async with connections(target, 50) as opened:
        for _, writer in opened:
            writer.write(2 * request)
        await asyncio.sleep(1)


async def malformed_requests(target: Target) -> None:
    """Send 2,000 malformed requests."""
    for _ in range(20):
        async with connections(target, 100) as opened:
            for _, writer in opened:
                writer.write(b"NONSENSE\r\n\r\n")
            answers = await _answers(opened, 5)
        found = {status for answer in answers for status in statuses(answer)}
        check(found, {400}, "statuses")


ATTACKS: list[Attack] = [
    Attack("A1", "half a head on 500 connections", half_heads),
    Attack("A2", "half a body on 100 connections", half_bodies),
    Attack("A3", "a body at one byte a second on 100 connections", slow_bodies),
    Attack("A4", "large heads, URLs, trailers and extensions", large_heads),
    Attack("A5", "declared bodies of 1 GB", declared_large_bodies),
    Attack("A6", "endless bodies in chunks", endless_bodies),
    Attack("A7", "compressed bodies of 100 MB", compressed_bodies),
    Attack("A8", "requests that hide from the key", smuggled_requests),
    Attack("A9", "10,000 idle connections", idle_connections),
    Attack("A10", "other media types", other_media_types),
    Attack("A11", "other methods", other_methods),
    Attack("A12", "offers to upgrade", upgrades),
    Attack("A13", "requests of foreign pages", foreign_pages),
    Attack("A14", "thousands of ranges", ranges),
    Attack("A15", "disconnects behind a pipelined request", hidden_disconnects),
    Attack("A16", "2,000 malformed requests", malformed_requests),
]
