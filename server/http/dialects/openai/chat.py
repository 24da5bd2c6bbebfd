"""Requests to /v1/chat/completions: reads the conversation, submits it, and renders reply and stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from server.errors import ValidationError
from server.http.dialects.openai.fields import parse_body
from server.http.dialects.openai.frames import ChunkRenderer, event_frame
from server.http.dialects.openai.logprobs import chat_logprobs, generated
from server.http.dialects.openai.messages import encode_conversation, read_messages
from server.http.dialects.openai.options import (
    Logprobs,
    OutputLimit,
    check,
    check_sequences,
    submit,
)
from server.http.dialects.openai.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
)
from server.http.dialects.openai.reply_format import ReplyFormat
from server.http.dialects.openai.schema import ChatBody
from server.http.validation import describe, unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.engine.core.messages import EngineInfo
    from server.http.completion import Completion, Token
    from server.http.context import AppContext
    from server.http.dialects.openai.frames import TokenTexts
    from server.http.dialects.openai.replies import Usage
    from server.http.generation import Generation, Timings
    from server.http.responses import Headers
    from server.http.streaming import StreamRenderer
    from server.http.structured_output import StructuredOutput

_ASSISTANT = "assistant"
_encode = msgspec.json.Encoder().encode


class ChatAnswer:
    """One request to /v1/chat/completions; implements `server.http.exchange.Answer`.

    Args:
        context: the application's context.
        info: reported by the running engine.
        request: the body.
        messages: its checked messages.
        texts: cached texts, for streams.
        warnings: fields without effect.
        constraint: on the text; None for the one that the body states.

    Raises:
        ValidationError: the body is not valid.
    """

    _prompt_field = "messages"
    _limit_fields = ("max_completion_tokens", "max_tokens")

    operation = "chat"

    def __init__(
        self,
        context: AppContext,
        info: EngineInfo,
        request: ChatBody,
        messages: list[dict[str, Any]],
        texts: TokenTexts,
        warnings: tuple[str, ...],
        constraint: StructuredOutput | None = None,
    ) -> None:
        _check_tools(request)
        if request.top_logprobs and not request.logprobs:
            raise ValidationError("`top_logprobs` requires `logprobs` to be true")
        if request.continue_final_message and request.add_generation_prompt:
            raise ValidationError(
                "`continue_final_message` and `add_generation_prompt` exclude each other"
            )
        self.warnings = warnings
        self.streaming = bool(request.stream)
        self._context = context
        self._info = info
        self._texts = texts
        self._request = request
        self._messages = messages
        self._options = check(
            request,
            logprobs=Logprobs(reported=bool(request.logprobs), top=request.top_logprobs or 0),
            constraint=constraint,
            config=context.config,
            info=info,
        )
        self.num_sequences = self._options.completions
        check_sequences("n", self.num_sequences, context, info)

    @classmethod
    def of_body(
        cls, context: AppContext, info: EngineInfo, body: object, texts: TokenTexts
    ) -> ChatAnswer:
        """Make the answer from the decoded JSON of a request.

        Raises:
            ValidationError: the body is not valid.
            UnknownModelError: it names a model that is not served.
        """
        request, warnings = parse_body(ChatBody, body, context.config)
        return cls(context, info, request, read_messages(request.messages), texts, warnings)

    async def generate(self) -> Generation:
        """Render the conversation with the chat template, tokenize it and submit it.

        Raises:
            ValidationError: the model has no chat template, or the conversation is too long.
            UnavailableError: the engine is not ready.
        """
        request = self._request
        token_ids = await encode_conversation(
            self._context,
            self._messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=request.chat_template_kwargs,
        )
        older = request.max_completion_tokens is None and request.max_tokens is not None
        limit = OutputLimit(
            wanted=request.max_tokens if older else request.max_completion_tokens,
            default=None,
            prompt_field=self._prompt_field,
            field=self._limit_fields[older],
        )
        return await submit(self._context, self._info, self._options, [token_ids], limit)

    def headers(self, generation: Generation, timings: Timings | None) -> Headers:  # noqa: ARG002
        """Return no headers."""
        return []

    def reply(self, generation: Generation) -> bytes:
        """Render the messages."""
        return _encode(self._format(generation).reply())

    def renderer(self, generation: Generation) -> StreamRenderer:
        """Make the renderer of the stream's events."""
        chunks = self._format(generation)
        return ChunkRenderer(generation, chunks, self._context.tokenizer, self._texts)

    def _format(self, generation: Generation) -> _ChatFormat:
        tokenizer = self._context.tokenizer
        return _ChatFormat(generation, self._options, tokenizer, "chatcmpl-", self.warnings)


class _ChatFormat(ReplyFormat):
    """Builds the reply or the events of one request; implements `server.http.dialects.openai.frames.ChunkFormat`."""

    def reply(self) -> ChatReply:
        """Build the whole reply."""
        return ChatReply(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.options.model,
            choices=[
                self._choice(completion, index)
                for index, completion in enumerate(self.generation.returned)
            ],
            usage=self.usage(),
            prompt_token_ids=self._prompt_token_ids(),
            warnings=self.warnings,
        )

    def begin(self, completion: Completion, index: int) -> bytes:
        """Render the event with the role."""
        del completion
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(role=_ASSISTANT, content=""),
            logprobs=None,
            finish_reason=None,
        )
        return event_frame(self._chunk([choice], self.event_usage(), UNSET, begins=True))

    def chunk(
        self, completion: Completion, index: int, text: str, token: Token | None
    ) -> ChatChunk:
        """Build the event of a token; see `ChunkFormat`."""
        tokens = () if token is None else (token,)
        ended = completion.finish_reason is not None
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=text),
            logprobs=self._logprobs(tokens),
            finish_reason=self.finish_reason(completion),
            stop_reason=completion.stop_reason if ended else UNSET,
            token_ids=[token.id for token in tokens] if self.options.token_ids else UNSET,
        )
        return self._chunk([choice], self.event_usage(), self.event_warnings(completion))

    def end(self) -> bytes:
        """Render the event with the usage, if requested."""
        if not self.options.usage_event:
            return b""
        return event_frame(self._chunk([], self.usage(), self.warnings))

    def _choice(self, completion: Completion, index: int) -> ChatChoice:
        reason = self.finish_reason(completion)
        assert reason is not None
        return ChatChoice(
            index=index,
            message=ChatMessage(role=_ASSISTANT, content=completion.text),
            logprobs=self._logprobs(completion.tokens),
            finish_reason=reason,
            stop_reason=completion.stop_reason,
            token_ids=[t.id for t in completion.tokens] if self.options.token_ids else UNSET,
        )

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        warnings: tuple[str, ...] | UnsetType,
        *,
        begins: bool = False,
    ) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.options.model,
            choices=choices,
            usage=usage,
            prompt_token_ids=self._prompt_token_ids() if begins else UNSET,
            warnings=warnings,
        )

    def _logprobs(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        if not self.options.logprobs.reported:
            return None
        return ChatLogprobs(chat_logprobs(generated(tokens), self.names))

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        if not self.options.token_ids:
            return UNSET
        return self.generation.completions[0].prompt.token_ids


def _check_tools(request: ChatBody) -> None:
    """Check that a request offers no tools and requires no call of one.

    Raises:
        ValidationError: it does.
    """
    if request.tools:
        raise ValidationError(unsupported("tools", request.tools))
    if request.tool_choice not in (None, "none", "auto"):
        given = describe(request.tool_choice)
        raise ValidationError(f"`tool_choice` must be none or auto without `tools`. Given: {given}")
