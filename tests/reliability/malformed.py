"""Bytes that no correct client sends, for `chaos` and the fuzzers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.reliability.exchange import encode_post

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator


def _post(content: bytes, *fields: bytes, path: bytes = b"/generate") -> bytes:
    head = [
        b"POST %b HTTP/1.1" % path,
        b"Host: localhost",
        b"Content-Type: application/json",
        *fields,
    ]
    if not fields:
        head.append(b"Content-Length: %d" % len(content))
    return b"\r\n".join([*head, b"", content])


_GOOD: Final = b'{"inputs": "x", "parameters": {"max_new_tokens": 2}}'

SEEDS: Final[tuple[bytes, ...]] = (
    # Correct requests, from which others are made by mutation.
    _post(_GOOD),
    _post(_GOOD, path=b"/generate_stream"),
    _post(b'{"prompt": "x", "max_tokens": 2, "stream": true}', path=b"/v1/completions"),
    _post(
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}', path=b"/v1/chat/completions"
    ),
    _post(b'{"input": "x", "max_output_tokens": 16}', path=b"/v1/responses"),
    _post(b'{"inputs": "x"}', path=b"/tokenize"),
    _post(b'{"request_id": "x"}', path=b"/abort"),
    _post(b"5\r\n{\"inp\r\n30\r\n" + b'uts": "x", "parameters": {"max_new_tokens": 1  }}' + b"\r\n0\r\n\r\n",
          b"Transfer-Encoding: chunked"),
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: application/openmetrics-text\r\n\r\n",
    b"HEAD /health HTTP/1.0\r\n\r\n",
    # Not HTTP.
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    b"\r\n" * 500,
    b"GET\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"GET  /health  HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"CONNECT example.com:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"FROB /generate HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://elsewhere/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /%00%ff%2e%2e/%2f HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a/health?x=\r\nHost: b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 2000 + b"\r\n",
    b"GET /health HTTP/1.1\r\nX\x00Y: z\r\n\r\n",
    b"GET /health HTTP/1.1\r\nX: a\r\n b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    # Bodies whose length is wrong or contradictory.
    _post(_GOOD, b"Content-Length: -1"),
    _post(_GOOD, b"Content-Length: 99999999999999999999"),
    _post(_GOOD, b"Content-Length: 52", b"Content-Length: 53"),
    _post(_GOOD, b"Content-Length: 52", b"Transfer-Encoding: chunked"),
    _post(b"zz\r\n" + _GOOD, b"Transfer-Encoding: chunked"),
    _post(b"ffffffffffffffff\r\n" + _GOOD, b"Transfer-Encoding: chunked"),
    _post(b"0\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", b"Transfer-Encoding: chunked"),
    _post(_GOOD, b"Transfer-Encoding: gzip, chunked"),
    _post(_GOOD, b"Content-Encoding: gzip", b"Content-Length: %d" % len(_GOOD)),
    _post(_GOOD[:10], b"Content-Length: 52"),
    _post(_GOOD) * 20,
    _post(_GOOD, b"Expect: 100-continue", b"Content-Length: %d" % len(_GOOD)),
    # Bodies that are not what the API expects.
    _post(b""), _post(b"{"), _post(b"[" * 100_000), _post(b"nul"), _post(b"\xff\xfe{}"), _post(b"\xef\xbb\xbf{}"),
    _post(b'{"inputs": "\\ud800"}'), _post(b'{"inputs": "\\u0000"}'), _post(b'{"inputs": 1e999}'),
    _post(b'{"inputs": "x", "parameters": {"temperature": NaN}}'),
    _post(b'{"inputs": "x", "parameters": {"max_new_tokens": ' + b"9" * 5000 + b"}}"),
    _post(b'{"inputs": "x", "parameters": {"top_n_tokens": 1000000000}}'),
    _post(b'{"inputs": "x", "parameters": {"grammar": {"type": "regex", "value": "(((a+)+)+)+b"}}}'),
    _post(b'{"inputs": "x", "inputs": 3}'),
    _post(b'{"prompt": [[1, -1, 99999999999999999999]]}', path=b"/v1/completions"),
    _post(b'{"messages": []}', path=b"/v1/chat/completions"),
    _post(b'{"messages": [{"role": "\\n", "content": [{"type": "image_url"}]}]}', path=b"/v1/chat/completions"),
    _post(b'{"ids": [-1, 1e3, null]}', path=b"/detokenize"),
)  # fmt: skip
"""The seeds of the HTTP fuzzer; `chaos` sends them and mutations of them."""


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change a few places of some bytes: flip, insert, delete, repeat, cut."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(len(changed) + 1)
        kind = rng.randrange(5)
        if kind == 0 and position < len(changed):
            changed[position] = rng.randrange(256)
        elif kind == 1:
            changed[position:position] = rng.choice(
                [b"\r\n", b"\x00", b"\xff", b'"', b"{", b",", b"0", b"-", b"\r\n\r\n", b"9" * 20]
            )
        elif kind == 2:
            del changed[position : position + rng.randint(1, 8)]
        elif kind == 3:
            part = changed[position : position + rng.randint(1, 64)]
            changed[position:position] = part * rng.randint(1, 4)
        elif kind == 4 and rng.random() < 0.3:
            del changed[position:]
    return bytes(changed)


def malformed_requests(rng: random.Random, count: int) -> Iterator[bytes]:
    """Yield the seeds and mutations of them, in a random order."""
    for _ in range(count):
        data = rng.choice(SEEDS)
        yield data if rng.random() < 0.3 else mutate(data, rng)


def random_document(rng: random.Random) -> bytes:
    """Make a request whose body is correct JSON with values of random types."""
    names = (
        "inputs",
        "parameters",
        "prompt",
        "messages",
        "stream",
        "stop",
        "n",
        "seed",
        "max_tokens",
    )
    values: tuple[object, ...] = (
        None,
        True,
        -1,
        0,
        2**63,
        1.5,
        "",
        "x",
        [],
        [None],
        {},
        {"type": "json"},
        [[]],
        ["a"] * 50,
    )
    body = {rng.choice(names): rng.choice(values) for _ in range(rng.randint(0, 6))}
    path = rng.choice(
        ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/"]
    )
    return encode_post(path, body)
