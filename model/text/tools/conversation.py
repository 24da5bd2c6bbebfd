"""Writes tools, calls and results as plain messages, for chat templates that know nothing of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from model.text.tools.formats import ToolFormat


def as_plain_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], format_: ToolFormat
) -> list[dict[str, Any]]:
    """Return a conversation without tools that says the same.

    The definitions are in a system message, which the conversation's own system message continues. Calls are a part of
    the content of their message, in the format; results are messages of the user.

    Args:
        messages: of the conversation, with text as content.
        tools: definitions of tools, as in the OpenAI API; may be empty.
        format_: of the calls.
    """
    plain = [_plain(message, format_) for message in messages]
    if not tools:
        return plain
    text = _introduction(tools, format_)
    if plain and plain[0]["role"] in ("system", "developer"):
        plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}
    else:
        plain.insert(0, {"role": "system", "content": text})
    return plain


def _introduction(tools: Sequence[Mapping[str, Any]], format_: ToolFormat) -> str:
    definitions = "\n".join(_dump(tool) for tool in tools)
    example = _write_call(format_, "NAME", {"KEY": "VALUE"})
    call = f"{format_.marker}{format_.opening}{example}{format_.closing}"
    return (
        f"You can call these functions:\n{definitions}\nTo call a function, reply with\n{call}\n"
        "with its name and arguments in the places of NAME, KEY and VALUE."
    )


def _plain(message: Mapping[str, Any], format_: ToolFormat) -> dict[str, Any]:
    role, content = message["role"], message.get("content") or ""
    if role in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    plain = {**message, "content": content}
    calls = plain.pop("tool_calls", None)
    texts = [
        _write_call(format_, call["function"]["name"], call["function"]["arguments"])
        for call in calls or ()
    ]
    if texts:
        begin = f"{format_.marker}{format_.opening}"
        plain["content"] += begin + format_.separator.join(texts) + format_.closing
    return plain


def _write_call(format_: ToolFormat, name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as a model writes it, without what begins and ends the calls of a message."""
    if format_.arguments == "json":
        text = _dump(arguments)
    else:
        text = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else _dump(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
    return f"{format_.head_of(name)}{text}{format_.tail}"


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
