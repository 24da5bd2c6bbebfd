"""The events of a stream of /v1/responses: with text only, or with items that may be calls of tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from server.http.dialects.openai.errors import error_reply
from server.http.dialects.openai.frames import TokenJSON
from server.http.dialects.openai.replies import OutputItem, OutputMessage, ResponseEvent

if TYPE_CHECKING:
    from model.text.tokenizer import Tokenizer
    from server.engine.core.request import TokenEvent
    from server.errors import TesseraError
    from server.http.dialects.openai.frames import TokenTexts
    from server.http.dialects.openai.responses_api.format import ResponseFormat
    from server.http.dialects.openai.responses_api.items import OutputItems
    from server.http.reply.completion import Completion, Token

_encode = msgspec.json.Encoder().encode
_DELTA = b"response.output_text.delta"


class _Events:
    """What the renderers of both kinds of streams have in common."""

    def __init__(self, reply: ResponseFormat, warnings: tuple[str, ...]) -> None:
        self._reply = reply
        self._warnings = warnings
        self._sequence = 0

    def fail(self, error: TesseraError) -> bytes:
        """Render an error as the last event."""
        details = error_reply(error).error
        return self._event("error", code=details.type, message=details.message, param=details.param)

    def _begin(self) -> bytes:
        begun = self._reply.begun()
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def _end(self, output: list[OutputItem]) -> bytes:
        response = self._reply.finished(output, self._warnings)
        return self._event(f"response.{response.status}", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:  # noqa: ANN401 - of the event
        record = ResponseEvent(type=kind, sequence_number=self._sequence, **fields)
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(record))


class ToolEvents(_Events):
    """Renders a stream that may call tools; implements `server.http.reply.streaming.StreamRenderer`."""

    def __init__(
        self, reply: ResponseFormat, warnings: tuple[str, ...], items: OutputItems
    ) -> None:
        super().__init__(reply, warnings)
        self._items = items

    def token(self, completion: Completion, event: TokenEvent) -> bytes:
        """Append a token to its completion and render the events that it causes, often none."""
        begin = b"" if self._sequence else self._begin()
        text = completion.push(event)
        tokens = [completion.describe(event, text)] if self._reply.reports_logprobs else []
        events = self._items.push(completion, text, tokens)
        return begin + b"".join([self._event(kind, **fields) for kind, fields in events])

    def end(self) -> bytes:
        """Render the event after the last token."""
        return self._end(self._items.finished)


class TextEvents(_Events):
    """Renders a stream without tools, one message; implements `server.http.reply.streaming.StreamRenderer`."""

    def __init__(
        self,
        reply: ResponseFormat,
        warnings: tuple[str, ...],
        texts: TokenTexts,
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(reply, warnings)
        self._texts = TokenJSON(tokenizer, texts)
        self._tokens: list[Token] = []
        self._completion: Completion | None = None
        self._plain = not reply.reports_logprobs
        # The same as `_event` for this type, without building a record for every token: the parts before the sequence
        # number, before the text, and after the text.
        self._head = b'event: %b\ndata: {"type":"%b","sequence_number":' % (_DELTA, _DELTA)
        self._middle = (
            b',"item_id":"%b","output_index":0,"content_index":0,"delta":'
            % reply.message_id.encode()
        )
        self._tail = b',"logprobs":[]}\n\n'

    def token(self, completion: Completion, event: TokenEvent) -> bytes:
        """Append a token to its completion and render its event."""
        if self._completion is None:
            self._completion = completion
            return self._begin_message() + self.token(completion, event)
        if self._plain:
            return self._frame(self._texts.push(completion, event), self._tail)
        text = completion.push(event)
        token = completion.describe(event, text)
        self._tokens.append(token)
        logprobs = _encode(self._reply.logprobs([token]))
        return self._frame(_encode(text), b',"logprobs":%b}\n\n' % logprobs)

    def end(self) -> bytes:
        """Render the events after the last token."""
        assert self._completion is not None
        item = self._reply.text_item(self._completion.text, self._tokens)
        (part,) = item.content
        place = {"item_id": item.id, "output_index": 0, "content_index": 0}
        return b"".join(
            [
                self._event(
                    "response.output_text.done", **place, text=part.text, logprobs=part.logprobs
                ),
                self._event("response.content_part.done", **place, part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._end([item]),
            ]
        )

    def _begin_message(self) -> bytes:
        reply = self._reply
        place = {"item_id": reply.message_id, "output_index": 0, "content_index": 0}
        item = OutputMessage(id=reply.message_id, status="in_progress", content=[])
        return b"".join(
            [
                self._begin(),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **place, part=reply.part("", ())),
            ]
        )

    def _frame(self, text: bytes, tail: bytes) -> bytes:
        number = self._sequence
        self._sequence = number + 1
        return self._head + b"%d" % number + self._middle + text + tail
