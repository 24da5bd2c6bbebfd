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
from server.http.guard import ClientDisconnectedError
from server.http.metrics import Outcome
from server.http.schemas.replies import StreamDetails, Token
from server.http.sse import error_frame, full_frame, open_event_stream, token_frame, wire_logprob

if TYPE_CHECKING:
    from starlette.types import Send

    from server.engine.request import TokenEvent
    from server.http.config import HTTPConfig
    from server.http.generation import Generation
    from server.http.guard import ClientWatch
    from server.http.metrics import RequestRecord

log = logging.getLogger("tessera.http")


async def stream_generation(
    generation: Generation,
    send: Send,
    headers: list[tuple[bytes, bytes]],
    config: HTTPConfig,
    record: RequestRecord,
    watch: ClientWatch,
) -> None:
    """Answer with the frames of a generation; from the first byte on, errors are frames too.

    Raises:
        ClientDisconnectedError: the client went away before it had the last frame.
    """
    async with open_event_stream(send, config, headers) as out:
        renderer = _FrameRenderer(generation)
        clock = record.clock()
        try:
            async for events in generation.draws[0].stream:
                frames = renderer.render(events)
                if watch.gone:
                    raise ClientDisconnectedError
                if not renderer.failed:
                    clock.tokens(len(events))
                await out.send(frames, more=not renderer.ended)
                if renderer.ended:
                    break
            else:
                await out.send(renderer.fail(IncompleteGenerationStreamError()), more=False)
        except (ClientDisconnectedError, OSError):
            raise
        except asyncio.CancelledError:
            if not out.stalled:  # then the server is stopping
                record.finish(Outcome.ERROR)
                await out.send(renderer.fail(IncompleteGenerationStreamError()), more=False)
            raise
        except Exception:
            log.exception("a stream failed")
            await out.send(renderer.fail(TesseraError()), more=False)
    if renderer.failed:
        record.finish(Outcome.ERROR)


class _FrameRenderer:
    """Renders the events of one stream.

    Attributes:
        ended: whether the last frame has been rendered.
        failed: whether that frame is an error.
    """

    __slots__ = ("_generation", "_transcript", "_wants_top", "ended", "failed")

    def __init__(self, generation: Generation) -> None:
        self.ended = False
        self.failed = False
        self._generation = generation
        self._transcript = generation.draws[0].transcript
        self._wants_top = generation.options.sampling.top_logprobs > 0

    def render(self, events: list[TokenEvent]) -> bytes:
        """The frames of events that arrived together; what comes after the last frame is dropped."""
        transcript = self._transcript
        frames = []
        for event in events:
            try:
                text, special = transcript.push(event)
            except IncompleteGenerationError:
                frames.append(self.fail(IncompleteGenerationStreamError()))
                break
            except GenerationError as error:
                frames.append(self.fail(error))
                break
            assert event.token_id is not None
            if self._wants_top or transcript.finish_reason is not None:
                frames.append(self._full(event, text, special=special))
                if self.ended:
                    break
            else:
                frames.append(
                    token_frame(
                        transcript.num_tokens, event.token_id, text, event.logprob, special=special
                    )
                )
        return frames[0] if len(frames) == 1 else b"".join(frames)

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
