"""The Lark grammar of messages that may call tools."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from model.errors import GrammarError
from model.text.lark import json_rule, quote
from model.text.tokenizer import Tokenizer
from model.text.tools.definitions import Parameter, Tool
from model.text.tools.formats import ToolFormat

PARAMETER_END: Final = "\n</parameter>\n"
"""Ends the value of a parameter in arguments of the kind `xml`."""
_JSON_PARTS: Final = re.compile(r'"[^"]*"|[{}]|: |, ')


def joint_constraint(
    format_: ToolFormat,
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    kind: str,
    value: object,
    *,
    parallel: bool,
) -> dict[str, Any]:
    """Return the constraint of a message that is calls, or a value that follows a constraint.

    Args:
        format_: of the calls.
        tools: that may be called, at least one.
        tokenizer: of the model; see `calls_grammar`.
        kind: of the value's constraint, as for `model.sampling.grammar.serialize`.
        value: of that constraint.
        parallel: whether there may be several calls.

    Returns:
        The value of a constraint of the kind "calls".

    Raises:
        GrammarError: see `calls_grammar`.
    """
    heads = [format_.head_of(tool.name) for tool in tools]
    begins = [format_.marker] if format_.marker else [format_.optional_marker, *heads]
    return {
        "calls": _grammar(
            format_,
            tools,
            tokenizer,
            _Writer.joint,
            # The lexer takes the longest lexeme: as one, a head would hide the braces and names of the value.
            in_parts=not format_.marker and kind.startswith("json"),
            parallel=parallel,
        ),
        "begins": [text for text in begins if text],
        "kind": kind,
        "value": value,
    }


def calls_grammar(
    format_: ToolFormat,
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    *,
    required: bool,
    parallel: bool,
) -> str:
    """Return the grammar of a message: text, calls, or text and then calls.

    Args:
        format_: of the calls.
        tools: that may be called, at least one.
        tokenizer: of the model. Its tokens for the parts of a call are used where it has them; text cannot contain
            such tokens.
        required: whether the message is one or several calls, without text.
        parallel: whether there may be several calls.

    Raises:
        GrammarError: a schema is too long or too deeply nested, or cannot be written in this format.
    """
    start = _Writer.required if required else _Writer.optional
    return _grammar(format_, tools, tokenizer, start, in_parts=False, parallel=parallel)


def _grammar(
    format_: ToolFormat,
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    start: Callable[[_Writer, Sequence[str]], str],
    *,
    in_parts: bool,
    parallel: bool,
) -> str:
    """Return the grammar of a message with calls.

    Args:
        format_: of the calls.
        tools: that may be called.
        tokenizer: of the model.
        start: writes the rule for the whole message.
        in_parts: whether heads are written as the lexemes of JSON.
        parallel: whether there may be several calls.
    """
    writer = _Writer(format_, tokenizer)
    lines = [start(writer, [format_.head_of(tool.name) for tool in tools])]
    more = f" ({writer.literal(format_.separator)} call)*" if parallel else ""
    lines.append(f"calls: {_joined(writer.literal(format_.opening), 'call')}{more}")
    lines[-1] += f" {writer.literal(format_.closing)}" if format_.closing else ""
    lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    for i, tool in enumerate(tools):
        text, tail = format_.head_of(tool.name), writer.literal(format_.tail)
        head = " ".join(map(quote, _JSON_PARTS.findall(text))) if in_parts else writer.literal(text)
        lines.append(f"call_{i}: {_joined(head, f'arguments_{i}', tail)}")
        lines += writer.arguments(f"arguments_{i}", tool)
    return "\n".join(lines)


class _Writer:
    """Writes the parts of a grammar."""

    def __init__(self, format_: ToolFormat, tokenizer: Tokenizer) -> None:
        self._format = format_
        ids = {text: tokenizer.library.token_to_id(text) for text in format_.tokens}
        self._ids = {text: token_id for text, token_id in ids.items() if token_id is not None}
        self._split = re.compile("(" + "|".join(map(re.escape, format_.tokens)) + ")")

    def literal(self, text: str) -> str:
        """Return the expression for a fixed text; empty for an empty text."""
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else quote(part)
            for part in self._split.split(text)
            if part
        )

    def required(self, heads: Sequence[str]) -> str:
        """Return the rule for a message of calls."""
        del heads
        return f"start: {self._calls()}"

    def joint(self, heads: Sequence[str]) -> str:
        """Return the rule for a message of calls or a value; the rule `value` is left out."""
        del heads
        return f"start: {self._calls()} | value"

    def optional(self, heads: Sequence[str]) -> str:
        """Return the rule for a message of text, calls, or text and then calls."""
        marker = self._format.marker
        if not marker:
            excluded = " | ".join(
                quote(text) for text in (self._format.optional_marker, *heads) if text
            )
            return f"start: {self._calls()} | TEXT\nANY: /(?s:.*)/\nTEXT: ANY & ~(({excluded}) ANY)"
        text = f"ANY: /(?s:.*)/\nTEXT: ANY & ~(ANY {quote(marker)} ANY)"
        if marker in self._ids:
            return f"start: TEXT ({self._calls()})?\n{text}"
        return f"start: lead calls | TEXT\nlead[lazy]: ANY {quote(marker)}\n{text}"

    def _calls(self) -> str:
        """Return the expression for calls with what begins them."""
        if marker := self._format.marker:
            return f"{self.literal(marker)} calls"
        optional = self.literal(self._format.optional_marker)
        return f"({optional})? calls" if optional else "calls"

    def arguments(self, rule: str, tool: Tool) -> list[str]:
        """Return the rules for the arguments of a tool."""
        if self._format.arguments == "json":
            return [f"{rule}: {json_rule(tool.schema)}"]
        names = [f"{rule}_{i}" for i in range(len(tool.parameters))]
        optional = ["" if parameter.required else "?" for parameter in tool.parameters]
        body = " ".join(name + mark for name, mark in zip(names, optional, strict=True))
        lines = [f"{rule}: {body or quote('')}"]
        for name, parameter in zip(names, tool.parameters, strict=True):
            begin = quote(f"<parameter={parameter.name}>\n")
            value, further = _value(name, parameter)
            lines += [f"{name}: {begin} {value}", *further]
        return lines


def _value(rule: str, parameter: Parameter) -> tuple[str, list[str]]:
    """Return the expression for a parameter's value with its end, and the rules that it needs."""
    if not parameter.is_text:
        return f"{json_rule(parameter.schema)} {quote(PARAMETER_END)}", []
    schema = parameter.schema
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    choices = schema.get("enum")
    if not isinstance(choices, list | None):
        raise GrammarError("`enum` must be a list")
    if "const" in schema:
        choices = [schema["const"]] if choices is None or schema["const"] in choices else []
    if choices is None:
        count = f"{{{shortest},{'' if longest is None else longest}}}"
        line = f"{rule}_text[suffix={quote(PARAMETER_END)}]: /(?s:.{count})/"
        return f"{rule}_text", [line]
    allowed = [
        choice
        for choice in choices
        if isinstance(choice, str)
        and len(choice) >= shortest
        and (longest is None or len(choice) <= longest)
        and PARAMETER_END not in choice + PARAMETER_END[:-1]
    ]
    if not allowed:
        raise GrammarError(f"no text can be the value of `{parameter.name}`")
    return f"({' | '.join(map(quote, allowed))}) {quote(PARAMETER_END)}", []


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
