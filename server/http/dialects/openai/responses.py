"""Requests to /v1/responses: conversations as for chat, with a reply and typed events. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from server.engine.core.request import FinishReason
from server.errors import ValidationError
from server.http.dialects.openai.chat import ChatAnswer
from server.http.dialects.openai.errors import error_reply
from server.http.dialects.openai.fields import parse_body
from server.http.dialects.openai.logprobs import TokenNames, chat_logprobs, generated
from server.http.dialects.openai.messages import read_messages
from server.http.dialects.openai.replies import (
    IncompleteDetails,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ResponseEvent,
    ResponseReply,
    ResponseUsage,
    usage_of,
)
from server.http.dialects.openai.schema import ChatBody, ResponseBody, SamplingFields
from server.http.structured_output import StructuredOutput
from server.http.validation import describe, unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model.text.tokenizer import Tokenizer
    from server.engine.core.messages import EngineInfo
    from server.engine.core.request import TokenEvent
    from server.errors import TesseraError
    from server.http.completion import Completion, Token
    from server.http.context import AppContext
    from server.http.dialects.openai.frames import TokenTexts
    from server.http.dialects.openai.options import Options
    from server.http.dialects.openai.replies import TokenLogprob
    from server.http.generation import Generation
    from server.http.streaming import StreamRenderer

_encode = msgspec.json.Encoder().encode
_DELTA = b"response.output_text.delta"


class ResponseAnswer(ChatAnswer):
    """One request to /v1/responses; implements `server.http.exchange.Answer`.

    Args:
        context: the application's context.
        info: reported by the running engine.
        body: the decoded JSON.
        texts: cached texts, for streams.

    Raises:
        ValidationError: the body is not valid.
        UnknownModelError: it names a model that is not served.
    """

    _prompt_field = "input"
    _limit_fields = ("max_output_tokens", "max_output_tokens")

    def __init__(
        self, context: AppContext, info: EngineInfo, body: object, texts: TokenTexts
    ) -> None:
        request, warnings = parse_body(ResponseBody, body, context.config)
        _check_tools(request)
        wants_logprobs = bool(request.include) or bool(request.top_logprobs)
        shared = {name: getattr(request, name) for name in SamplingFields.model_fields}
        messages = _read_input(request)
        chat = ChatBody.model_construct(
            **shared,
            messages=messages,
            max_completion_tokens=request.max_output_tokens,
            logprobs=wants_logprobs,
            top_logprobs=request.top_logprobs,
        )
        super().__init__(
            context, info, chat, messages, texts, warnings, constraint=_read_format(request)
        )
        self._body = request

    def reply(self, generation: Generation) -> bytes:
        """Render the response."""
        reply = _ResponseFormat(generation, self._options, self._body, self._context.tokenizer)
        return _encode(reply.finished(generation.returned[0].tokens, self.warnings))

    def renderer(self, generation: Generation) -> StreamRenderer:
        """Make the renderer of the stream's events."""
        tokenizer = self._context.tokenizer
        reply = _ResponseFormat(generation, self._options, self._body, tokenizer)
        return _EventRenderer(reply, self._texts, tokenizer, self.warnings)


class _ResponseFormat:
    """Builds the records of one response.

    Args:
        generation: the request's completion.
        options: the request's options.
        body: the request.
        tokenizer: the model's tokenizer.

    Attributes:
        item_id: id of the output message.
        reports_logprobs: whether log-probabilities are reported.
    """

    def __init__(
        self, generation: Generation, options: Options, body: ResponseBody, tokenizer: Tokenizer
    ) -> None:
        self.item_id = f"msg_{uuid.uuid4().hex}"
        self.reports_logprobs = options.logprobs.reported
        self._generation = generation
        self._names = TokenNames(tokenizer, as_ids=False)
        self._completion = generation.completions[0]
        format_ = None if body.text is None else body.text.format
        self._begun = ResponseReply(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            status="in_progress",
            incomplete_details=None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=options.model,
            output=[],
            temperature=options.sampling.temperature,
            text={
                "format": {"type": "text"}
                if format_ is None
                else format_.model_dump(by_alias=True, exclude_none=True)
            },
            top_p=options.sampling.top_p,
            usage=None,
        )

    def begun(self) -> ResponseReply:
        """Build the response before its first token."""
        return self._begun

    def finished(self, tokens: Sequence[Token], warnings: tuple[str, ...]) -> ResponseReply:
        """Build the response after its last token."""
        completion, usage = self._completion, usage_of(self._generation)
        full = completion.finish_reason is FinishReason.LENGTH
        return msgspec.structs.replace(
            self._begun,
            status=self._status(),
            incomplete_details=IncompleteDetails("max_output_tokens") if full else None,
            output=[self.message(self._status(), [self.part(completion.text, tokens)])],
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=usage.prompt_tokens_details,
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputTokensDetails(),
                total_tokens=usage.total_tokens,
                tessera=usage.tessera,
            ),
            warnings=warnings or UNSET,
        )

    def message(self, status: str, content: list[OutputText]) -> OutputMessage:
        """Build the output message."""
        return OutputMessage(id=self.item_id, status=status, content=content)

    def part(self, text: str, tokens: Sequence[Token]) -> OutputText:
        """Build the content of the output message."""
        return OutputText(text=text, logprobs=self.logprobs(tokens))

    def logprobs(self, tokens: Sequence[Token]) -> list[TokenLogprob]:
        """Build the log-probabilities of tokens; empty if not requested."""
        return chat_logprobs(generated(tokens), self._names) if self.reports_logprobs else []

    def _status(self) -> str:
        full = self._completion.finish_reason is FinishReason.LENGTH
        return "incomplete" if full else "completed"


