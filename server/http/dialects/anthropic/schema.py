"""The request bodies of the Messages API: types and fixed ranges, as the OpenAPI document shows them.

`conversation` and `tools` check messages and tools further.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from server.http.body.field_types import MAX_MESSAGES, optional
from server.http.body.sampling_fields import SMALLEST, number
from server.http.dialects.openai.schema import UINT32_MAX, ConstraintFields, SamplingFields

NO_EFFECT: Mapping[str, tuple[object, ...]] = {
    "anthropic_version": ("bedrock-2023-05-31", "vertex-2023-10-16"),
    "container": (),
    "context_management": ({}, {"edits": []}),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "metadata": ({},),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
"""Known fields without effect, never refused, and their values that ask for nothing."""

# Unknown fields were removed, and reported, before.
_BODY = ConfigDict(
    strict=True, extra="ignore", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
)
_TEXT = {"type": "string"}


def _block(kind: str, **properties: object) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["type", *properties],
        "properties": {"type": {"const": kind}, **properties},
    }


_TEXT_BLOCK = _block("text", text=_TEXT)
_TEXTS = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT_BLOCK}]}
_SOURCES = [
    {"properties": {"type": {"const": "text"}, "data": _TEXT}, "required": ["type", "data"]},
    {
        "properties": {"type": {"const": "content"}, "content": _TEXTS},
        "required": ["type", "content"],
    },
]
_DOCUMENTS = [
    _block("document", source={"type": "object", "anyOf": _SOURCES}),
    _block(
        "search_result", source=_TEXT, title=_TEXT, content={"type": "array", "items": _TEXT_BLOCK}
    ),
]
_READ = {"type": "array", "items": {"anyOf": [_TEXT_BLOCK, *_DOCUMENTS]}}
_RESULT = _block("tool_result", tool_use_id=_TEXT)
_RESULT["properties"] |= {"content": {"anyOf": [_TEXT, _READ]}, "is_error": {"type": "boolean"}}
_BLOCKS = {
    "user": [_TEXT_BLOCK, *_DOCUMENTS, _RESULT],
    "assistant": [
        _TEXT_BLOCK,
        _block("tool_use", id=_TEXT, name=_TEXT, input={"type": "object"}),
        _block("thinking", thinking=_TEXT),
        _block("redacted_thinking", data=_TEXT),
    ],
    "system": [_TEXT_BLOCK],
}


def _message(role: str) -> dict[str, Any]:
    least = 0 if role == "assistant" else 1
    blocks = {"type": "array", "minItems": least, "items": {"anyOf": _BLOCKS[role]}}
    return {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"const": role}, "content": {"anyOf": [_TEXT, blocks]}},
    }


_MESSAGES = {"anyOf": [_message(role) for role in _BLOCKS]}
MessageParams = Annotated[
    list[dict[str, Any]],
    Field(min_length=1, max_length=MAX_MESSAGES),
    WithJsonSchema({"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _MESSAGES}),
]
SystemPrompt = Annotated[Any, WithJsonSchema({"anyOf": [*_TEXTS["anyOf"], {"type": "null"}]})]


class ToolChoice(BaseModel):
    """Which tools the model calls."""

    model_config = _BODY

    type: Literal["auto", "any", "tool", "none"] = Field(
        description="Calls or text, calls only, calls of one tool, or text only."
    )
    name: str | None = optional("With `tool`: its name.")
    disable_parallel_tool_use: bool | None = optional("Whether one message has at most one call.")


class ThinkingConfig(BaseModel):
    """Whether the model reasons before it answers."""

    model_config = _BODY

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = optional("Has no effect.")
    display: str | None = optional("Has no effect.")


class OutputFormat(BaseModel):
    """The format of the text."""

    model_config = _BODY

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema", description="The text obeys it.")


class OutputConfig(BaseModel):
    """How the model answers."""

    model_config = _BODY

    format: OutputFormat | None = optional("The format of the text.")
    effort: str | None = optional("Has no effect.")


class Thread(BaseModel):
    """Whether the server keeps the conversation, or continues one that it kept."""

    model_config = _BODY

    type: Literal["create", "continue"] = Field(
        description="`create` has no effect; after `continue`, clients send the whole conversation."
    )
    previous_message_id: str | None = optional("With `continue`: the message that is continued.")


class ConversationFields(BaseModel):
    """What makes the prompt. Null means the default."""

    model_config = _BODY

    model: str | None = optional("A name of the served model, or of Claude; may be left out.")
    messages: MessageParams = Field(
        description="The conversation.", examples=[[{"role": "user", "content": "Hello"}]]
    )
    system: SystemPrompt = optional("Instructions before the conversation: text, or text blocks.")
    tools: list[dict[str, Any]] | None = optional("Tools that the model may call.")
    tool_choice: ToolChoice | None = optional("Which tools the model calls. Default: `auto`.")
    thread: Thread | None = optional("No conversation is kept: one that is continued is not found.")
    thinking: ThinkingConfig | None = optional("Whether the model reasons first.")
    output_config: OutputConfig | None = optional("How the model answers.")
    output_format: OutputFormat | None = optional("Older name of `output_config.format`.")
    cache_control: dict[str, Any] | None = optional(
        "Accepted: prompts are cached by their prefixes in any case."
    )


class CountTokensBody(ConversationFields):
    """A conversation whose tokens are counted."""


class MessagesBody(SamplingFields, ConstraintFields, ConversationFields):
    """A conversation, which the model continues."""

    max_tokens: Annotated[int, Field(ge=0, le=UINT32_MAX)] = Field(
        description="Maximum number of tokens to generate; at most what fits is generated."
    )
    temperature: Annotated[
        float | None, number("temperature", f"{SMALLEST}. Default: 1", le=1.0)
    ] = None
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True)] | None
    ) = optional("Strings that end the text; they are cut off.")
