"""The events of the OpenAI routes' streams: one per token, then the usage if requested, then `[DONE]`.

An event is the beginning that all events of a choice share, the token's text as JSON, and an end that all share. The
JSON of a token's text is cached. Only the first and last events of a choice, and those that report more than text, are
built as records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

from server.http.dialects.openai.errors import error_reply

if TYPE_CHECKING:
    from model.text.tokenizer import Tokenizer
    from server.engine.core.request import TokenEvent
    from server.errors import TesseraError
    from server.http.reply.completion import Completion, Token
    from server.http.reply.generation import Generation

TokenTexts: TypeAlias = dict[int, tuple[str, bytes]]
"""By token id: text, and the text as JSON. Contains only tokens that add the same text in every context."""

END_MARK = "[DONE]"
DONE = f"data: {END_MARK}\n\n".encode()
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}text\N{OBJECT REPLACEMENT CHARACTER}"

_encode = msgspec.json.Encoder().encode
_MARK_JSON = _encode(_MARK)


class ChunkFormat(Protocol):
    """Builds the events of one kind of stream.

    Attributes:
        plain: whether an event reports nothing but text, unless it is the first or last of its choice.
    """

    plain: bool

    def begin(self, completion: Completion, index: int) -> bytes:
        """Render the events before the first token of a choice."""

    def chunk(
        self, completion: Completion, index: int, text: str, token: Token | None
    ) -> msgspec.Struct | None:
        """Build the event of a token; None for no event, which only a format that is not `plain` returns.

        Args:
            completion: the choice's completion, to which the token was appended.
            index: the choice's number.
            text: what the token adds to the text.
            token: its record; None if `plain`.
        """

    def end(self) -> bytes:
        """Render the events between the last token and `[DONE]`."""


class ChunkRenderer:
    """Renders the events of one stream; implements `server.http.reply.streaming.StreamRenderer`."""

    __slots__ = (
        "_chunks",
        "_heads",
        "_held",
        "_holds",
        "_indices",
        "_plain",
        "_tail",
        "_texts",
        "_tokenizer",
    )

    def __init__(
        self, generation: Generation, chunks: ChunkFormat, tokenizer: Tokenizer, texts: TokenTexts
    ) -> None:
        self._chunks = chunks
        self._tokenizer = tokenizer
        self._texts = texts
        self._plain = chunks.plain
        self._indices = {completion: i for i, completion in enumerate(generation.completions)}
        self._heads: dict[Completion, bytes] = {}  # of the choices that have begun
        self._tail = b""
        # Last tokens wait until the texts were checked, since their events report the warnings.
        self._holds = generation.holds_end
        self._held: list[tuple[Completion, int, str, Token | None]] = []

    def token(self, completion: Completion, event: TokenEvent) -> bytes:
        """Append a token to its completion and render its event."""
        head = self._heads.get(completion)
        if head is None:
            return self._begin(completion) + self.token(completion, event)
        context_free = completion.context_free
        if context_free and self._plain and event.finish_reason is None:
            known = self._texts.get(event.token_id)  # type: ignore[arg-type] # None is in no cache
            if known is not None:
                text, encoded = known
                completion.add(text)
                return head + encoded + self._tail
        text = completion.push(event)
        if not self._plain or completion.finish_reason is not None:
            token = None if self._plain else completion.describe(event, text)
            fields = (completion, self._indices[completion], text, token)
            if self._holds and completion.finish_reason is not None:
                self._held.append(fields)
                return b""
            chunk = self._chunks.chunk(*fields)
            return b"" if chunk is None else event_frame(chunk)
        encoded = _encode(text)
        token_id = event.token_id
        assert token_id is not None
        if context_free and completion.context_free and not self._tokenizer.is_special(token_id):
            self._texts[token_id] = (text, encoded)
        return head + encoded + self._tail

    def end(self) -> bytes:
        """Render the end of the stream."""
        self._held.sort(
            key=lambda fields: fields[1]
        )  # the receipt is in the event of the last choice
        held = [self._chunks.chunk(*fields) for fields in self._held]
        events = [event_frame(chunk) for chunk in held if chunk is not None]
        return b"".join(events) + self._chunks.end() + DONE

    def fail(self, error: TesseraError) -> bytes:
        """Render an error and the end of the stream."""
        return event_frame(error_reply(error)) + DONE

    def _begin(self, completion: Completion) -> bytes:
        index = self._indices[completion]
        if not self._plain:
            self._heads[completion] = b""
            return self._chunks.begin(completion, index)
        chunk = self._chunks.chunk(completion, index, _MARK, None)
        assert chunk is not None
        template = event_frame(chunk)
        self._heads[completion], self._tail = template.split(_MARK_JSON)
        return self._chunks.begin(completion, index)


class TokenJSON:
    """Appends tokens to a completion and returns their texts as JSON, for streams of events that have names.

    Args:
        tokenizer: the model's tokenizer.
        texts: cached texts.
    """

    __slots__ = ("_texts", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, texts: TokenTexts) -> None:
        self._tokenizer = tokenizer
        self._texts = texts

    def push(self, completion: Completion, event: TokenEvent) -> bytes:
        """Append a token; return what it adds to the text."""
        context_free = completion.context_free and event.finish_reason is None
        token_id = event.token_id
        if context_free:
            known = self._texts.get(token_id)  # type: ignore[arg-type] # None is in no cache
            if known is not None:
                completion.add(known[0])
                return known[1]
        text = completion.push(event)
        encoded = _encode(text)
        assert token_id is not None
        free = context_free and completion.context_free
        if free and not self._tokenizer.is_special(token_id):
            self._texts[token_id] = (text, encoded)
        return encoded


def event_frame(record: msgspec.Struct) -> bytes:
    """Render one event."""
    return b"data: " + _encode(record) + b"\n\n"