class _EventRenderer:
    """Renders the events of one stream; implements `server.http.streaming.StreamRenderer`.

    Args:
        reply: builds the records.
        texts: cached texts, shared by all streams of an application.
        tokenizer: the model's tokenizer.
        warnings: fields without effect.
    """

    def __init__(
        self,
        reply: _ResponseFormat,
        texts: TokenTexts,
        tokenizer: Tokenizer,
        warnings: tuple[str, ...],
    ) -> None:
        self._reply = reply
        self._texts = texts
        self._tokenizer = tokenizer
        self._warnings = warnings
        self._sequence = 0
        self._tokens: list[Token] = []
        self._completion: Completion | None = None
        self._plain = not reply.reports_logprobs
        # The same as `_event` for this type, without building a record for every token: the parts before the sequence
        # number, before the text, and after the text.
        self._head = b'event: %b\ndata: {"type":"%b","sequence_number":' % (_DELTA, _DELTA)
        self._middle = (
            b',"item_id":"%b","output_index":0,"content_index":0,"delta":' % reply.item_id.encode()
        )
        self._tail = b',"logprobs":[]}\n\n'

    def token(self, completion: Completion, event: TokenEvent) -> bytes:
        """Append a token to its completion and render its event."""
        if self._completion is None:
            self._completion = completion
            return self._begin() + self.token(completion, event)
        context_free = completion.context_free
        if context_free and self._plain and event.finish_reason is None:
            known = self._texts.get(event.token_id)  # type: ignore[arg-type] # None is in no cache
            if known is not None:
                completion.add(known[0])
                return self._frame(known[1], self._tail)
        text = completion.push(event)
        encoded = _encode(text)
        if self._plain:
            token_id = event.token_id
            assert token_id is not None
            free = context_free and completion.context_free and event.finish_reason is None
            if free and not self._tokenizer.is_special(token_id):
                self._texts[token_id] = (text, encoded)
            return self._frame(encoded, self._tail)
        token = completion.describe(event, text)
        self._tokens.append(token)
        logprobs = _encode(self._reply.logprobs([token]))
        return self._frame(encoded, b',"logprobs":%b}\n\n' % logprobs)

    def end(self) -> bytes:
        """Render the events after the last token."""
        assert self._completion is not None
        reply, tokens = self._reply, self._tokens
        response = reply.finished(tokens, self._warnings)
        (item,) = response.output
        (part,) = item.content
        place = {"item_id": reply.item_id, "output_index": 0, "content_index": 0}
        return b"".join(
            [
                self._event(
                    "response.output_text.done", **place, text=part.text, logprobs=part.logprobs
                ),
                self._event("response.content_part.done", **place, part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{response.status}", response=response),
            ]
        )

    def fail(self, error: TesseraError) -> bytes:
        """Render an error as the last event."""
        details = error_reply(error).error
        return self._event("error", code=details.type, message=details.message, param=details.param)

    def _begin(self) -> bytes:
        reply = self._reply
        place = {"item_id": reply.item_id, "output_index": 0, "content_index": 0}
        item = reply.message("in_progress", [])
        return b"".join(
            [
                self._event("response.created", response=reply.begun()),
                self._event("response.in_progress", response=reply.begun()),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **place, part=reply.part("", ())),
            ]
        )

    def _frame(self, text: bytes, tail: bytes) -> bytes:
        number = self._sequence
        self._sequence = number + 1
        return self._head + b"%d" % number + self._middle + text + tail

    def _event(self, kind: str, **fields: Any) -> bytes:  # noqa: ANN401 - of the event
        record = ResponseEvent(type=kind, sequence_number=self._sequence, **fields)
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(record))


def _read_input(request: ResponseBody) -> list[dict[str, Any]]:
    """Return the conversation of a request, its instructions first.

    Raises:
        ValidationError: the input is neither a text nor a list of messages.
    """
    value = request.input
    if isinstance(value, str):
        if not value:
            raise ValidationError("`input` cannot be empty")
        items = [{"role": "user", "content": value}]
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        items = value
    else:
        raise ValidationError(
            f"`input` must be a string or a list of messages. Given: {describe(value)}"
        )
    for i, item in enumerate(items):
        if item.get("type", "message") != "message":
            raise ValidationError(f"`input.{i}.type` must be `message`: the model reads text only")
    messages: list[dict[str, Any]] = [
        {key: item[key] for key in ("role", "content") if key in item}
        for item in read_messages(items, "input")
    ]
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    return messages


def _read_format(request: ResponseBody) -> StructuredOutput | None:
    """Return the constraint that a request's `text.format` states; None if the text is free.

    Raises:
        ValidationError: the schema is missing.
    """
    wanted = None if request.text is None else request.text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return StructuredOutput("json_object", None, "text.format")
    if wanted.json_schema is None:
        raise ValidationError("`text.format.schema` is required")
    return StructuredOutput("json_schema", wanted.json_schema, "text.format.schema")


def _check_tools(request: ResponseBody) -> None:
    """Check that a request offers no tools and requires no call of one.

    Raises:
        ValidationError: it does.
    """
    if request.tools:
        raise ValidationError(unsupported("tools", request.tools))
    if request.tool_choice not in (None, "none", "auto"):
        given = describe(request.tool_choice)
        raise ValidationError(f"`tool_choice` must be none or auto without `tools`. Given: {given}")
