"""`POST /chat_tokenize`: a conversation as the model's chat template renders it, and its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from model.text.chat_template import RenderedChat
from server.http.body.field_types import MessageList, optional
from server.http.body.validation import parse
from server.http.dialects.tgi.replies import PromptSpan
from server.http.text.messages import offered_tools, read_messages
from server.http.token_replies import TokenReply, array_pieces, slices, text_pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model.text.tokenizer import TokenSpans
    from server.http.context import AppContext

_STRICT = ConfigDict(
    strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
)
_NO_EFFECT = "Of a chat completion; no effect on the prompt."


class ChatTokenizeBody(BaseModel):
    """A chat completion's body, as TGI's clients send it. What does not change the prompt is accepted and not used."""

    model_config = _STRICT

    messages: MessageList = Field(
        description="The conversation: objects with `role` and `content`, as in the OpenAI API.",
        examples=[[{"role": "user", "content": "Add two numbers."}]],
    )
    tools: list[dict[str, Any]] | None = optional("Definitions of tools, as in the OpenAI API.")
    tool_choice: str | dict[str, Any] | None = optional("`none` leaves `tools` out of the prompt.")
    guideline: str | None = optional("The variable `guideline` of the template.")
    chat_template_kwargs: dict[str, Any] | None = optional(
        "Further variables for the template; not in TGI."
    )
    add_generation_prompt: bool | None = optional(
        "Whether to end with the beginning of the assistant's message; default: true. Not in TGI."
    )
    continue_final_message: bool | None = optional(
        "Whether to leave the last message open; not in TGI."
    )
    tool_prompt: None = optional("Not supported: null.")
    model: Any = optional(_NO_EFFECT)
    frequency_penalty: Any = optional(_NO_EFFECT)
    logit_bias: Any = optional(_NO_EFFECT)
    logprobs: Any = optional(_NO_EFFECT)
    max_tokens: Any = optional(_NO_EFFECT)
    n: Any = optional(_NO_EFFECT)
    presence_penalty: Any = optional(_NO_EFFECT)
    response_format: Any = optional(_NO_EFFECT)
    seed: Any = optional(_NO_EFFECT)
    stop: Any = optional(_NO_EFFECT)
    stream: Any = optional(_NO_EFFECT)
    stream_options: Any = optional(_NO_EFFECT)
    temperature: Any = optional(_NO_EFFECT)
    top_logprobs: Any = optional(_NO_EFFECT)
    top_p: Any = optional(_NO_EFFECT)


class ChatTokenizeReply(msgspec.Struct, frozen=True):
    """The tokens of a rendered conversation, and its text."""

    tokenize_response: list[PromptSpan]
    templated_text: str


async def tokenize_chat(context: AppContext, value: object) -> TokenReply:
    """Read a request's conversation, render it and tokenize it.

    Raises:
        ValidationError: the body is not valid, or the chat template rejects the conversation.
    """
    body = parse(ChatTokenizeBody, value)
    variables = dict(body.chat_template_kwargs or {})
    if body.guideline is not None:
        variables["guideline"] = body.guideline
    text, spans = await context.convert_chat(
        RenderedChat.encode_with_offsets,
        read_messages(body.messages, any_role=True, parts=context.reads_parts),
        tools=offered_tools(body.tools, body.tool_choice),
        add_generation_prompt=(
            not body.continue_final_message
            if body.add_generation_prompt is None
            else body.add_generation_prompt
        ),
        continue_final_message=bool(body.continue_final_message),
        variables=variables,
    )
    return TokenReply(_pieces(text, spans), held_bytes(spans) + len(text))


def span_pieces(spans: TokenSpans) -> Iterator[bytes]:
    """Render tokens and their characters as a list of `PromptSpan`."""
    return array_pieces(
        spans, lambda some: [PromptSpan(span.id, span.text, span.start, span.stop) for span in some]
    )


def held_bytes(spans: TokenSpans) -> int:
    """Return the memory that tokens and their offsets take."""
    return 12 * len(spans)


def _pieces(text: str, spans: TokenSpans) -> Iterator[bytes]:
    """Render a `ChatTokenizeReply`."""
    yield b'{"tokenize_response":'
    yield from span_pieces(spans)
    yield b',"templated_text":'
    yield from text_pieces(slices(text))
    yield b"}"
