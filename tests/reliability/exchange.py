"""A minimal HTTP/1.1 client that tells exactly how far a reply came."""

from __future__ import annotations

import asyncio
import json
from typing import NamedTuple

HOST = "127.0.0.1"
_READ_BYTES = 1 << 16


class Reply(NamedTuple):
    """A complete reply.

    Attributes:
        status: HTTP status.
        headers: by name in lower case.
        body: without the framing of chunks.
    """

    status: int
    headers: dict[str, str]
    body: bytes


class Truncated(Exception):  # noqa: N818 - an outcome, which the caller classifies
    """The connection ended before the reply was complete.

    Attributes:
        received: what had arrived.
    """

    def __init__(self, received: bytes) -> None:
        super().__init__(f"the connection ended after {len(received)} bytes")
        self.received = received


def encode_post(path: str, body: object, *, close: bool = False) -> bytes:
    """Render a request with a JSON body."""
    data = json.dumps(body).encode()
    connection = "close" if close else "keep-alive"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Connection: {connection}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """Read one reply.

    Raises:
        Truncated: the connection ended before.
    """
    received = bytearray()
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        received += head
        lines = head.decode("latin-1").split("\r\n")
        fields = (line.split(":", 1) for line in lines[1:] if line)
        headers = {name.lower(): value.strip() for name, value in fields}
        status = int(lines[0].split()[1])
        if "chunked" in headers.get("transfer-encoding", ""):
            body = await _read_chunks(reader, received)
        elif "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:
            body = await reader.read(-1)
    except asyncio.IncompleteReadError as error:
        raise Truncated(bytes(received + error.partial)) from None
    except (ConnectionError, asyncio.LimitOverrunError, IndexError, ValueError):
        raise Truncated(bytes(received)) from None
    return Reply(status, headers, body)


async def _read_chunks(reader: asyncio.StreamReader, received: bytearray) -> bytes:
    body = bytearray()
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line, 16)
        chunk = await reader.readexactly(size + 2)
        received += chunk
        if not size:
            return bytes(body)
        body += chunk[:-2]
