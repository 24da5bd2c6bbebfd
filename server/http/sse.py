"""Server-sent events: renders the frames of a token stream, and sends them.

A frame is cut from a template and only its changing parts are encoded: building objects and
serializing them costs several times as much, for every token of every stream. Knows neither engine
nor tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from server.http.guard import ClientDisconnectedError
from server.http.schemas.replies import ErrorReply, StreamDetails, Token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Send

    from server.errors import TesseraError
    from server.http.config import HTTPConfig

# A comment without text; clients skip it, proxies see traffic.
KEEP_ALIVE_FRAME = b":\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_JSON = msgspec.json.Encoder()
_encode = _JSON.encode
# The lowest float32; below it are -inf and NaN alone, which JSON does not have.
_LOWEST = -3.5e38
_FRAME = (
    b'data:{"index":%d,"token":{"id":%d,"text":%b,"logprob":%.9g,"special":%b}'
    b',"generated_text":null,"details":null}\n\n'
)
_FULL_FRAME = b'data:{"index":%d,"token":%b%b,"generated_text":%b,"details":%b}\n\n'


def wire_logprob(value: float | None) -> float | None:
    """A log-probability as it stands on the wire: float32 needs 9 digits; null where it is not finite."""
    if value is None or not value > _LOWEST:
        return None
    return float(f"{value:.9g}")


def token_frame(
    index: int, token_id: int, text: str, logprob: float | None, *, special: bool
) -> bytes:
    """The frame of a token that is neither the last one nor comes with alternatives.

    Args:
        index: of the token in the stream, from 1.
        token_id: in the model's vocabulary.
        text: what the token adds.
        logprob: natural logarithm; None and values that are not finite become null.
        special: whether the token is not part of the text.
    """
    if logprob is None or not logprob > _LOWEST:
        return full_frame(index, Token(token_id, text, None, special))
    return _FRAME % (index, token_id, _encode(text), logprob, b"true" if special else b"false")


def full_frame(
    index: int,
    token: Token,
    top_tokens: list[Token] | None = None,
    generated_text: str | None = None,
    details: StreamDetails | None = None,
) -> bytes:
    """The frame of any token; `top_tokens` None leaves that field out."""
    top = b"" if top_tokens is None else b',"top_tokens":' + _encode(top_tokens)
    return _FULL_FRAME % (index, _encode(token), top, _encode(generated_text), _encode(details))


def error_frame(error: TesseraError) -> bytes:
    """The last frame of a stream that broke."""
    return b"data:%b\n\n" % _encode(ErrorReply(error.message, error.error_type))


class EventStream:
    """Sends the frames of one response; used by one task. Made by `open_event_stream`.

    Attributes:
        stalled: whether the client was given up on, because it took no bytes for too long.
    """

    __slots__ = (
        "_busy_since",
        "_comment",
        "_config",
        "_deadline",
        "_last",
        "_loop",
        "_send",
        "_timer",
        "stalled",
    )

    def __init__(self, send: Send, config: HTTPConfig, deadline: asyncio.Timeout) -> None:
        self._send = send
        self._config = config
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self.stalled = False
        self._busy_since: float | None = None
        self._last = self._loop.time()
        self._comment: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(config.keep_alive_seconds, self._tick)

    async def send(self, data: bytes, *, more: bool = True) -> None:
        """Send frames; waits while the client is too slow to take them."""
        self._busy_since = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._busy_since = None
        self._last = self._loop.time()

    async def _send_comment(self) -> None:
        with contextlib.suppress(OSError):  # the task that sends the frames will see it too
            await self.send(KEEP_ALIVE_FRAME)

    def close(self) -> None:
        """Stop the timers."""
        self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    def _tick(self) -> None:
        """Speak up in a long silence; give up on a client that has stopped to read."""
        now = self._loop.time()
        if self._busy_since is not None:
            due = self._busy_since + self._config.send_timeout_seconds
            if now >= due:
                self.stalled = True
                self._deadline.reschedule(now)
                return
        else:
            due = self._last + self._config.keep_alive_seconds
            if now >= due:
                self._comment = self._loop.create_task(self._send_comment())
                due = now + self._config.keep_alive_seconds
        self._timer = self._loop.call_at(due, self._tick)


@contextlib.asynccontextmanager
async def open_event_stream(
    send: Send, config: HTTPConfig, headers: list[tuple[bytes, bytes]]
) -> AsyncIterator[EventStream]:
    """Start a response of server-sent events.

    Args:
        send: of the ASGI server.
        config: for the intervals.
        headers: beside those that every stream has.

    Raises:
        ClientDisconnectedError: the client took no bytes for `send_timeout_seconds`, or the server
            says that it is gone.
    """
    try:
        async with asyncio.timeout(None) as deadline:
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [*STREAM_HEADERS, *headers],
                }
            )
            stream = EventStream(send, config, deadline)
            try:
                yield stream
            finally:
                stream.close()
    except (TimeoutError, OSError) as error:
        raise ClientDisconnectedError from error
