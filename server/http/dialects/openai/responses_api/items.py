"""Divides a text that may call tools into the output items of a response, and tells the events of their growth."""

from __future__ import annotations

import collections
import uuid
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec import UNSET

from server.http.dialects.openai.replies import (
    CustomToolCall,
    FunctionCall,
    OutputItem,
    OutputMessage,
)
from server.http.dialects.openai.responses_api.format import ResponseFormat, new_message_id
from server.http.dialects.openai.responses_api.tools import CalledTool, InputDecoder
from server.http.dialects.openai.tools import read_piece

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from model.text.tools.parser import CallDelta
    from server.http.dialects.openai.tools import ToolUse
    from server.http.reply.completion import Completion, Token

Event: TypeAlias = tuple[str, dict[str, Any]]
"""Type and fields of an event."""


class OutputItems:
    """The output items of one response: a message with the text before the calls, then the calls.

    A response without text and calls has an empty message. Text after the calls, which no grammar allows but special
    tokens can add, is another message.

    Attributes:
        finished: the items that are complete; all of them after the last piece.
    """

    def __init__(
        self, tools: ToolUse, called: Mapping[str, CalledTool], reply: ResponseFormat
    ) -> None:
        self.finished: list[OutputItem] = []
        self._tools = tools
        self._called = called
        self._input = InputDecoder()  # of the call of a custom tool that grows
        self._reply = reply
        self._parser = tools.parser()
        self._item: OutputItem | None = None  # that grows; its text is in `_pieces`
        self._pieces: list[str] = []
        self._tokens: list[Token] = []  # of the item's text
        self._events: list[Event] = []
        # Tokens that are not assigned to a text yet, each with its position.
        self._waiting: collections.deque[tuple[int, Token]] = collections.deque()
        self._length = 0  # of the texts of all tokens
        self._shown = 0  # characters of the text before the calls

    def push(self, completion: Completion, text: str, tokens: Sequence[Token]) -> list[Event]:
        """Append a piece of the text.

        Args:
            completion: the text, to which the piece was appended.
            text: the piece.
            tokens: its tokens, if log-probabilities are reported.

        Returns:
            The events that it causes, without those of the response.
        """
        self._events = []
        for token in tokens:
            self._waiting.append((self._length, token))
            self._length += len(token.text)
        for delta in read_piece(self._parser, completion, text):
            self._add_text(delta.content, self._take_tokens(delta.content))
            for call in delta.calls:
                self._add_call(call)
            self._add_text(delta.trailing, ())
        if completion.finish_reason is not None:
            self._end()
        return self._events

    def _take_tokens(self, content: str) -> list[Token]:
        """Return the tokens that begin within the text up to the end of this piece."""
        self._shown += len(content)
        taken = []
        while self._waiting and self._waiting[0][0] < self._shown:
            taken.append(self._waiting.popleft()[1])
        return taken

    def _add_text(self, text: str, tokens: Sequence[Token]) -> None:
        if not text and not tokens:
            return
        if not isinstance(self._item, OutputMessage):
            self._begin_message()
        self._pieces.append(text)
        self._tokens += tokens
        logprobs = self._reply.logprobs(tokens)
        self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _add_call(self, call: CallDelta) -> None:
        if call.name is not None:
            self._begin(self._new_call(self._called.get(call.name) or CalledTool(call.name)))
        kind, piece = "function_call_arguments", call.arguments
        if isinstance(self._item, CustomToolCall):
            kind, piece = "custom_tool_call_input", self._input.push(piece)
        if piece:
            self._pieces.append(piece)
            self._event(f"response.{kind}.delta", delta=piece)

    def _new_call(self, tool: CalledTool) -> OutputItem:
        place: dict[str, Any] = {
            "call_id": self._tools.new_id(),
            "name": tool.name,
            "namespace": tool.namespace or UNSET,
            "status": "in_progress",
        }
        number = uuid.uuid4().hex
        if tool.custom:
            self._input = InputDecoder()
            return CustomToolCall(id=f"ctc_{number}", input="", **place)
        return FunctionCall(id=f"fc_{number}", arguments="", **place)

    def _begin_message(self) -> None:
        self._begin(OutputMessage(id=new_message_id(), status="in_progress", content=[]))
        self._event("response.content_part.added", content_index=0, part=self._reply.part("", ()))

    def _begin(self, item: OutputItem) -> None:
        self._close("completed")
        self._item, self._pieces, self._tokens = item, [], []
        index = len(self.finished)
        self._events.append(("response.output_item.added", {"output_index": index, "item": item}))

    def _end(self) -> None:
        # A token without text, such as the last one, is of the text too.
        if not self._parser.num_calls:
            tokens = [token for _, token in self._waiting if not token.text]
            self._add_text("", tokens)
            if self._item is None:
                self._begin_message()
        calls = not isinstance(self._item, OutputMessage)
        status = "completed" if self._parser.call_complete else "incomplete"
        self._close(status if calls else self._reply.status)

    def _close(self, status: str) -> None:
        """Complete the item that grows, if there is one."""
        if self._item is None:
            return
        text, item = "".join(self._pieces), self._item
        if isinstance(item, FunctionCall):
            item = msgspec.structs.replace(item, arguments=text, status=status)
            self._event("response.function_call_arguments.done", arguments=text, name=item.name)
        elif isinstance(item, CustomToolCall):
            item = msgspec.structs.replace(item, input=text, status=status)
            self._event("response.custom_tool_call_input.done", input=text)
        else:
            part = self._reply.part(text, self._tokens)
            item = msgspec.structs.replace(item, content=[part], status=status)
            logprobs = part.logprobs
            self._event("response.output_text.done", content_index=0, text=text, logprobs=logprobs)
            self._event("response.content_part.done", content_index=0, part=part)
        index = len(self.finished)
        self._events.append(("response.output_item.done", {"output_index": index, "item": item}))
        self.finished.append(item)
        self._item = None

    def _event(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 - of the event
        """Append an event of the item that grows."""
        assert self._item is not None
        place = {"item_id": self._item.id, "output_index": len(self.finished)}
        self._events.append((kind, place | fields))
