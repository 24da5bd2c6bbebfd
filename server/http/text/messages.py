"""Checks the messages of a conversation, brings them into one form, and tokenizes them.

What the service sent is accepted: messages with nulls, without text, with calls that were cut off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from server.errors import ValidationError
from server.http.body.validation import describe, quote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.http.context import AppContext

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ANSWER = frozenset({"tool_calls", "function_call", "reasoning", "refusal"})
# The Responses API names the parts of a message by their direction.
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def read_messages(
    messages: Sequence[dict[str, Any]],
    field: str = "messages",
    *,
    any_role: bool = False,
    parts: bool = False,
) -> list[dict[str, Any]]:
    """Return messages in the form that `model.text.tools.conversation` takes.

    Content is text, or a list of parts; null stays only beside calls of tools. `tool_calls` are there only if there are
    calls. Results have the role `tool`. No other key is null.

    Args:
        messages: JSON objects. Keys other than `role` and `content` are kept for the chat template.
        field: the request's field that holds them, for error messages.
        any_role: whether roles other than `ROLES` are left to the chat template.
        parts: whether content of several parts stays a list; otherwise the parts are joined by line ends.

    Raises:
        ValidationError: a message has no known role, content other than text, or calls that are no objects.
    """
    return [
        read_message(message, f"{field}.{i}", any_role=any_role, parts=parts)
        for i, message in enumerate(messages)
    ]


def read_message(
    message: dict[str, Any], field: str, *, any_role: bool = False, parts: bool = False
) -> dict[str, Any]:
    """Return one message as `read_messages` does.

    Raises:
        ValidationError: see `read_messages`.
    """
    role = message.get("role")
    if role is None:
        raise ValidationError(f"`{field}.role` is required")
    if not any_role and role not in ROLES:
        given = quote("", role) if isinstance(role, str) else describe(role)
        raise ValidationError(f"`{field}.role` must be one of {', '.join(ROLES)}. Given: {given}")
    read = {key: value for key, value in message.items() if value is not None}
    if role == "function":
        # The older form of a result, which names its function instead of the call and may be null.
        read["role"] = "tool"
        read.setdefault("content", "")
        if "name" in read:
            read.setdefault("tool_call_id", read["name"])
    if not _ANSWER.isdisjoint(read):
        _read_answer(read, field)
    content = read.get("content")
    if content is None and role != "assistant":
        raise ValidationError(f"`{field}.content` is required")
    if content is None:
        read["content"] = None if "tool_calls" in read else ""
    elif parts and isinstance(content, list) and len(content) > 1:
        texts = _read_parts(content, f"{field}.content")
        read["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        read["content"] = read_content(content, f"{field}.content")
    return read


def _read_answer(message: dict[str, Any], field: str) -> None:
    """Bring the keys that only messages of the assistant have into one form.

    Raises:
        ValidationError: the calls are not a list of objects.
    """
    thoughts = message.get("reasoning")
    if isinstance(thoughts, str):
        message.setdefault("reasoning_content", thoughts)
    if refusal := message.pop("refusal", None):
        content = message.get("content") or []
        before = [content] if isinstance(content, str) else content
        if isinstance(before, list):
            message["content"] = [*before, {"type": "refusal", "refusal": refusal}]
    older = message.pop("function_call", None)
    calls = message.pop("tool_calls", None) or []
    if not isinstance(calls, list):
        raise ValidationError(f"`{field}.tool_calls` must be a list. Given: {describe(calls)}")
    read = [_read_call(call, f"{field}.tool_calls.{i}") for i, call in enumerate(calls)]
    if isinstance(older, dict):
        read.append({"id": older.get("name"), "type": "function", "function": older})
    if read:
        message["tool_calls"] = read


def _read_call(call: object, field: str) -> dict[str, Any]:
    """Return a call with a `type`, without nulls."""
    if not isinstance(call, dict):
        raise ValidationError(f"`{field}` must be an object. Given: {describe(call)}")
    read = {key: value for key, value in call.items() if value is not None}
    custom = read.pop("custom", None)
    if isinstance(custom, dict) and "function" not in read:
        # A call whose argument is a text.
        arguments = {"input": custom.get("input")}
        read["function"] = {"name": custom.get("name"), "arguments": arguments}
    return read | {"type": "function"}


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
    return "\n".join(_read_parts(content, field))


def offered_tools(
    tools: list[dict[str, Any]] | None, choice: object
) -> list[dict[str, Any]] | None:
    """Return the definitions of tools that the chat template gets.

    Args:
        tools: of the request.
        choice: its `tool_choice`.
    """
    return None if choice == "none" or not tools else tools


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


def _read_parts(content: list[object], field: str) -> list[str]:
    return [_read_part(part, f"{field}.{i}") for i, part in enumerate(content)]


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
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise ValidationError(f"`{field}.text` must be a string. Given: {describe(text)}")
    return text
