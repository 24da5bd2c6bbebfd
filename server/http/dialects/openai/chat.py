"""Requests to /v1/chat/completions: reads the conversation, submits it, and renders reply and stream."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from server.errors import ValidationError
from server.http.body.limits import longest_prompt
from server.http.dialects.openai.fields import parse_body
from server.http.dialects.openai.frames import ChunkRenderer, TokenTexts, event_frame
from server.http.dialects.openai.logprobs import chat_logprobs, generated
from server.http.dialects.openai.options import Logprobs, Options, OutputLimit, check, submit
from server.http.dialects.openai.replies import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    Usage,
)
from server.http.dialects.openai.reply_format import ReplyFormat
from server.http.dialects.openai.schema import ChatBody
from server.http.dialects.openai.tools import (
    CallRenderer,
    ToolUse,
    read_tools,
    whole_message,
    with_tools,
)
from server.http.text.messages import encode_conversation, read_messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model.text.tokenizer import Tokenizer
    from server.engine.core.messages import EngineInfo
    from server.http.context import AppContext
    from server.http.reply.completion import Completion, Token
    from server.http.reply.generation import Generation, Timings
    from server.http.reply.streaming import StreamRenderer
    from server.http.responses import Headers
    from server.http.text.structured_output import StructuredOutput
    from server.receipts.record import Receipt

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
    _nested_tools = True
    _tool_fields: list[str] | None = None
    _longest_tool_name = 64
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
        if request.top_logprobs and not request.logprobs:
            raise ValidationError("`top_logprobs` requires `logprobs` to be true")
        if request.continue_final_message and request.add_generation_prompt:
            raise ValidationError(
                "`continue_final_message` and `add_generation_prompt` exclude each other"
            )
        self._has_functions = not (request.functions is None and request.function_call is None)
        if self._has_functions:
            request = with_tools(request)
            self._nested_tools = False
            self._tool_fields = [f"functions.{i}" for i in range(len(request.functions or ()))]
        self.streaming = bool(request.stream)
        self._context = context
        self._info = info
        self._texts = texts
        self._request = request
        self._messages = messages
        self._tools = tools = read_tools(
            request,
            context,
            nested=self._nested_tools,
            fields=self._tool_fields,
            longest_name=self._longest_tool_name,
            constraint=constraint,
        )
        self.warnings = warnings if tools is None else (*warnings, *tools.warnings)
        self._options = check(
            request,
            logprobs=Logprobs(reported=bool(request.logprobs), top=request.top_logprobs or 0),
            constraint=constraint if tools is None else tools.constraint,
            config=context.config,
            info=info,
        )
        if tools is not None:
            # Parts of a call may be special tokens; the grammar allows no others.
            self._options = dataclasses.replace(self._options, skip_special_tokens=False)
        self.num_sequences = self._options.completions
        context.admission.check_sequences("n", self.num_sequences, info)

    @classmethod
    def of_body(
        cls, context: AppContext, info: EngineInfo, body: object, texts: TokenTexts
    ) -> ChatAnswer:
        """Make the answer from the decoded JSON of a request.

        Raises:
            ValidationError: the body is not valid.
            UnknownModelError: it names a model that is not served.
        """
        request, warnings = parse_body(ChatBody, body, context)
        messages = read_messages(request.messages, parts=context.reads_parts)
        return cls(context, info, request, messages, texts, warnings)

    async def generate(self) -> Generation:
        """Render the conversation with the chat template, tokenize it and submit it.

        Raises:
            ValidationError: the model has no chat template, or the conversation is too long.
            UnavailableError: the engine is not ready.
        """
        if self._tools is not None:
            await self._tools.check(self._context)
        token_ids = await self.prompt()
        limit = self._output_limit()
        options = await self._with_prediction()
        return await submit(self._context, self._info, options, [token_ids], limit)

    async def _with_prediction(self) -> Options:
        """Return the options with the tokens of the predicted answer, if the body has one."""
        prediction = self._request.prediction
        if prediction is None or not (text := prediction.text):
            return self._options
        token_ids = await self._context.encode(
            text,
            "prediction.content",
            add_special_tokens=False,
            most=self._info.max_total_tokens,
        )
        # A hint: what no answer of the model can be is left out.
        unknown = (i for i, it in enumerate(token_ids) if it >= self._info.vocab_size)
        kept = token_ids[: min(self._info.max_total_tokens, next(unknown, len(token_ids)))]
        request = self._options.request._replace(prediction=kept)
        return dataclasses.replace(self._options, request=request)

    async def prompt(self) -> list[int]:
        """Render the conversation with the chat template and tokenize it.

        Raises:
            ValidationError: the model has no chat template, or the conversation is too long.
        """
        tools = None if self._tools is None else self._tools.definitions
        return await self._encode(self._messages, tools)

    async def _encode(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> list[int]:
        request = self._request
        return await encode_conversation(
            self._context,
            messages,
            tools=tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=request.chat_template_kwargs,
            most=self._most_tokens(),
        )

    def _most_tokens(self) -> int | None:
        """Return the most tokens of a prompt that is tokenized at all; None for any number."""
        return longest_prompt(self._info, self._options.truncate)

    def headers(self, generation: Generation, timings: Timings | None) -> Headers:  # noqa: ARG002 - of the protocol
        """Return no headers."""
        return []

    def reply(self, generation: Generation) -> bytes:
        """Render the messages."""
        return _encode(self._format(generation).reply())

    def renderer(self, generation: Generation) -> StreamRenderer:
        """Make the renderer of the stream's events."""
        chunks = self._format(generation)
        return ChunkRenderer(generation, chunks, self._context.tokenizer, self._texts)

    def _output_limit(self) -> OutputLimit:
        request = self._request
        older = request.max_completion_tokens is None and request.max_tokens is not None
        return OutputLimit(
            wanted=request.max_tokens if older else request.max_completion_tokens,
            default=None,
            prompt_field=self._prompt_field,
            field=self._limit_fields[older],
        )

    def _format(self, generation: Generation) -> _ChatFormat:
        last = self._messages[-1]
        echoed = ""
        if self._request.echo and last["role"] == _ASSISTANT:
            content: Any = last["content"] or ""
            is_text = isinstance(content, str)
            echoed = content if is_text else "".join(part["text"] for part in content)
        fields = (generation, self._options, self._context.tokenizer, self.warnings, echoed)
        if self._tools is None:
            return _ChatFormat(*fields)
        return (_FunctionFormat if self._has_functions else _ToolFormat)(*fields, self._tools)


