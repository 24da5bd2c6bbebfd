"""The Lark grammar of messages that may call tools."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from model.errors import GrammarError
from model.text.lark import json_rule, quote
from model.text.tokenizer import Tokenizer
from model.text.tools.definitions import Parameter, Tool
from model.text.tools.formats import ToolFormat

PARAMETER_END: Final = "\n</parameter>\n"
"""Ends the value of a parameter in arguments of the kind `xml`."""
_JSON_PARTS: Final = re.compile(r'"[^"]*"|[{}]|: |, ')


def calls_grammar(
    format_: ToolFormat,
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    *,
    required: bool,
    parallel: bool,
    value: str | None = None,
) -> str:
    """Return the grammar of a message: text, calls, or text and then calls; or calls or a value.

    Args:
        format_: of the calls.
        tools: that may be called, at least one.
        tokenizer: of the model. Its tokens for the parts of a call are used where it has them; text cannot contain
            such tokens.
        required: whether the message is one or several calls, without text.
        parallel: whether there may be several calls.
        value: kind of the constraint on a message without calls, whose rule `value` is left out; None if it is free.

    Raises:
        GrammarError: a schema is too long or too deeply nested, or cannot be written in this format.
    """
    writer = _Writer(format_, tokenizer)
    heads = [format_.head_of(tool.name) for tool in tools]
    lines = [writer.start(required=required, constrained=value is not None, heads=heads)]
    # The lexer takes the longest lexeme: as one, a head would hide the braces and names of a value.
    in_parts = value in ("json_schema", "json_object") and not format_.marker
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

    def start(self, *, required: bool, constrained: bool, heads: Sequence[str]) -> str:
        """Return the rule for the whole message."""
        if required:
            return f"start: {self._calls()}"
        if constrained:
            return f"start: {self._calls()} | value"
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
    schema = parameter.schema
    if not parameter.is_text:
        return f"{json_rule(schema)} {quote(PARAMETER_END)}", []
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    choices = schema.get("enum")
    if choices is None:
        count = f"{{{shortest},{'' if longest is None else longest}}}"
        terminal = f"{rule.upper()}_TEXT"
        # A pattern is `^(?:EXPRESSION)$`; a terminal is matched as a whole.
        parts = [f"/(?s:.{count})/", *(f"/{p[1:-1]}/" for p in schema.get("patterns", ()))]
        return f"{rule}_text", [
            f"{terminal}: {' & '.join(parts)}",
            f"{rule}_text[suffix={quote(PARAMETER_END)}]: {terminal}",
        ]
    allowed = [
        choice
        for choice in choices
        if isinstance(choice, str) and PARAMETER_END not in choice + PARAMETER_END[:-1]
    ]
    if not allowed:
        raise GrammarError(f"no text can be the value of `{parameter.name}`")
    return f"({' | '.join(map(quote, allowed))}) {quote(PARAMETER_END)}", []


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
