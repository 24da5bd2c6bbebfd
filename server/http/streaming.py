"""A generation as server-sent events: one frame for each token, the last one with the whole text.

Frames of tokens that arrived together are sent together; a lone token is never held back.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from server.errors import (
    GenerationError,
    IncompleteGenerationError,
    IncompleteGenerationStreamError,
    TesseraError,
)
from server.http.dialects.tgi.replies import StreamDetails, Token
from server.http.dialects.tgi.sse import (
    error_frame,
    full_frame,
    is_wire_logprob,
    open_event_stream,
    plain_frame,
    token_frame,
    token_head,
    wire_logprob,
)
from server.http.metrics.registry import Outcome
from server.http.request_body import ClientDisconnectedError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from starlette.types import Send

    from server.engine.core.request import TokenEvent
    from server.http.context import AppContext
    from server.http.dialects.tgi.sse import EventStream
    from server.http.generation import Generation
    from server.http.metrics.records import RequestRecord
    from server.http.request_body import ClientWatch
    from server.http.transport import Wire

log = logging.getLogger("tessera.http")


async def stream_generation(
    generation: Generation,
    send: Send,
    headers: list[tuple[bytes, bytes]],
    context: AppContext,
    record: RequestRecord,
    watch: ClientWatch,
    wire: Wire | None,
) -> None:
    """Answer with the frames of a generation; from the first byte on, errors are frames too.

    Raises:
        ClientDisconnectedError: the client went away before it had the last frame.
    """
    async with open_event_stream(send, context.config, headers, wire) as out:
        pump = _Pump(_FrameRenderer(generation, context.plain_tokens), out, record, watch)
        try:
            while not pump.ended:
                await generation.draws[0].stream.follow(pump.take)
                await pump.wait_for_client()
        except (ClientDisconnectedError, OSError):
            raise
        except asyncio.CancelledError:
            if not out.stalled:  # then the server is stopping
                record.finish(Outcome.ERROR)
                await pump.fail(IncompleteGenerationStreamError())
            raise
        except Exception:
            log.exception("a stream failed")
            await pump.fail(TesseraError())
    if pump.failed:
        record.finish(Outcome.ERROR)


class _Pump:
    """Renders events and sends them in the callback that brings them: a task is needed only where the client lags.

    Attributes:
        ended: whether the last frame was sent, or is about to be.
    """

    __slots__ = ("_clock", "_out", "_renderer", "_unsent", "_watch", "ended")

    def __init__(
        self,
        renderer: _FrameRenderer,
        out: EventStream,
        record: RequestRecord,
        watch: ClientWatch,
    ) -> None:
        self.ended = False
        self._out = out
        self._renderer = renderer
        self._clock = record.clock()
        self._watch = watch
        self._unsent: Awaitable[None] | None = None

    @property
    def failed(self) -> bool:
        """Whether the last frame is an error."""
        return self._renderer.failed

    def take(self, events: list[TokenEvent]) -> bool:
        """Send the frames of events that arrived together.

        Returns:
            Whether more may come at once: False after the last frame, and where the client has to be waited for.

        Raises:
            ClientDisconnectedError: the client went away.
        """
        renderer = self._renderer
        frames = renderer.render(events)
        if self._watch.gone:
            raise ClientDisconnectedError
        if not renderer.failed:
            self._clock.tokens(len(events))
        self.ended = renderer.ended
        self._unsent = self._out.start(frames, more=not self.ended)
        return not self.ended and self._unsent is None

    async def wait_for_client(self) -> None:
        """Wait until the client has taken what was sent last; tokens that come meanwhile are sent together."""
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            await unsent

    async def fail(self, error: TesseraError) -> None:
        """End the stream with an error."""
        self.ended = True
        await self._out.send(self._renderer.fail(error), more=False)


class _FrameRenderer:
    """Renders the events of one stream.

    Attributes:
        ended: whether the last frame has been rendered.
        failed: whether that frame is an error.
    """

    __slots__ = ("_generation", "_plain_tokens", "_transcript", "_wants_top", "ended", "failed")

    def __init__(self, generation: Generation, plain_tokens: dict[int, tuple[str, bytes]]) -> None:
        self.ended = False
        self.failed = False
        self._generation = generation
        self._transcript = generation.draws[0].transcript
        self._plain_tokens = plain_tokens
        self._wants_top = generation.options.sampling.top_logprobs > 0

    def render(self, events: list[TokenEvent]) -> bytes:
        """The frames of events that arrived together; what comes after the last frame is dropped."""
        transcript = self._transcript
        frames = []
        for event in events:
            if transcript.plain and event.finish_reason is None and not self._wants_top:
                known = self._plain_tokens.get(event.token_id)  # type: ignore[arg-type]
                if known is not None and is_wire_logprob(event.logprob):
                    transcript.add(known[0])
                    frames.append(plain_frame(transcript.num_tokens, known[1], event.logprob))
                    continue
            frames.append(self._render(event))
            if self.ended:
                break
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def _render(self, event: TokenEvent) -> bytes:
        transcript = self._transcript
        was_plain = transcript.plain
        try:
            text, special = transcript.push(event)
        except IncompleteGenerationError:
            return self.fail(IncompleteGenerationStreamError())
        except GenerationError as error:
            return self.fail(error)
        assert event.token_id is not None
        if self._wants_top or transcript.finish_reason is not None:
            return self._full(event, text, special=special)
        if was_plain and transcript.plain and not special:
            self._plain_tokens[event.token_id] = (text, token_head(event.token_id, text))
        return token_frame(
            transcript.num_tokens, event.token_id, text, event.logprob, special=special
        )

    def fail(self, error: TesseraError) -> bytes:
        """The frame that ends the stream with an error."""
        self.ended = self.failed = True
        return error_frame(error)

    def _full(self, event: TokenEvent, text: str, *, special: bool) -> bytes:
        transcript, options = self._transcript, self._generation.options
        assert event.token_id is not None
        generated_text = details = None
        if transcript.finish_reason is not None:
            self.ended = True
            generated_text = self._generation.full_text(self._generation.draws[0])
            if options.details:
                details = StreamDetails(
                    finish_reason=transcript.finish_reason,
                    generated_tokens=transcript.num_tokens,
                    seed=options.seed,
                    input_length=len(self._generation.prompt_ids),
                )
        token = Token(event.token_id, text, wire_logprob(event.logprob), special)
        top = transcript.top_tokens(event) if self._wants_top else None
        return full_frame(transcript.num_tokens, token, top or None, generated_text, details)