class _ChatFormat(ReplyFormat):
    """Builds the reply or the events of one request; implements `server.http.dialects.openai.frames.ChunkFormat`.

    Args:
        generation: the request's completions.
        options: the request's options.
        tokenizer: the model's tokenizer.
        warnings: fields without effect.
        echoed: text before that of each message.
    """

    _no_text: str | None = ""

    def __init__(
        self,
        generation: Generation,
        options: Options,
        tokenizer: Tokenizer,
        warnings: tuple[str, ...],
        echoed: str,
    ) -> None:
        super().__init__(generation, options, tokenizer, "chatcmpl-", warnings)
        self._echoed = echoed

    def reply(self) -> ChatReply:
        """Build the whole reply."""
        return ChatReply(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.options.model,
            system_fingerprint=self.options.fingerprint,
            choices=[
                self._choice(completion, index)
                for index, completion in enumerate(self.generation.returned)
            ],
            usage=self.usage(),
            prompt_token_ids=self._prompt_token_ids(),
            warnings=self.warnings,
            receipt=self.generation.receipt,
        )

    def begin(self, completion: Completion, index: int) -> bytes:
        """Render the event with the role."""
        del completion
        delta = ChatDelta(role=_ASSISTANT, content=self._echoed or self._no_text)
        choice = ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
        return event_frame(self._chunk([choice], self.event_usage(), UNSET, begins=True))

    def chunk(
        self, completion: Completion, index: int, text: str, token: Token | None
    ) -> ChatChunk | None:
        """Build the event of a token; see `ChunkFormat`."""
        tokens = () if token is None else (token,)
        ended = completion.finish_reason is not None
        choice = ChatChunkChoice(
            index=index,
            delta=self._delta(completion, text),
            logprobs=self._logprobs(tokens),
            finish_reason=self.finish_reason(completion),
            stop_reason=completion.stop_reason if ended else UNSET,
            token_ids=[token.id for token in tokens] if self.options.token_ids else UNSET,
        )
        return self._chunk(
            [choice],
            self.event_usage(),
            self.event_warnings(completion),
            self.event_receipt(completion),
        )

    def end(self) -> bytes:
        """Render the event with the usage, if requested."""
        if not self.options.usage_event:
            return b""
        return event_frame(self._chunk([], self.usage(), self.warnings, self.generation.receipt))

    def _delta(self, completion: Completion, text: str) -> ChatDelta:
        """Build what a token's text adds to the message."""
        del completion
        return ChatDelta(content=text)

    def _message(self, completion: Completion) -> ChatMessage:
        """Build the whole message."""
        return ChatMessage(role=_ASSISTANT, content=self._echoed + completion.text)

    def _choice(self, completion: Completion, index: int) -> ChatChoice:
        message = self._message(completion)
        reason = self.finish_reason(completion)
        assert reason is not None
        return ChatChoice(
            index=index,
            message=message,
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
        receipt: Receipt | UnsetType = UNSET,
        *,
        begins: bool = False,
    ) -> ChatChunk:
        return ChatChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.options.model,
            system_fingerprint=self.options.fingerprint,
            choices=choices,
            usage=usage,
            prompt_token_ids=self._prompt_token_ids() if begins else UNSET,
            warnings=warnings,
            receipt=receipt,
        )

    def _logprobs(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        if not self.options.logprobs.reported:
            return None
        return ChatLogprobs(chat_logprobs(generated(tokens), self.names))

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        if not self.options.token_ids:
            return UNSET
        return self.generation.completions[0].prompt.token_ids


class _ToolFormat(_ChatFormat):
    """As `_ChatFormat`, for messages that may call tools.

    Args:
        tools: that may be called; the others are those of `_ChatFormat`.
    """

    _no_text = None

    def __init__(
        self,
        generation: Generation,
        options: Options,
        tokenizer: Tokenizer,
        warnings: tuple[str, ...],
        echoed: str,
        tools: ToolUse,
    ) -> None:
        super().__init__(generation, options, tokenizer, warnings, echoed)
        self.plain = False  # the text of an event depends on those before it
        self._calls = {c: CallRenderer(tools) for c in generation.completions}
        self._reports_tokens = (
            options.logprobs.reported or options.token_ids or options.running_usage
        )

    def finish_reason(self, completion: Completion) -> str | None:
        """Return why a completion ended: `tool_calls` if it ended by itself, and its last call is complete."""
        reason = super().finish_reason(completion)
        return "tool_calls" if reason == "stop" and self._calls[completion].complete else reason

    def chunk(
        self, completion: Completion, index: int, text: str, token: Token | None
    ) -> ChatChunk | None:
        """Build the event of a token; None if it would report nothing."""
        chunk = super().chunk(completion, index, text, token)
        if chunk is None or self._reports_tokens or completion.finish_reason is not None:
            return chunk
        return None if chunk.choices[0].delta == ChatDelta() else chunk

    def _delta(self, completion: Completion, text: str) -> ChatDelta:
        content, deltas = self._calls[completion].push(completion, text)
        return ChatDelta(content=content or UNSET, tool_calls=deltas or UNSET)

    def _message(self, completion: Completion) -> ChatMessage:
        content, calls = whole_message(self._calls[completion], completion)
        content = self._echoed + (content or "") if self._echoed else content
        return ChatMessage(role=_ASSISTANT, content=content, tool_calls=calls or UNSET)


class _FunctionFormat(_ToolFormat):
    """As `_ToolFormat`, for a request with `functions`: the call is the message's `function_call`."""

    def finish_reason(self, completion: Completion) -> str | None:
        """Return why a completion ended."""
        reason = super().finish_reason(completion)
        return "function_call" if reason == "tool_calls" else reason

    def _delta(self, completion: Completion, text: str) -> ChatDelta:
        delta = super()._delta(completion, text)
        if delta.tool_calls is UNSET:
            return delta
        calls = [call.function for call in delta.tool_calls]
        name = next((call.name for call in calls if call.name is not UNSET), UNSET)
        call = CalledFunction(name=name, arguments="".join(call.arguments for call in calls))
        return msgspec.structs.replace(delta, tool_calls=UNSET, function_call=call)

    def _message(self, completion: Completion) -> ChatMessage:
        message = super()._message(completion)
        if message.tool_calls is UNSET:
            return message
        call = message.tool_calls[0].function
        return msgspec.structs.replace(message, tool_calls=UNSET, function_call=call)
