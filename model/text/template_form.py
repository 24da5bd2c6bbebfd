"""Finds out what a chat template does with roles, tools and calls, by rendering small conversations with it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

Messages: TypeAlias = Sequence[dict[str, Any]]

_WORDS: Final = ("Zebra", "Yak", "Walrus", "Vole", "Uakari", "Tapir")
_TOOL_WORD: Final = "quagga"
_KEY_WORD: Final = "narwhal"
_VALUE_WORDS: Final = ("Ocelot", "Puma")
_IDS: Final = ("a1b2c3d4e", "f6a7b8c9d")  # the templates of Mistral require nine letters and digits
PROBE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": _TOOL_WORD,
        "description": _TOOL_WORD,
        "parameters": {
            "type": "object",
            "properties": {_KEY_WORD: {"type": "string", "description": _KEY_WORD}},
            "required": [_KEY_WORD],
        },
    },
}
"""The definition of a tool whose calls are tried."""


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateForm:
    """What a chat template writes. One that does not write what the user says gets everything as it is.

    Attributes:
        system: a system message that is the first one, before a message of the user.
        system_before: roles of a last message with which that is written too; `system` if it is the only message.
        later_system: any number of system messages, anywhere.
        developer: messages of the role `developer`, anywhere.
        repeats: consecutive messages of one role.
        definitions: definitions of tools, or anything else that depends on them.
        calls: calls of tools.
        results: the results of calls, in messages of the role `tool`.
        several_calls: all calls of a message.
        text_and_calls: the text of a message with calls.
        null_content: messages with calls whose content is null.
        object_arguments: arguments that are an object, not the text of one.
        text_arguments: arguments that are a text, as this text.
    """

    system: bool = True
    system_before: frozenset[str] = frozenset({"system", "user", "assistant", "tool"})
    later_system: bool = True
    developer: bool = True
    repeats: bool = True
    definitions: bool = False
    calls: bool = False
    results: bool = False
    several_calls: bool = True
    text_and_calls: bool = True
    null_content: bool = True
    object_arguments: bool = True
    text_arguments: bool = True


def find_form(
    render: Callable[[Messages], str], plain: Callable[[Messages], str] | None = None
) -> TemplateForm:
    """Return the form of a template.

    Args:
        render: returns what the template makes of messages; empty if it rejects them.
        plain: the same without tools, if `render` gives some to the template.
    """
    user, assistant = _say("user", 0), _say("assistant", 1)
    alone = render([user])
    definitions = plain is not None and alone not in ("", plain([user]))
    if _WORDS[0] not in alone:
        return TemplateForm(definitions=definitions, calls=True, results=True)
    form = _with_calls(TemplateForm(definitions=definitions), render, alone)
    system = _say("system", 4)
    call = _call(0, as_object=form.object_arguments)
    calling = _calling(call, content=None if form.null_content else "")
    last = {
        "system": [system],
        "user": [system, user],
        "assistant": [system, user, assistant],
        "tool": [system, user, calling, _result(0)],
    }
    system_before = frozenset(role for role, some in last.items() if _WORDS[4] in render(some))

    def writes(*messages: dict[str, Any]) -> bool:
        text = render(messages)
        return all(message["content"] in text for message in messages)

    def writes_anywhere(role: str) -> bool:
        first, second, third = (_say(role, number) for number in (2, 3, 4))
        return writes(first, second, user, assistant, third, _say("user", 5))

    return dataclasses.replace(
        form,
        system="user" in system_before,
        system_before=system_before,
        later_system=writes_anywhere("system"),
        developer=writes_anywhere("developer"),
        repeats=writes(user, _say("user", 2), assistant, _say("assistant", 3), _say("user", 4)),
    )


def _with_calls(form: TemplateForm, render: Callable[[Messages], str], alone: str) -> TemplateForm:
    """Return a form with the facts about calls."""
    user, last = _say("user", 0), _say("user", 5)
    results = [_result(number) for number in range(2)]

    def writes(words: Sequence[str], calling: dict[str, Any], *results: dict[str, Any]) -> bool:
        text = render([user, calling, *results, last])
        return all(text.count(word) > alone.count(word) for word in words)

    for as_object, content in ((True, None), (True, ""), (False, None), (False, "")):
        call, other = (_call(number, as_object=as_object) for number in range(2))
        calling = _calling(call, content=content)
        if not writes([_TOOL_WORD, _KEY_WORD, _VALUE_WORDS[0]], calling, results[0]):
            continue
        if content is None and writes(["None"], calling, results[0]):
            continue
        cut_off = _call(0, as_object=False)
        text = cut_off["function"]["arguments"] = cut_off["function"]["arguments"][:-2]
        return dataclasses.replace(
            form,
            calls=True,
            results=writes([results[0]["content"]], calling, results[0]),
            several_calls=writes(_VALUE_WORDS, _calling(call, other, content=content), *results),
            text_and_calls=writes(
                [_VALUE_WORDS[0], _WORDS[1]], _calling(call, content=_WORDS[1]), results[0]
            ),
            null_content=content is None,
            object_arguments=as_object,
            text_arguments=writes([text], _calling(cut_off, content=content), results[0]),
        )
    return form


def _say(role: str, number: int) -> dict[str, Any]:
    return {"role": role, "content": _WORDS[number]}


def _calling(*calls: dict[str, Any], content: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def _call(number: int, *, as_object: bool) -> dict[str, Any]:
    arguments = {_KEY_WORD: _VALUE_WORDS[number]}
    function = {
        "name": _TOOL_WORD,
        "arguments": arguments if as_object else json.dumps(arguments),
    }
    return {"id": _IDS[number], "type": "function", "function": function}


def _result(number: int) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": _IDS[number],
        "name": _TOOL_WORD,
        "content": _WORDS[2 + number],
    }
