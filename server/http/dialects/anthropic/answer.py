"""Requests to /v1/messages: conversations as for chat, with a reply and typed events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from server.errors import UnknownThreadError, ValidationError
from server.http.body.limits import check_stop_strings
from server.http.config import served_names
from server.http.dialects.anthropic.blocks import ContentBlocks
from server.http.dialects.anthropic.conversation import read_conversation
from server.http.dialects.anthropic.message import MessageFormat
from server.http.dialects.anthropic.replies import ContentBlock, TextBlock
from server.http.dialects.anthropic.schema import NO_EFFECT, CountTokensBody, MessagesBody
from server.http.dialects.anthropic.stream import BlockEvents, TextEvents
from server.http.dialects.anthropic.tools import chat_tools
from server.http.dialects.openai.chat import ChatAnswer
from server.http.dialects.openai.constraints import find_constraint
from server.http.dialects.openai.fields import parse_body
from server.http.dialects.openai.frames import TokenJSON
from server.http.dialects.openai.options import OutputLimit
from server.http.dialects.openai.schema import ChatBody, SamplingFields
from server.http.request_id import current_request
from server.http.token_replies import TokenReply

if TYPE_CHECKING:
    from server.engine.core.messages import EngineInfo
    from server.http.config import HTTPConfig
    from server.http.context import AppContext
    from server.http.dialects.anthropic.schema import ConversationFields
    from server.http.dialects.openai.frames import TokenTexts
    from server.http.reply.generation import Generation
    from server.http.reply.streaming import StreamRenderer

# Claude Code and other programs name models of Claude, whatever the server has.
_MODEL_PREFIXES = ("claude-",)
_encode = msgspec.json.Encoder().encode


class MessagesAnswer(ChatAnswer):
    """One request to /v1/messages; implements `server.http.exchange.Answer`.

    Args:
        context: the application's context.
        info: reported by the running engine.
        request: the body.
        texts: cached texts, for streams.
        warnings: fields without effect.

    Raises:
        ValidationError: the body is not valid.
        UnknownThreadError: it continues a conversation by the identifier of a message.
    """

    _nested_tools = False
    _longest_tool_name = 128

    def __init__(
        self,
        context: AppContext,
        info: EngineInfo,
        request: MessagesBody,
        texts: TokenTexts,
        warnings: tuple[str, ...],
    ) -> None:
        # Clients that continue a thread keep the conversation, and send all of it where no thread is found.
        if request.thread is not None and request.thread.type == "continue":
            raise UnknownThreadError(
                "`thread`: this server keeps no conversation; send all messages, with `create`"
            )
        check_stop_strings(request.stop_sequences or (), context.config, "stop_sequences")
        conversation = read_conversation(request, parts=context.reads_parts)
        tools = chat_tools(request)
        constraint = find_constraint(request)
        if constraint is not None and conversation.continues:
            raise ValidationError(
                f"`{constraint.field}` and a last message of the assistant exclude each other"
            )
        shared = {name: getattr(request, name) for name in SamplingFields.model_fields}
        shared["stop"] = [*(request.stop or ()), *(request.stop_sequences or ())]
        chat = ChatBody.model_construct(
            **shared,
            messages=conversation.messages,
            continue_final_message=conversation.continues,
            chat_template_kwargs=_variables(context),
            tools=tools.definitions,
            tool_choice=tools.choice,
            parallel_tool_calls=tools.parallel,
        )
        self._tool_fields = tools.fields
        warnings += _warnings(request, context.config) + conversation.warnings + tools.warnings
        super().__init__(
            context, info, chat, conversation.messages, texts, warnings, constraint=constraint
        )
        self._max_tokens = request.max_tokens
        self._eager = tools.eager

    def reply(self, generation: Generation) -> bytes:
        """Render the message."""
        message = self._message(generation)
        completion = generation.returned[0]
        text = completion.text
        if message.is_empty:
            return _encode(message.finished([]))
        if self._tools is None:
            content: list[ContentBlock] = [TextBlock(text)] if text else []
            return _encode(message.finished(content))
        blocks = ContentBlocks(self._tools, self._eager)
        blocks.push(completion, text)
        return _encode(message.finished(blocks.finished, blocks.num_calls))

    def renderer(self, generation: Generation) -> StreamRenderer:
        """Make the renderer of the stream's events."""
        message = self._message(generation)
        if self._tools is None or message.is_empty:
            texts = TokenJSON(self._context.tokenizer, self._texts)
            return TextEvents(message, texts)
        return BlockEvents(message, ContentBlocks(self._tools, self._eager))

    def _output_limit(self) -> OutputLimit:
        # As in the API, a message may fill the context before it has all of `max_tokens`.
        return OutputLimit(
            wanted=None,
            default=max(1, self._max_tokens),
            prompt_field=self._prompt_field,
            field="max_tokens",
        )

    def _message(self, generation: Generation) -> MessageFormat:
        return MessageFormat(generation, self._options.model, self._max_tokens, self.warnings)


class _CountedMessages(MessagesAnswer):
    """A request whose prompt is counted, and may have any number of tokens."""

    def _most_tokens(self) -> None:
        return None


def read_messages_request(
    context: AppContext, info: EngineInfo, body: object, texts: TokenTexts
) -> MessagesAnswer:
    """Make the answer from the decoded JSON of a request.

    Raises:
        ValidationError: the body is not valid.
        UnknownModelError: it names a model that is neither served nor Claude.
        UnknownThreadError: it continues a conversation by the identifier of a message.
    """
    request, warnings = parse_body(
        MessagesBody, body, context, no_effect=NO_EFFECT, model_prefixes=_MODEL_PREFIXES
    )
    return MessagesAnswer(context, info, request, texts, warnings)


async def count_tokens(context: AppContext, body: object) -> TokenReply:
    """Count the tokens of the prompt that a request to /v1/messages would have.

    Raises:
        ValidationError: the body is not valid, or the chat template rejects the conversation.
        UnknownModelError: it names a model that is neither served nor Claude.
        UnknownThreadError: it continues a conversation by the identifier of a message.
        UnavailableError: the engine is not ready.
    """
    request, warnings = parse_body(
        CountTokensBody, body, context, no_effect=NO_EFFECT, model_prefixes=_MODEL_PREFIXES
    )
    whole = MessagesBody.model_construct(**dict(request), max_tokens=1)
    answer = _CountedMessages(context, context.engine_info(), whole, {}, warnings)
    count = len(await answer.prompt())
    return TokenReply(iter([b'{"input_tokens":%d}' % count]), warnings=answer.warnings)


def _variables(context: AppContext) -> dict[str, bool] | None:
    """Return variables of the chat template: the model does not reason, since clients would show it as the answer."""
    template = context.chat_template
    reasons = template is not None and any("enable_thinking" in s for s in template.sources)
    return {"enable_thinking": False} if reasons else None


def _warnings(request: ConversationFields, config: HTTPConfig) -> tuple[str, ...]:
    warnings = []
    name, names = request.model or "", served_names(config)
    is_chosen = name in names or current_request().adapter_name is not None
    if name.startswith(_MODEL_PREFIXES) and not is_chosen:
        warnings.append(f"`model` has no effect: the model is `{names[0]}`")
    if request.thread is not None:
        warnings.append("`thread` has no effect")
    if request.thinking is not None and request.thinking.type != "disabled":
        warnings.append("`thinking` has no effect")
    if request.output_config is not None and request.output_config.effort is not None:
        warnings.append("`output_config.effort` has no effect")
    return tuple(warnings)
