"""Divides a text that may call tools into the content blocks of a message, and tells the events of their growth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from model.text.tools.arguments import read_arguments
from server.http.dialects.anthropic.replies import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputDelta,
    TextBlock,
    TextDelta,
    ToolUseBlock,
)
from server.http.dialects.openai.tools import CallRenderer, ToolUse

if TYPE_CHECKING:
    from server.http.dialects.anthropic.replies import ContentBlock, MessageEvent
    from server.http.dialects.openai.replies import ToolCallDelta
    from server.http.reply.completion import Completion

_ID_PREFIX = "toolu_"
_NO_INPUT = msgspec.Raw(b"{}")


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
        self._calls = CallRenderer(tools)
        self._index = 0  # of the block that grows, or of the next one
        self._call: ToolUseBlock | None = None  # that grows
        self._open = False  # whether the block that grows has begun in the stream
        self._pieces: list[str] = []  # of the block that grows
        self._events: list[MessageEvent] = []

    def push(self, completion: Completion, text: str) -> list[MessageEvent]:
        """Append a piece of the text.

        Args:
            completion: the message, to which the piece was appended.
            text: the piece.

        Returns:
            The events that it causes.
        """
        self._events = []
        follows = self._calls.calls_tools
        content, deltas = self._calls.push(completion, text)
        if not follows:
            self._add_text(content)
        for delta in deltas:
            self._add_call(delta)
        if self._call is not None and self._calls.complete:
            self._close_call()
        if follows:
            self._add_text(content)
        if completion.finish_reason is not None:
            self._close()
        return self._events

    def _add_text(self, text: str) -> None:
        if not text:
            return
        if not self._open:
            self._events.append(ContentBlockStart(self._index, TextBlock("")))
            self._open = True
        self._pieces.append(text)
        self._events.append(ContentBlockDelta(self._index, TextDelta(text)))

    def _add_call(self, delta: ToolCallDelta) -> None:
        name, piece = delta.function.name, delta.function.arguments
        if name is not UNSET:
            if self._call is None:
                self._close()
            else:
                self._close_call()
            call = ToolUseBlock(id=self._tools.new_id(_ID_PREFIX), name=name, input=_NO_INPUT)
            self._call = call
            if name in self._eager:
                self._events.append(ContentBlockStart(self._index, call))
                self._open = True
        self._pieces.append(piece)
        if self._open and piece:
            self._events.append(ContentBlockDelta(self._index, InputDelta(piece)))

    def _close_call(self) -> None:
        """Complete the call that grows."""
        assert self._call is not None
        arguments = "".join(self._pieces)
        if isinstance(read_arguments(arguments), dict):
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
