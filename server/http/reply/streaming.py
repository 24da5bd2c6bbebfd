"""Server-sent events: renders and sends each token in the callback that delivers it from the engine.

A single token is sent immediately. Tokens that arrive together, or while the client accepts no bytes, are sent
together. A task is woken only for a slow client: with 256 streams, waking 256 tasks took most of a step's time
(docs/decisions/0019-streams-without-tasks.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Protocol

from server.errors import (
    GenerationError,
    IncompleteGenerationError,
    IncompleteGenerationStreamError,
    TesseraError,
)
from server.http.body.eager import Begun
from server.http.body.request_body import ClientDisconnectedError, ClientWatch
from server.http.metrics.records import RequestRecord, outcome_of
from server.http.metrics.specs import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from starlette.types import Send

    from server.engine.core.request import TokenEvent
    from server.http.config import HTTPConfig
    from server.http.lifecycle import Lifecycle
    from server.http.reply.completion import Completion
    from server.http.reply.generation import Generation
    from server.http.responses import Headers
    from server.http.transport import DirectWriter

log = logging.getLogger("tessera.http")

# An empty comment. Clients skip it; proxies see that the connection is in use.
KEEP_ALIVE_FRAME = b":\n\n"
STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class StreamRenderer(Protocol):
    """Renders the events of one stream; a dialect makes one for each request."""

    def token(self, completion: Completion, event: TokenEvent) -> bytes:
        """Append a token to its completion, by `push` or `add`, and render it.

        Returns:
            Zero or more complete frames.

        Raises:
            GenerationError: from `push`.
        """

    def end(self) -> bytes:
        """Render the frames after the last token of the last completion.

        Called when the engine has reported what the completions used: `Generation.usage` is final. If a stop string
        ended one of them, this is up to a step after its last token.
        """

    def fail(self, error: TesseraError) -> bytes:
        """Render an error that ends the stream."""


@dataclasses.dataclass(slots=True)
class TokenSender:
    """Renders and sends the events of one request's completions.

    Attributes:
        failure: the error that the last frame reports; None if it is not an error.
    """

    generation: Generation
    renderer: StreamRenderer
    out: EventStream
    record: RequestRecord
    watch: ClientWatch
    lifecycle: Lifecycle
    failure: TesseraError | None = None

    async def run(self) -> None:
        """Send all completions; errors become the last frame.

        Raises:
            ClientDisconnectedError: the client disconnected before the last frame.
        """
        parts = [self._follow(completion) for completion in self.generation.completions]
        try:
            # The usual single completion needs no task of its own.
            await (parts[0] if len(parts) == 1 else asyncio.gather(*parts))
            if not self.out.ended:
                await self._settle()
        except (ClientDisconnectedError, OSError):
            raise
        except asyncio.CancelledError:
            if self.lifecycle.is_ending:
                self.record.finish(Outcome.ERROR)
                await self._fail(IncompleteGenerationStreamError())
            raise
        except Exception:
            log.exception("a stream failed")
            await self._fail(TesseraError())
        if self.failure is not None:
            self.record.finish(outcome_of(self.failure))

    async def _settle(self) -> None:
        """Wait until the usage is known, then send the end of the stream."""
        await self.generation.settle()
        if self.watch.gone:
            raise ClientDisconnectedError
        self.out.write(self.render_end())
        await self.out.drain()

    async def _fail(self, error: TesseraError) -> None:
        self.out.write(self.render_failure(error))
        await self.out.drain()

    def render_failure(self, error: TesseraError) -> bytes:
        """Render an error, and end the stream with the next write."""
        self.out.ended, self.failure = True, error
        return self.renderer.fail(error)

    async def _follow(self, completion: Completion) -> None:
        """Send the tokens of one completion until it ends or the stream does."""
        take = _Reader(self, completion).take
        while completion.finish_reason is None and not self.out.ended:
            await completion.follow(take)
            await self.out.drain()
        if self.failure is not None:
            self.generation.abort()  # ends the other completions too
        else:
            completion.stream.stop()  # the engine does not search for stop strings

    def render_end(self) -> bytes:
        """Render the end of the stream if all completions have ended and what they used is known.

        If so, the next write ends the stream.
        """
        if any(completion.finish_reason is None for completion in self.generation.completions):
            return b""
        if not self.generation.settled:
            return b""
        self.out.ended = True
        return self.renderer.end()


class _Reader:
    """Renders and sends the events of one completion: `take` is the reader of its stream.

    It has slots, because what is read for a token is rarely still in the processor's caches when the next one of the
    stream arrives: the fewer objects, the better.
    """

    __slots__ = ("_clock", "_completion", "_out", "_renderer", "_sender", "_stream")

    def __init__(self, sender: TokenSender, completion: Completion) -> None:
        self._sender, self._completion, self._stream = sender, completion, completion.stream
        self._renderer, self._out, self._clock = sender.renderer, sender.out, sender.record.clock()

    def take(self, events: list[TokenEvent]) -> bool:
        """Send events; see `RequestStream.follow`.

        Raises:
            ClientDisconnectedError: the client has disconnected.
        """
        out, completion, renderer = self._out, self._completion, self._renderer
        if out.ended:
            return False
        frames, failed = [], False
        try:
            for event in events:
                frames.append(renderer.token(completion, event))
                if completion.finish_reason is not None:
                    frames.append(self._sender.render_end())
                    break
        except IncompleteGenerationError:
            failed = True
            frames.append(self._sender.render_failure(IncompleteGenerationStreamError()))
        except GenerationError as error:
            failed = True
            frames.append(self._sender.render_failure(error))
        # A client that disconnects aborts its completions, so that only an end can follow.
        if (failed or completion.finish_reason is not None) and self._sender.watch.gone:
            raise ClientDisconnectedError
        now = self._stream.delivered
        if not failed:
            self._clock.tokens(len(events), now)
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        ready = out.write(data, now) if data or out.ended else True
        return ready and completion.finish_reason is None and not out.ended


class EventStream:
    """Sends the frames of one response in the order of the calls. Created by `open_event_stream`.

    Attributes:
        ended: whether the last frame was written, or the next call of `write` does it.
    """

    __slots__ = (
        "_backlog", "_blocked", "_comment", "_config", "_draining", "_last", "_loop", "_send", "_timer", "_writer",
        "ended",
    )  # fmt: skip

    def __init__(self, send: Send, config: HTTPConfig, writer: DirectWriter | None) -> None:
        self._send = send
        self._writer = writer
        self._config = config
        self._loop = asyncio.get_running_loop()
        # A send that waits for the client, and the frames written since.
        self._blocked: Awaitable[None] | None = None
        self._backlog: list[bytes] = []
        self.ended = False
        self._draining = asyncio.Lock()
        self._last = time.perf_counter()
        self._comment: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(config.keep_alive_seconds, self._tick)

    def write(self, data: bytes, now: float | None = None) -> bool:
        """Send frames. May be called outside of a task.

        Args:
            data: complete frames; at least one byte unless `ended` is true.
            now: the time, `time.perf_counter` seconds; None reads the clock.

        Returns:
            Whether the frames were sent, as they nearly always are. If not, await `drain`.
        """
        if self._blocked is not None:
            self._backlog.append(data)
            return False
        self._last = time.perf_counter() if now is None else now
        ended = self.ended
        if not ended and self._writer is not None and self._writer.write(data):
            return True
        # `send` rarely waits. If it does, `drain` runs the rest.
        message = {"type": "http.response.body", "body": data, "more_body": not ended}
        sent = Begun(self._send(message))
        self._blocked = sent.rest
        return sent.rest is None

    async def drain(self) -> None:
        """Wait until all frames were sent."""
        if self._blocked is None and not self._backlog:
            return
        async with self._draining:
            while True:
                if self._blocked is not None:
                    try:
                        await self._blocked
                    finally:
                        self._blocked = None
                    self._last = time.perf_counter()
                if not self._backlog:
                    return
                data, self._backlog = b"".join(self._backlog), []
                self.write(data)

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    async def _send_comment(self) -> None:
        with contextlib.suppress(OSError):  # the next frame meets the same error
            if not self.ended:
                self.write(KEEP_ALIVE_FRAME)
                await self.drain()

    def _tick(self) -> None:
        """Send a comment if there was no event for long. A client that is too slow for the events needs none."""
        now = time.perf_counter()
        due = self._last + self._config.keep_alive_seconds
        if now >= due:
            if self._blocked is None and not self.ended:
                self._comment = self._loop.create_task(self._send_comment())
            due = now + self._config.keep_alive_seconds
        self._timer = self._loop.call_later(due - now, self._tick)


@contextlib.asynccontextmanager
async def open_event_stream(
    send: Send, config: HTTPConfig, headers: Headers, writer: DirectWriter | None = None
) -> AsyncIterator[EventStream]:
    """Start a response of server-sent events.

    Args:
        send: the ASGI server's `send`.
        config: the intervals.
        headers: headers in addition to `STREAM_HEADERS`.
        writer: sends frames faster than `send`; None if the server does not support it.

    Raises:
        ClientDisconnectedError: the server reported that the client disconnected.
    """
    try:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *headers]}
        )
        stream = EventStream(send, config, writer)
        try:
            yield stream
        finally:
            stream.close()
    except OSError as error:
        raise ClientDisconnectedError from error
