"""Reads the messages of the Messages API, whose content consists of blocks: they become the messages of a chat."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from server.errors import ValidationError
from server.http.body.validation import describe, quote
from server.http.text.messages import read_message

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from server.http.dialects.anthropic.schema import ConversationFields

_ROLES: Final = ("user", "assistant", "system")
_BLOCKS: Final[Mapping[str, tuple[str, ...]]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
# What tools of Anthropic did in a conversation, much of it encrypted.
_SKIPPED: Final = frozenset(
    {
        "advisor_tool_result", "bash_code_execution_tool_result", "code_execution_tool_result", "compaction",
        "container_upload", "fallback", "mcp_tool_listing", "mcp_tool_result", "mcp_tool_use", "server_tool_use",
        "text_editor_code_execution_tool_result", "tool_search_tool_result", "web_fetch_tool_result",
        "web_search_tool_result",
    }
)  # fmt: skip
_TEXT_SOURCES: Final = {"text": "data", "content": "content"}
# Claude Code's first line, which differs in each request, would keep every prompt from the prefix cache.
_BILLING: Final = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*", re.IGNORECASE)


class Conversation(NamedTuple):
    """The messages of a request.

    Attributes:
        messages: as those of a chat.
        continues: whether the model continues the last message, which is the assistant's.
        warnings: what is not in it, or has no effect.
    """

    messages: list[dict[str, Any]]
    continues: bool
    warnings: tuple[str, ...]


def read_conversation(request: ConversationFields, *, parts: bool) -> Conversation:
    """Return the conversation of a request as messages of a chat, its system prompt first.

    Messages of one role that follow each other are one message. Calls are `tool_calls` of their message, results are
    messages of the role `tool`, and reasoning is the key `reasoning_content`, which some templates read.

    Args:
        request: the body.
        parts: whether content of several texts stays a list, as for `read_messages`.

    Raises:
        ValidationError: a message has no known role, or content that the model cannot read.
    """
    reader = _Reader()
    if request.system is not None:
        reader.add("system", request.system, "system")
    for i, message in enumerate(request.messages):
        field = f"messages.{i}"
        role = message.get("role")
        if role not in _ROLES:
            raise ValidationError(
                f"`{field}.role` must be one of {', '.join(_ROLES)}. Given: {_given(role)}"
            )
        content = message.get("content")
        if content == [] and role != "assistant":
            raise ValidationError(f"`{field}.content` cannot be empty")
        reader.add(role, content, f"{field}.content")
    if _cites(request.messages):
        reader.warnings.append("`citations` has no effect")
    return reader.finish(parts=parts)


class _Reader:
    """Collects messages; their `content` is a list of texts until `finish`.

    Attributes:
        warnings: what has no effect.
    """

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._skipped: set[str] = set()
        self._messages: list[dict[str, Any]] = []
        self._call_ids: set[str] = set()

    def add(self, role: str, content: object, field: str) -> None:
        """Append the content of a message.

        Raises:
            ValidationError: it is not valid.
        """
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        for block, kind, place in _blocks(content, field, _BLOCKS[role], _SKIPPED):
            if kind in _SKIPPED:
                self._skipped.add(kind)
            elif kind == "text":
                text = _text(block, "text", place)
                if role == "system":
                    header = _BILLING.match(text)
                    text = text[header.end() :] if header else text
                    if not text:
                        continue
                self._message(role)["content"].append(text)
            elif kind == "tool_use":
                self._add_call(block, place)
            elif kind == "tool_result":
                self._add_result(block, place)
            elif kind == "thinking":
                message = self._message(role)
                before = message.get("reasoning_content", "")
                message["reasoning_content"] = before + _text(block, "thinking", place)
        if role == "assistant":
            self._message(role)  # a message of the service may be empty

    def finish(self, *, parts: bool) -> Conversation:
        """Return the messages.

        Raises:
            ValidationError: there are none, or the last one calls tools.
        """
        messages = self._messages
        last: dict[str, Any] = messages[-1] if messages else {"role": ""}
        continues = last["role"] == "assistant"
        if continues and "tool_calls" in last:
            raise ValidationError(
                "`messages`: a message of the user with a `tool_result` for each `tool_use` must follow the last one"
            )
        if continues and not any(last["content"]):
            messages.pop()
            continues = False
        if not messages:
            raise ValidationError("`messages` has no text that begins a prompt")
        read = []
        for message in messages:
            content = [{"type": "text", "text": text} for text in message["content"]]
            calls_only = "tool_calls" in message and not content
            message["content"] = None if calls_only else content
            read.append(read_message(message, "messages", parts=parts))
        skipped = [
            f"`messages`: blocks of the type `{kind}` are skipped" for kind in sorted(self._skipped)
        ]
        return Conversation(read, continues, (*skipped, *self.warnings))

    def _message(self, role: str) -> dict[str, Any]:
        """Return the last message, or a new one if that has another role."""
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]

    def _add_call(self, block: Mapping[str, Any], field: str) -> None:
        call_id, name = _text(block, "id", field), _text(block, "name", field)
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            raise ValidationError(
                f"`{field}.input` must be an object. Given: {describe(arguments)}"
            )
        self._call_ids.add(call_id)
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._message("assistant").setdefault("tool_calls", []).append(call)

    def _add_result(self, block: Mapping[str, Any], field: str) -> None:
        call_id = _text(block, "tool_use_id", field)
        if call_id not in self._call_ids:
            raise ValidationError(
                f"`{field}.tool_use_id` must be the `id` of a `tool_use` before it. Given: {quote('', call_id)}"
            )
        failed = block.get("is_error")
        if not isinstance(failed, bool | None):
            raise ValidationError(
                f"`{field}.is_error` must be true or false. Given: {describe(failed)}"
            )
        texts = _result_texts(block.get("content"), f"{field}.content")
        if failed:
            texts = [f"Error: {''.join(texts[:1])}", *texts[1:]]
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": texts})


def _result_texts(content: object, field: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    return [
        _text(block, "text" if kind == "text" else "tool_name", place)
        for block, kind, place in _blocks(content, field, ("text", "tool_reference"))
    ]


def _blocks(
    content: object,
    field: str,
    kinds: Sequence[str],
    others: frozenset[str] = frozenset(),
) -> list[tuple[dict[str, Any], str, str]]:
    """Return the blocks of a content, each with its type and its field; documents of text are text.

    Raises:
        ValidationError: it is not a list, or a block has another type than `kinds` and `others`.
    """
    if not isinstance(content, list):
        raise ValidationError(
            f"`{field}` must be a string or a list of blocks. Given: {describe(content)}"
        )
    found: list[tuple[dict[str, Any], str, str]] = []
    for i, given in enumerate(content):
        place = f"{field}.{i}"
        if not isinstance(given, dict):
            raise ValidationError(f"`{place}` must be an object. Given: {describe(given)}")
        block = _plain(given)
        kind = block.get("type")
        if not isinstance(kind, str) or (kind not in kinds and kind not in others):
            raise ValidationError(
                f"`{place}.type` must be {' or '.join(f'`{k}`' for k in kinds)}: the model reads text only. "
                f"Given: {_given(kind)}"
            )
        found.append((block, kind, place))
    return found


def _plain(block: dict[str, Any]) -> dict[str, Any]:
    """Return a document of text or a search result as a block of text, other blocks as they are."""
    head = [block.get("title"), block.get("context")]
    content = source = block.get("source")
    if block.get("type") == "search_result":
        head, content = [block.get("title"), source], block.get("content")
    elif block.get("type") == "document" and isinstance(source, dict):
        kind = source.get("type")
        key = _TEXT_SOURCES.get(kind) if isinstance(kind, str) else None
        content = source.get(key) if key is not None else None
    else:
        return block
    texts = [{"text": content}] if isinstance(content, str) else content
    if not isinstance(texts, list) or not all(_is_text(text) for text in texts):
        return block
    lines = [*(line for line in head if isinstance(line, str)), *(text["text"] for text in texts)]
    return {"type": "text", "text": "\n".join(lines)}


def _is_text(block: object) -> bool:
    return isinstance(block, dict) and isinstance(block.get("text"), str)


def _cites(blocks: object) -> bool:
    """Return whether a block, or one of its content, asks for citations."""
    if not isinstance(blocks, list):
        return False
    for block in blocks:
        if isinstance(block, dict):
            citations = block.get("citations")
            if isinstance(citations, dict) and citations.get("enabled"):
                return True
            if _cites(block.get("content")):
                return True
    return False


def _text(block: Mapping[str, Any], name: str, field: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ValidationError(f"`{field}.{name}` must be a string. Given: {describe(value)}")
    return value


def _given(value: object) -> str:
    return quote("", value) if isinstance(value, str) else describe(value)
