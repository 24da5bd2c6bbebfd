"""Fits a conversation to a chat template: what the template does not write is said in a way that it does.

Tools, calls and results become text of plain messages; system messages are joined, or become a part of the user's first
message; consecutive messages of one role are joined.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from model.errors import ChatTemplateError
from model.text.template_form import TemplateForm
from model.text.tools.arguments import complete_arguments, read_arguments
from model.text.tools.formats import ToolFormat

Message: TypeAlias = dict[str, Any]

_SEPARATOR: Final = "\n\n"
_OF_SYSTEM: Final = ("system", "developer")


def fit_conversation(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    forms: tuple[TemplateForm, TemplateForm],
    format_: ToolFormat,
) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]] | None]:
    """Return messages and definitions of tools that say the same, in a form that a template writes in full.

    Args:
        messages: each with a role and content: a text, a list of parts of type `text`, or null beside calls, which are
            objects.
        tools: definitions, as in the OpenAI API; may be empty.
        forms: of the template for conversations without tools, and of that for conversations with them.
        format_: of calls, where they are written as text.

    Raises:
        ChatTemplateError: a call has no name.
    """
    introduction = ""
    form = forms[bool(tools)]
    if tools and not form.definitions:
        introduction, tools, form = _introduction(tools, format_), None, forms[False]
    if any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        _check_calls(messages)
        messages = _fit_calls(messages, form, format_)
    if introduction:
        messages = _introduced(messages, introduction)
    messages = _fit_system(messages, form)
    return (messages if form.repeats else _joined(messages)), tools or None


def _check_calls(messages: Sequence[Message]) -> None:
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls", ())):
            function = call.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ChatTemplateError(
                    f"`messages.{i}.tool_calls.{j}.function.name` must be a string"
                )


def _fit_calls(
    messages: Sequence[Message], form: TemplateForm, format_: ToolFormat
) -> Sequence[Message]:
    if not form.calls:
        return [_plain(message, format_) for message in messages]
    fitted: list[Message] = []
    for message in messages:
        if message.get("tool_calls"):
            fitted += _fit_calling(message, form, format_)
        elif message["role"] == "tool":
            result = _with_id(message, "tool_call_id", format_)
            fitted.append(result if form.results else _plain(message, format_))
        else:
            fitted.append(message)
    return fitted if form.several_calls else _results_after_calls(fitted)


def _fit_calling(message: Message, form: TemplateForm, format_: ToolFormat) -> Sequence[Message]:
    """Return a message with calls as one or several messages whose calls a template writes."""
    content = message["content"]
    calls = [
        _with_id(call, "id", format_)
        | {"function": call["function"] | {"arguments": _fit_arguments(call["function"], form)}}
        for call in message["tool_calls"]
    ]
    before: list[Message] = []
    if content and not form.text_and_calls:
        before = [{key: value for key, value in message.items() if key != "tool_calls"}]
        message, content = {"role": message["role"]}, None
    content = content or (None if form.null_content else "")
    if form.several_calls:
        return [*before, message | {"content": content, "tool_calls": calls}]
    first = message | {"content": content, "tool_calls": calls[:1]}
    nothing = None if form.null_content else ""
    further = [
        {"role": message["role"], "content": nothing, "tool_calls": [call]} for call in calls[1:]
    ]
    return [*before, first, *further]


def _fit_arguments(function: Mapping[str, Any], form: TemplateForm) -> dict[str, Any] | str:
    given = function.get("arguments")
    arguments = read_arguments(given)
    if isinstance(arguments, str):
        return arguments if form.text_arguments else complete_arguments(arguments)
    if form.object_arguments:
        return arguments
    return given if isinstance(given, str) and given.strip() else _dump(arguments)


def _results_after_calls(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with each call's result after it, where the results follow several calls."""
    ordered: list[Message] = []
    calls: dict[str, int] = {}  # positions of the calls that the next results may belong to
    for message in messages:
        if message["role"] != "tool" and not message.get("tool_calls"):
            calls = {}
        elif message.get("tool_calls"):
            calls[str(message["tool_calls"][0].get("id"))] = len(ordered)
        elif (place := calls.pop(str(message.get("tool_call_id")), None)) is not None:
            ordered.insert(place + 1, message)
            calls = {name: at + (at > place) for name, at in calls.items()}
            continue
        ordered.append(message)
    return ordered


