"""Reads the input of /v1/responses: items of a conversation, which become the messages of a chat."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from server.errors import ValidationError
from server.http.body.validation import describe, quote
from server.http.dialects.openai.responses_api.tools import INPUT, qualified
from server.http.text.messages import read_content, read_message

if TYPE_CHECKING:
    from collections.abc import Mapping

    from server.http.dialects.openai.schema import ResponseBody

_MESSAGE, _CALL, _RESULT = "message", "function_call", "function_call_output"

# Calls of tools other than functions: the name that the model sees, and the field with the arguments.
_OTHER_CALLS: Final = {
    "apply_patch_call": ("apply_patch", "operation"),
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
}
_RESULTS: Final = (
    _RESULT, "apply_patch_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output",
)  # fmt: skip
_REFERENCE: Final = "item_reference"
_SKIPPED: Final = frozenset(
    {
        _REFERENCE, "additional_tools", "code_interpreter_call", "compaction", "compaction_trigger", "computer_call",
        "computer_call_output", "configuration_update", "file_search_call", "image_generation_call",
        "mcp_approval_request", "mcp_approval_response", "mcp_list_tools", "program", "program_output", "reasoning",
        "tool_search_call", "tool_search_output", "web_search_call",
    }
)  # fmt: skip


class Conversation(NamedTuple):
    """The conversation of a request.

    Attributes:
        messages: of a chat, the instructions first.
        warnings: which items are not in it.
    """

    messages: list[dict[str, Any]]
    warnings: tuple[str, ...]


def read_input(request: ResponseBody, *, parts: bool = False) -> Conversation:
    """Return the conversation of a request.

    Calls are `tool_calls` of the assistant's message before them, or of one of their own; results are messages of the
    role `tool`.

    Args:
        request: the body.
        parts: as for `server.http.text.messages.read_messages`.

    Raises:
        ValidationError: the input is neither a text nor a list of items, or an item is not valid.
    """
    value, instructions = request.input, request.instructions
    if value in ("", []):
        raise ValidationError("`input` cannot be empty")
    if isinstance(value, str):
        items = [{"role": "user", "content": value}]
    elif isinstance(value, list) and all(isinstance(item, dict) for item in value):
        items = value
    else:
        raise ValidationError(
            f"`input` must be a string or a list of messages. Given: {describe(value)}"
        )
    reader = _Reader(parts=parts)
    if isinstance(instructions, str):
        instructions = [{"role": "system", "content": instructions}] if instructions else []
    for i, item in enumerate(instructions or ()):
        reader.add(item, f"instructions.{i}")
    for i, item in enumerate(items):
        reader.add(item, f"input.{i}")
    skipped = sorted(reader.skipped)
    if not reader.messages:
        raise ValidationError(
            f"`input.0.type`: there must be an item that is not skipped. Given: {quote('', skipped[0])}"
        )
    warnings = tuple(f"`input`: items of the type `{kind}` are skipped" for kind in skipped)
    return Conversation(reader.messages, warnings)


class _Reader:
    """Appends items to a conversation.

    Attributes:
        messages: the conversation.
        skipped: types of the items that are not in it.
    """

    def __init__(self, *, parts: bool) -> None:
        self.messages: list[dict[str, Any]] = []
        self._parts = parts
        self.skipped: set[str] = set()
        self._call_ids: set[str] = set()

    def add(self, item: Mapping[str, Any], field: str) -> None:
        """Append an item.

        Raises:
            ValidationError: it is not valid.
        """
        kind = item.get("type")
        if kind is None:
            kind = _REFERENCE if item.keys() <= {"id", "type"} else _MESSAGE
        if not isinstance(kind, str):
            raise _unknown_type(describe(kind), field)
        if kind == _MESSAGE:
            message = {key: item[key] for key in ("role", "content") if key in item}
            self.messages.append(read_message(message, field, parts=self._parts))
        elif kind == _CALL:
            self._add_call(item, _seen_name(item, field), _arguments(item, field), field)
        elif kind == "custom_tool_call":
            text = {INPUT: _text(item, "input", field)}
            self._add_call(item, _seen_name(item, field), text, field)
        elif kind == "mcp_call":
            self._add_remote_call(item, field)
        elif kind in _OTHER_CALLS:
            name, key = _OTHER_CALLS[kind]
            action = item.get(key)
            if not isinstance(action, dict):
                raise ValidationError(
                    f"`{field}.{key}` must be an object. Given: {describe(action)}"
                )
            self._add_call(item, name, action, field)
        elif kind in _RESULTS:
            self._add_result(item, field)
        elif kind in _SKIPPED:
            self.skipped.add(kind)
        else:
            raise _unknown_type(quote("", kind), field)

    def _add_call(
        self, item: Mapping[str, Any], name: str, arguments: dict[str, Any] | str, field: str
    ) -> str:
        call_id = _call_id(item, field)
        self._call_ids.add(call_id)
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant":
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        last.setdefault("tool_calls", []).append(call)
        return call_id

    def _add_remote_call(self, item: Mapping[str, Any], field: str) -> None:
        """Append a call of a tool of an MCP server, whose result is in the item itself."""
        name = _text(item, "name", field)
        call_id = self._add_call(item, name, _arguments(item, field), field)
        result = item.get("output") or item.get("error") or ""
        self._append_result(call_id, _as_text(result))

    def _add_result(self, item: Mapping[str, Any], field: str) -> None:
        call_id = _call_id(item, field)
        # The call of a result may be an item that only the provider has.
        if call_id not in self._call_ids and _REFERENCE not in self.skipped:
            raise ValidationError(
                f"`{field}.call_id` must be that of a `{_CALL}` before it in `input`: nothing is stored between "
                f"requests. Given: {quote('', call_id)}"
            )
        output = item.get("output")
        kind = item["type"]
        if kind == "apply_patch_call_output":
            output = output or item.get("status")
        elif kind == "shell_call_output":
            output = _as_text(output)
        self._append_result(call_id, read_content(output, f"{field}.output"))

    def _append_result(self, call_id: str, content: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


def _unknown_type(given: str, field: str) -> ValidationError:
    return ValidationError(
        f"`{field}.type` must be `{_MESSAGE}`, `{_CALL}`, `{_RESULT}` or another type of the OpenAI API. "
        f"Given: {given}"
    )


def _call_id(item: Mapping[str, Any], field: str) -> str:
    # The result of a local shell has the id of the call itself.
    key = "call_id" if item.get("call_id") is not None or item.get("id") is None else "id"
    return _text(item, key, field)


def _seen_name(item: Mapping[str, Any], field: str) -> str:
    return qualified(_text(item, "name", field), item.get("namespace"))


def _arguments(item: Mapping[str, Any], field: str) -> str:
    """Return the arguments of a call; those of a call that was cut off are incomplete, or missing."""
    return "" if item.get("arguments") is None else _text(item, "arguments", field)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _text(item: Mapping[str, Any], name: str, field: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ValidationError(f"`{field}.{name}` must be a string. Given: {describe(value)}")
    return value
