"""Reads the input of /v1/responses: items of a conversation, which become the messages of a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from server.errors import ValidationError
from server.http.body.validation import describe, quote
from server.http.text.messages import read_content, read_message

if TYPE_CHECKING:
    from collections.abc import Mapping

    from server.http.dialects.openai.schema import ResponseBody

_MESSAGE, _CALL, _RESULT = "message", "function_call", "function_call_output"


def read_input(request: ResponseBody, *, parts: bool = False) -> list[dict[str, Any]]:
    """Return the conversation of a request as messages of a chat, its instructions first.

    Calls are `tool_calls` of the assistant's message before them, or of one of their own; results are messages of the
    role `tool`.

    Args:
        request: the body.
        parts: as for `server.http.text.messages.read_messages`.

    Raises:
        ValidationError: the input is neither a text nor a list of messages, calls and results.
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
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    reader = _Reader(messages, parts=parts)
    for i, item in enumerate(items):
        reader.add(item, f"input.{i}")
    return messages


class _Reader:
    """Appends items to a conversation."""

    def __init__(self, messages: list[dict[str, Any]], *, parts: bool) -> None:
        self._messages = messages
        self._parts = parts
        self._call_ids: set[str] = set()

    def add(self, item: Mapping[str, Any], field: str) -> None:
        """Append an item.

        Raises:
            ValidationError: it is not valid.
        """
        kind = _MESSAGE if item.get("type") is None else item["type"]
        if kind == _MESSAGE:
            message = {key: item[key] for key in ("role", "content") if key in item}
            self._messages.append(read_message(message, field, parts=self._parts))
        elif kind == _CALL:
            self._add_call(item, field)
        elif kind == _RESULT:
            self._add_result(item, field)
        else:
            given = quote("", kind) if isinstance(kind, str) else describe(kind)
            raise ValidationError(
                f"`{field}.type` must be `{_MESSAGE}`, `{_CALL}` or `{_RESULT}`. Given: {given}"
            )

    def _add_call(self, item: Mapping[str, Any], field: str) -> None:
        call_id, name = _text(item, "call_id", field), _text(item, "name", field)
        # A call that was cut off has a part of its arguments, or none.
        arguments = "" if item.get("arguments") is None else _text(item, "arguments", field)
        self._call_ids.add(call_id)
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "assistant":
            last = {"role": "assistant", "content": None}
            self._messages.append(last)
        last.setdefault("tool_calls", []).append(call)

    def _add_result(self, item: Mapping[str, Any], field: str) -> None:
        call_id = _text(item, "call_id", field)
        if call_id not in self._call_ids:
            raise ValidationError(
                f"`{field}.call_id` must be that of a `{_CALL}` before it in `input`: nothing is stored between "
                f"requests. Given: {quote('', call_id)}"
            )
        content = read_content(item.get("output"), f"{field}.output")
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


def _text(item: Mapping[str, Any], name: str, field: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ValidationError(f"`{field}.{name}` must be a string. Given: {describe(value)}")
    return value
