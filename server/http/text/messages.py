"""Checks the messages of a conversation, reduces their content to text, and tokenizes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from server.errors import ValidationError
from server.http.body.validation import describe, quote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.http.context import AppContext

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# The Responses API names the parts of a message by their direction.
_TEXT_PARTS = ("text", "input_text", "output_text")


def read_messages(
    messages: Sequence[dict[str, Any]], field: str = "messages", *, any_role: bool = False
) -> list[dict[str, Any]]:
    """Return messages whose `content` is text; null stays only beside calls of tools.

    Args:
        messages: JSON objects. Keys other than `role` and `content` are kept for the chat template.
        field: the request's field that holds them, for error messages.
        any_role: whether roles other than `ROLES` are left to the chat template.

    Raises:
        ValidationError: a message has no known role, or content other than text.
    """
    return [
        read_message(message, f"{field}.{i}", any_role=any_role)
        for i, message in enumerate(messages)
    ]


def read_message(message: dict[str, Any], field: str, *, any_role: bool = False) -> dict[str, Any]:
    """Return one message as `read_messages` does.

    Raises:
        ValidationError: it has no known role, or content other than text.
    """
    role = message.get("role")
    if role is None:
        raise ValidationError(f"`{field}.role` is required")
    if not any_role and role not in ROLES:
        given = quote("", role) if isinstance(role, str) else describe(role)
        raise ValidationError(f"`{field}.role` must be one of {', '.join(ROLES)}. Given: {given}")
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise ValidationError(f"`{field}.content` is required")
        return message | {"content": None if message.get("tool_calls") else ""}
    return message | {"content": read_content(content, f"{field}.content")}


def read_content(content: object, field: str) -> str:
    """Return the text of a content, which is a string or a list of parts.

    Args:
        content: a JSON value.
        field: the request's field that holds it, for error messages.

    Raises:
        ValidationError: it is neither, or a part is not text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValidationError(
            f"`{field}` must be a string or a list of parts. Given: {describe(content)}"
        )
    return "\n".join([_read_part(part, f"{field}.{i}") for i, part in enumerate(content)])


async def encode_conversation(
    context: AppContext,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    variables: dict[str, Any] | None,
    most: int | None = None,
) -> list[int]:
    """Render checked messages with the chat template and tokenize them.

    Args:
        context: the application's context.
        messages: from `read_messages`.
        tools: definitions of tools, for the template.
        add_generation_prompt: None means true, unless the final message is continued.
        continue_final_message: None means false.
        variables: further variables for the template.
        most: limit of tokens, as for `AppContext.encode`.

    Raises:
        ValidationError: the model has no chat template, or the template rejects the messages.
    """
    continues = bool(continue_final_message)
    if add_generation_prompt is None:
        add_generation_prompt = not continues
    options: dict[str, Any] = {"tools": tools} if tools else {}
    return await context.encode_chat(
        messages,
        **options,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continues,
        variables=variables,
        most=most,
    )


def _read_part(part: object, field: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise ValidationError(f"`{field}` must be an object. Given: {describe(part)}")
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        given = quote("", kind) if isinstance(kind, str) else describe(kind)
        raise ValidationError(
            f"`{field}.type` must be `text`: the model reads text only. Given: {given}"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise ValidationError(f"`{field}.text` must be a string. Given: {describe(text)}")
    return text
