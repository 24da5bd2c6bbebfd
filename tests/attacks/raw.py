"""Sends bytes and reads answers, without an HTTP library that would repair what an attack breaks."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from tests.attacks.record import Target

_TIMEOUT_SECONDS = 30.0
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connections(target: Target, count: int) -> AsyncIterator[list[Connection]]:
    """Open connections, and close those that remain at the end of the block."""
    opened: list[Connection] = []
    try:
        for _ in range(count):
            with contextlib.suppress(OSError):
                opened.append(await asyncio.open_connection(target.host, target.port))
        yield opened
    finally:
        for _, writer in opened:
            writer.transport.abort()


async def read_to_end(reader: asyncio.StreamReader, seconds: float = _TIMEOUT_SECONDS) -> bytes:
    """Return what comes until the service closes the connection or the time is over."""
    data = bytearray()
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(seconds):
            while part := await reader.read(1 << 16):
                data += part
    return bytes(data)


async def exchange(target: Target, parts: Iterable[bytes], seconds: float = 3.0) -> bytes:
    """Send parts on a connection and return what comes within some seconds, or until the connection is closed."""
    async with connections(target, 1) as opened:
        ((reader, writer),) = opened
        reading = asyncio.ensure_future(read_to_end(reader, seconds))
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(seconds):
                for part in parts:
                    writer.write(part)
                    await writer.drain()
        return await reading


def head(target: Target, request: str, *fields: str, key: bool = True) -> bytes:
    """Render the head of a request.

    Args:
        target: of the request.
        request: method and URL.
        fields: header fields in addition to Host and the key.
        key: whether to send the API key.
    """
    lines = [f"{request} HTTP/1.1", f"Host: {target.host}:{target.port}"]
    if key:
        lines += [f"{name}: {value}" for name, value in target.headers.items()]
    return "\r\n".join([*lines, *fields, "", ""]).encode("latin-1")


def post(
    target: Target, body: bytes, *fields: str, path: str = "/generate", key: bool = True
) -> bytes:
    """Render a request with a JSON body."""
    kind = "Content-Type: application/json"
    return (
        head(target, f"POST {path}", kind, f"Content-Length: {len(body)}", *fields, key=key) + body
    )


def statuses(data: bytes) -> list[int]:
    """Return the statuses of the responses in what came from a connection."""
    return [int(status) for status in _STATUS.findall(data)]


def check(found: object, expected: object, what: str) -> None:
    """Raise an AssertionError if an answer is not the expected one."""
    if found != expected:
        raise AssertionError(f"{what}: {found} instead of {expected}")
