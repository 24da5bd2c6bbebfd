"""The events of TGI's streams: one frame per token; the last frame also has the whole text.

Frames are byte templates, in which only the changing parts are encoded. Building and serializing an object for every
token of every stream takes several times as long. The part that depends only on a token's id and text is cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec
from msgspec import UNSET

from server.http.dialects.tgi.replies import (
    FINISH_REASONS,
    LOWEST_LOGPROB,
    ErrorReply,
    StreamDetails,
    is_json_logprob,
    render_token,
    render_top_tokens,
)

if TYPE_CHECKING:
    from model.text.tokenizer import Tokenizer
    from server.engine.core.request import TokenEvent
    from server.errors import TesseraError
    from server.http.dialects.tgi.limits import GenerateOptions
    from server.http.reply.completion import Completion, Token
    from server.http.reply.generation import Generation

TokenHeads: TypeAlias = dict[int, tuple[str, bytes]]
"""Token id -> text and beginning of the frame. Contains only tokens that add the same text in every context."""

_encode = msgspec.json.Encoder().encode
_HEAD = b'{"id":%d,"text":%b,"logprob":'
_FRAME = b'data:{"index":%d,"token":%b%.9g,"special":%b},"generated_text":null,"details":null}\n\n'
_ORDINARY_FRAME = _FRAME.replace(b'"special":%b', b'"special":false')
_BOOL = (b"false", b"true")
_FULL_FRAME = b'data:{"index":%d,"token":%b%b,"generated_text":%b,"details":%b%b}\n\n'


class TokenRenderer:
    """Renders the events of one stream; implements `server.http.reply.streaming.StreamRenderer`."""

    __slots__ = ("_generation", "_heads", "_last", "_options", "_tokenizer", "_wants_top_tokens")

    def __init__(
        self,
        generation: Generation,
        options: GenerateOptions,
        tokenizer: Tokenizer,
        heads: TokenHeads,
    ) -> None:
        self._generation = generation
        self._options = options
        self._tokenizer = tokenizer
        self._wants_top_tokens = options.sampling.top_logprobs > 0
        self._heads = {} if self._wants_top_tokens else heads
        self._last: tuple[Completion, Token] | None = None

    def token(self, completion: Completion, event: TokenEvent) -> bytes:
        """Append a token to its completion and render its frame."""
        context_free = completion.context_free
        if context_free and event.finish_reason is None:
            known, logprob = self._heads.get(event.token_id), event.logprob  # type: ignore[arg-type]
            if known is not None and logprob is not None and logprob > LOWEST_LOGPROB:
                text, head = known
                return _ORDINARY_FRAME % (completion.add(text), head, logprob)
        text = completion.push(event)
        if (
            completion.finish_reason is not None
            or self._wants_top_tokens
            or not is_json_logprob(event.logprob)
        ):
            token = completion.describe(event, text)
            holds = self._options.details or self._generation.holds_end
            if completion.finish_reason is not None and holds:
                self._last = completion, token  # its details or warnings are not complete yet
                return b""
            return self._full_frame(completion, token)
        token_id = event.token_id
        assert token_id is not None
        if special := self._tokenizer.is_special(token_id):
            text = self._tokenizer.token_text(token_id)
        head = _HEAD % (token_id, _encode(text))
        if context_free and completion.context_free and not special:
            self._heads[token_id] = (text, head)
        return _FRAME % (completion.num_tokens, head, event.logprob, _BOOL[special])

    def end(self) -> bytes:
        """Render the last token's frame if it has details, which include what the request used."""
        return b"" if self._last is None else self._full_frame(*self._last)

    def fail(self, error: TesseraError) -> bytes:
        """Render an error as the last frame of the stream."""
        return b"data:%b\n\n" % _encode(ErrorReply(error.message, error.error_type))

    def _full_frame(self, completion: Completion, token: Token) -> bytes:
        generated_text = details = None
        extra = b""
        if completion.finish_reason is not None:
            generated_text = self._options.full_text(completion.text)
            if found := (*self._options.warnings, *self._generation.warnings):
                extra = b',"warnings":' + _encode(found)
            if (receipt := self._generation.receipt) is not UNSET:
                extra += b',"receipt":' + _encode(receipt)
            if self._options.details:
                details = StreamDetails(
                    finish_reason=FINISH_REASONS[completion.finish_reason],
                    generated_tokens=completion.num_tokens,
                    seed=self._options.seed,
                    input_length=self._generation.prompt_tokens,
                    usage=self._generation.usage(),
                )
        top_tokens = render_top_tokens(token, self._tokenizer)
        return _FULL_FRAME % (
            completion.num_tokens,
            _encode(render_token(token, self._tokenizer)),
            b',"top_tokens":' + _encode(top_tokens) if top_tokens else b"",
            _encode(generated_text),
            _encode(details),
            extra,
        )