def _with_id(owner: Mapping[str, Any], key: str, format_: ToolFormat) -> Message:
    """Return a call or a result with an id of the length that the format's templates require."""
    given, length = owner.get(key), format_.id_characters
    fits = length is None or given is None
    if fits or (isinstance(given, str) and len(given) == length and given.isalnum()):
        return dict(owner)
    return {**owner, key: hashlib.sha256(str(given).encode()).hexdigest()[:length]}


def _introduced(messages: Sequence[Message], introduction: str) -> Sequence[Message]:
    """Return messages whose system message, the first one, ends with a text."""
    if messages and messages[0]["role"] in _OF_SYSTEM:
        first = messages[0]
        content = _join_texts([text_of(first["content"]), introduction])
        return [first | {"content": content}, *messages[1:]]
    return [{"role": "system", "content": introduction}, *messages]


def _fit_system(messages: Sequence[Message], form: TemplateForm) -> Sequence[Message]:
    if not form.developer:
        messages = [
            message | {"role": "system"} if message["role"] == "developer" else message
            for message in messages
        ]
    places = [i for i, message in enumerate(messages) if message["role"] == "system"]
    if not places:
        return messages
    others = [message for message in messages if message["role"] != "system"]
    is_written = form.system and (others or messages)[-1]["role"] in form.system_before
    if is_written and (form.later_system or places == [0]):
        return messages
    content = _join_texts([text_of(messages[i]["content"]) for i in places])
    if is_written:
        return [messages[places[0]] | {"content": content}, *others]
    for i, message in enumerate(others):
        if message["role"] == "user":
            others[i] = message | {"content": _join_texts([content, text_of(message["content"])])}
            return others
    return [{"role": "user", "content": content}, *others]


def _joined(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages without two of the user, or of the assistant, after one another."""
    joined: list[Message] = []
    for message in messages:
        role = message["role"]
        if not joined or role not in ("user", "assistant") or joined[-1]["role"] != role:
            joined.append(message)
            continue
        last = joined[-1]
        texts = [text_of(one["content"]) for one in (last, message)]
        both = {**message, **last, "content": _join_texts(texts) or last["content"]}
        calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
        joined[-1] = both | {"tool_calls": calls} if calls else both
    return joined


def text_of(content: object) -> str:
    """Return the text of a message's content."""
    if isinstance(content, list | tuple):
        return "\n".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


def _join_texts(texts: Sequence[str]) -> str:
    return _SEPARATOR.join(text for text in texts if text)


def _introduction(tools: Sequence[Mapping[str, Any]], format_: ToolFormat) -> str:
    definitions = "\n".join(_dump(tool) for tool in tools)
    example = _write_call(format_, "NAME", {"KEY": "VALUE"})
    call = f"{format_.marker}{format_.opening}{example}{format_.closing}"
    return (
        f"You can call these functions:\n{definitions}\nTo call a function, reply with\n{call}\n"
        "with its name and arguments in the places of NAME, KEY and VALUE."
    )


def _plain(message: Message, format_: ToolFormat) -> Message:
    """Return a message whose calls, or whose result, are written as text."""
    if message["role"] == "tool":
        content = text_of(message["content"])
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [_write_call(format_, f["name"], read_arguments(f.get("arguments"))) for f in functions]
    begin = text_of(message["content"]) + format_.marker + format_.opening
    plain["content"] = begin + format_.separator.join(texts) + format_.closing
    return plain


def _write_call(format_: ToolFormat, name: str, arguments: Mapping[str, Any] | str) -> str:
    """Return a call as a model writes it, without what begins and ends the calls of a message."""
    if format_.arguments == "json":
        text = arguments if isinstance(arguments, str) else _dump(arguments)
    else:
        if isinstance(arguments, str):
            arguments = complete_arguments(arguments)
        text = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else _dump(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
    return f"{format_.head_of(name)}{text}{format_.tail}"


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
