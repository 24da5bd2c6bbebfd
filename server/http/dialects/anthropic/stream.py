"""The events of a stream of /v1/messages: with text only, or with blocks that may be calls of tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from server.http.dialects.anthropic.errors import error_reply
from server.http.dialects.anthropic.replies import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    MessageStart,
    MessageStop,
    Ping,
    TextBlock,
    TextDelta,
)

if TYPE_CHECKING:
    from server.engine.core.request import TokenEvent
    from server.errors import TesseraError
    from server.http.dialects.anthropic.blocks import ContentBlocks
    from server.http.dialects.anthropic.message import MessageFormat
    from server.http.dialects.openai.frames import TokenJSON
    from server.http.reply.completion import Completion

_encode = msgspec.json.Encoder().encode
_EMPTY = _encode("")


def event_frame(event: msgspec.Struct) -> bytes:
    """Render one event, whose name is its type."""
    return b"event: %b\ndata: %b\n\n" % (
        str(event.__struct_config__.tag).encode(),
        _encode(event),
    )


# The event of a token's text, without building a record for every token: before and after the text.
_HEAD, _TAIL = event_frame(ContentBlockDelta(0, TextDelta(""))).rsplit(_EMPTY, 1)


class _Events:
    """What the renderers of both kinds of streams have in common."""

    def __init__(self, message: MessageFormat) -> None:
        self._message = message
        self._begun = False

    def fail(self, error: TesseraError) -> bytes:
        """Render an error as the last event."""
        return event_frame(error_reply(error))

    def _begin(self) -> bytes:
        """Render the events before the first token's, once it is there."""
        if self._begun:
            return b""
        self._begun = True
        return event_frame(MessageStart(self._message.begun())) + event_frame(Ping())

    def _end(self, num_calls: int) -> bytes:
        return event_frame(self._message.ended(num_calls)) + event_frame(MessageStop())


class BlockEvents(_Events):
    """Renders a stream that may call tools; implements `server.http.reply.streaming.StreamRenderer`."""

    def __init__(self, message: MessageFormat, blocks: ContentBlocks) -> None:
        super().__init__(message)
        self._blocks = blocks

    def token(self, completion: Completion, event: TokenEvent) -> bytes:
        """Append a token to its completion and render the events that it causes, often none."""
        text = completion.push(event)
        begin = self._begin()
        events = self._blocks.push(completion, text)
        return begin + b"".join([event_frame(event) for event in events])

    def end(self) -> bytes:
        """Render the events after the last token."""
        return self._end(self._blocks.num_calls)


class TextEvents(_Events):
    """Renders a stream without tools, one text; implements `server.http.reply.streaming.StreamRenderer`."""

    def __init__(self, message: MessageFormat, texts: TokenJSON) -> None:
        super().__init__(message)
        self._texts = texts
        self._has_text = False

    def token(self, completion: Completion, event: TokenEvent) -> bytes:
        """Append a token to its completion and render its event; none if it adds no text."""
        text = self._texts.push(completion, event)
        begin = b"" if self._begun else self._begin()
        if text == _EMPTY or self._message.is_empty:
            return begin
        if not self._has_text:
            self._has_text = True
            begin += event_frame(ContentBlockStart(0, TextBlock("")))
        return begin + _HEAD + text + _TAIL

    def end(self) -> bytes:
        """Render the events after the last token."""
        stop = event_frame(ContentBlockStop(0)) if self._has_text else b""
        return stop + self._end(0)
