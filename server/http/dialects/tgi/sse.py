"""Server-sent events: renders the frames of a token stream, and sends them.

A frame is cut from a template and only its changing parts are encoded: building objects and
serializing them costs several times as much, for every token of every stream. Knows neither engine
nor tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
import types
from typing import TYPE_CHECKING

import msgspec

from server.http.dialects.tgi.replies import ErrorReply, StreamDetails, Token
from server.http.request_body import ClientDisconnectedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Generator
    from typing import Any, TypeGuard

    from starlette.types import Send

    from server.errors import TesseraError
    from server.http.config import HTTPConfig
    from server.http.transport import Wire

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
_HEAD = b'{"id":%d,"text":%b,"logprob":'
_FRAME = b'data:{"index":%d,"token":%b%.9g,"special":%b},"generated_text":null,"details":null}\n\n'
_PLAIN_FRAME = _FRAME.replace(b'"special":%b', b'"special":false')
_FULL_FRAME = b'data:{"index":%d,"token":%b%b,"generated_text":%b,"details":%b}\n\n'


def wire_logprob(value: float | None) -> float | None:
    """A log-probability as it stands on the wire: float32 needs 9 digits; null where it is not finite."""
    if not is_wire_logprob(value):
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
    if not is_wire_logprob(logprob):
        return full_frame(index, Token(token_id, text, None, special))
    return _FRAME % (index, token_head(token_id, text), logprob, b"true" if special else b"false")


def token_head(token_id: int, text: str) -> bytes:
    """The part of a frame that is the same wherever a token has the same text."""
    return _HEAD % (token_id, _encode(text))


def plain_frame(index: int, head: bytes, logprob: float) -> bytes:
    """The frame of a token that is not special.

    Args:
        index: of the token in the stream, from 1.
        head: from `token_head`.
        logprob: for which `is_wire_logprob` holds.
    """
    return _PLAIN_FRAME % (index, head, logprob)


def is_wire_logprob(value: float | None) -> TypeGuard[float]:
    """Whether a log-probability can be written as a number."""
    return value is not None and value > _LOWEST


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
    """Sends the frames of one response, in the order of the calls. Made by `open_event_stream`.

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
        "_wire",
        "stalled",
    )

    def __init__(
        self, send: Send, config: HTTPConfig, deadline: asyncio.Timeout, wire: Wire | None
    ) -> None:
        self._send = send
        self._wire = wire
        self._config = config
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self.stalled = False
        self._busy_since: float | None = None
        self._last = self._loop.time()
        self._comment: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(config.keep_alive_seconds, self._tick)

    def start(self, data: bytes, *, more: bool = True) -> Awaitable[None] | None:
        """Send frames from any callback, without a task.

        Args:
            data: frames.
            more: whether others follow.

        Returns:
            None where the client took them, as it nearly always does. Else what a task has to wait for before
            anything else is sent.
        """
        if more and self._wire is not None and self._wire.write(data):
            self._last = self._loop.time()
            return None
        steps = self._send(
            {"type": "http.response.body", "body": data, "more_body": more}
        ).__await__()
        try:
            waits_for = next(steps)
        except StopIteration:
            self._last = self._loop.time()
            return None
        self._busy_since = self._loop.time()
        return self._finish(steps, waits_for)

    async def send(self, data: bytes, *, more: bool = True) -> None:
        """Send frames; waits while the client is too slow to take them."""
        rest = self.start(data, more=more)
        if rest is not None:
            await rest

    async def _finish(self, steps: Generator[object, Any, None], waits_for: object) -> None:
        await _resume(steps, waits_for)
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


@types.coroutine
def _resume(steps: Generator[object, Any, None], waits_for: object) -> Generator[object, Any, None]:
    """Go on, in a task, with what was begun outside of one and has come to a wait.

    Args:
        steps: of a coroutine.
        waits_for: the future that it gave to whoever runs it.
    """
    while True:
        try:
            try:
                sent = yield waits_for
            except BaseException as error:  # noqa: BLE001 - the coroutine's to handle
                waits_for = steps.throw(error)
            else:
                waits_for = steps.send(sent)
        except StopIteration:
            return


@contextlib.asynccontextmanager
async def open_event_stream(
    send: Send,
    config: HTTPConfig,
    headers: list[tuple[bytes, bytes]],
    wire: Wire | None = None,
) -> AsyncIterator[EventStream]:
    """Start a response of server-sent events.

    Args:
        send: of the ASGI server.
        config: for the intervals.
        headers: beside those that every stream has.
        wire: a shorter way than `send` for the frames; None where there is none.

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
            stream = EventStream(send, config, deadline, wire)
            try:
                yield stream
            finally:
                stream.close()
    except (TimeoutError, OSError) as error:
        raise ClientDisconnectedError from error
