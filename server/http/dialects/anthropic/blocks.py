"""Divides a text that may call tools into the content blocks of a message, and tells the events of their growth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from server.http.dialects.anthropic.replies import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputDelta,
    TextBlock,
    TextDelta,
    ToolUseBlock,
)
from server.http.dialects.openai.tools import read_piece

if TYPE_CHECKING:
    from model.text.tools.parser import CallDelta
    from server.http.dialects.anthropic.replies import ContentBlock, MessageEvent
    from server.http.dialects.openai.tools import ToolUse
    from server.http.reply.completion import Completion

_ID_PREFIX = "toolu_"
_NO_INPUT = msgspec.Raw(b"{}")
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ContentBlocks:
    """The content of one message: the text before the calls, then the calls. No text is empty.

    The input of a call is sent when it is complete, so that a call that was cut off is no part of the message: clients
    run what they get. Input that the client asked for as it is generated (`eager`) ends where it was cut off, and is
    no part of a reply that is not a stream either.

    Attributes:
        finished: the blocks that are complete; all of them after the last piece.
        num_calls: the calls among them.
    """

    def __init__(self, tools: ToolUse, eager: frozenset[str]) -> None:
        self.finished: list[ContentBlock] = []
        self.num_calls = 0
        self._tools = tools
        self._eager = eager
        self._parser = tools.parser()
        self._index = 0  # of the block that grows, or of the next one
        self._call: ToolUseBlock | None = None  # that grows
        self._open = False  # whether the block that grows has begun in the stream
        self._pieces: list[str] = []  # of the block that grows
        self._events: list[MessageEvent] = []

    def push(self, completion: Completion, text: str) -> list[MessageEvent]:
        """Append a piece of the text.

        Args:
            completion: the text, to which the piece was appended.
            text: the piece.

        Returns:
            The events that it causes.
        """
        self._events = []
        for delta in read_piece(self._parser, completion, text):
            self._add_text(delta.content)
            for call in delta.calls:
                self._add_call(call)
            if self._call is not None and self._parser.call_complete:
                self._close_call()
            self._add_text(delta.trailing)
        if completion.finish_reason is not None:
            self._close()
        return self._events

    def _add_text(self, text: str) -> None:
        if not text:
            return
        if self._call is not None:
            self._close()
        if not self._open:
            self._events.append(ContentBlockStart(self._index, TextBlock("")))
            self._open = True
        self._pieces.append(text)
        self._events.append(ContentBlockDelta(self._index, TextDelta(text)))

    def _add_call(self, call: CallDelta) -> None:
        if call.name is not None:
            if self._call is None:
                self._close()
            else:
                self._close_call()
            call_id = self._tools.new_id(_ID_PREFIX)
            self._call = ToolUseBlock(id=call_id, name=call.name, input=_NO_INPUT)
        self._pieces.append(call.arguments)
        assert self._call is not None
        # A block without any input would be a call with an empty one.
        if self._call.name in self._eager and call.arguments:
            if not self._open:
                self._events.append(ContentBlockStart(self._index, self._call))
                self._open = True
            self._events.append(ContentBlockDelta(self._index, InputDelta(call.arguments)))

    def _close_call(self) -> None:
        """Complete the call that grows."""
        assert self._call is not None
        arguments = "".join(self._pieces)
        if _is_object(arguments):
            if not self._open:
                self._events.append(ContentBlockStart(self._index, self._call))
                self._events.append(ContentBlockDelta(self._index, InputDelta(arguments)))
                self._open = True
            whole = msgspec.structs.replace(self._call, input=msgspec.Raw(arguments))
            self.finished.append(whole)
            self.num_calls += 1
        self._close()

    def _close(self) -> None:
        """End the block that grows, if there is one. A call that is not complete is dropped."""
        if self._call is None and self._pieces:
            self.finished.append(TextBlock("".join(self._pieces)))
        if self._open:
            self._events.append(ContentBlockStop(self._index))
            self._index += 1
        self._call, self._open, self._pieces = None, False, []


def _is_object(text: str) -> bool:
    try:
        _object.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False
    return True
