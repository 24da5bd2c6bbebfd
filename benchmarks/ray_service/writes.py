"""Clients that send the head and the body of a request in several ways, and whether their answers had started.

A proxy that repeats requests of a killed replica needs their bodies, which may come later than their heads.
"""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.prefix_hits import prefix_text

if TYPE_CHECKING:
    from collections.abc import Callable

COMPLETE: Final = "complete"
BROKEN: Final = "broken"
"""The connection ended within the answer."""
LOST: Final = "lost"
"""There was no answer, or one of the proxy instead of the service's."""
_TIMEOUT_SECONDS: Final = 180.0
_TOKENS: Final = 16
_PREFIXES: Final = 16
_LATER_SECONDS: Final = 0.02
_LARGE_BYTES: Final = 40_000
"""More than HAProxy's default buffer, less than the one of `server.ray.main`."""


class Outcome(NamedTuple):
    """What became of a request.

    Attributes:
        way: a name in `WAYS`.
        route: that it was sent to.
        end: `COMPLETE`, `BROKEN` or `LOST`.
        text: why it did not complete.
    """

    way: str
    route: str
    end: str
    text: str = ""


def _one_write(connection: http.client.HTTPConnection, head: bytes, body: bytes) -> None:
    connection.send(head + b"content-length: %d\r\n\r\n" % len(body) + body)


def _two_writes(connection: http.client.HTTPConnection, head: bytes, body: bytes) -> None:
    connection.send(head + b"content-length: %d\r\n\r\n" % len(body))
    connection.send(body)


def _later(connection: http.client.HTTPConnection, head: bytes, body: bytes) -> None:
    connection.send(head + b"content-length: %d\r\n\r\n" % len(body))
    half = len(body) // 2
    for part in (body[:half], body[half:]):
        time.sleep(_LATER_SECONDS)
        connection.send(part)


def _chunked(connection: http.client.HTTPConnection, head: bytes, body: bytes) -> None:
    connection.send(head + b"transfer-encoding: chunked\r\n\r\n")
    half = len(body) // 2
    for part in (body[:half], body[half:]):
        connection.send(b"%x\r\n%s\r\n" % (len(part), part))
    connection.send(b"0\r\n\r\n")


def _large(connection: http.client.HTTPConnection, head: bytes, body: bytes) -> None:
    _two_writes(connection, head, body + b" " * (_LARGE_BYTES - len(body)))


WAYS: Final[dict[str, Callable[[http.client.HTTPConnection, bytes, bytes], None]]] = {
    "one write": _one_write,
    "two writes": _two_writes,
    "three writes, 20 ms apart": _later,
    "chunks": _chunked,
    "two writes, 40 kB": _large,
}
_ROUTES: Final = ("/generate", "/generate_stream")


class Clients:
    """Threads, each of which sends one request after the other, in all ways and to both routes.

    Args:
        port: of the service.
        number: of the threads.
    """

    def __init__(self, port: int, number: int) -> None:
        self.outcomes: list[Outcome] = []
        self._port = port
        self._numbers = itertools.count()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._send_all, daemon=True) for _ in range(number)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Send no further requests, and wait for the answers."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _send_all(self) -> None:
        while not self._stopped.is_set():
            number = next(self._numbers)
            way = list(WAYS)[number % len(WAYS)]
            route = _ROUTES[number // len(WAYS) % len(_ROUTES)]
            end, text = self._send(way, route, number)
            self.outcomes.append(Outcome(way, route, end, text))

    def _send(self, way: str, route: str, number: int) -> tuple[str, str]:
        parameters = {"max_new_tokens": _TOKENS, "ignore_eos": True}
        body = json.dumps(
            {"inputs": f"{prefix_text(number % _PREFIXES)} {number}", "parameters": parameters}
        ).encode()
        head = (
            f"POST {route} HTTP/1.1\r\nhost: 127.0.0.1:{self._port}\r\n"
            "content-type: application/json\r\nconnection: close\r\n"
        ).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_SECONDS)
        try:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            WAYS[way](connection, head, body)
            # What `HTTPConnection.request` would have noted.
            answer = http.client.HTTPResponse(connection.sock, method="POST")
            answer.begin()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return LOST, type(error).__name__
        try:
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            return BROKEN, type(error).__name__
        finally:
            answer.close()
            connection.close()
        if answer.status != http.client.OK:
            return LOST, f"HTTP {answer.status}: {text[:200].decode(errors='replace')}"
        if route == "/generate_stream" and b'"generated_text":"' not in text.replace(b" ", b""):
            return BROKEN, text[-200:].decode(errors="replace")
        return COMPLETE, ""


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    """Return a row's counts: of each end, of each end by way and route, and why requests did not complete."""
    ends = Counter(it.end for it in outcomes)
    return {
        "requests": len(outcomes),
        **{end: ends[end] for end in (COMPLETE, BROKEN, LOST)},
        "by_way": {
            f"{way}, {route}": dict(Counter(it.end for it in outcomes if it[:2] == (way, route)))
            for way in WAYS
            for route in _ROUTES
        },
        "reasons": dict(Counter(f"{it.end}: {it.text}" for it in outcomes if it.end != COMPLETE)),
    }
