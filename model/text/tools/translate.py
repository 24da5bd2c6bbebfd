"""Translates the tools of a request to the grammar of a message that may call them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from model.errors import GrammarError
from model.text.schema.lower import Unenforced
from model.text.schema.reduce import describe, refuse
from model.text.tokenizer import Tokenizer
from model.text.tools.definitions import Tool, lower_tool, make_tool
from model.text.tools.formats import BY_NAME
from model.text.tools.grammar import calls_grammar


class ToolsConstraint(NamedTuple):
    """The tools that a message may call, of plain JSON types.

    Attributes:
        format: name of the format of calls.
        tools: of each: name, schema of the arguments, and whether it is strict.
        required: whether the message is calls only.
        parallel: whether there may be several calls.
    """

    format: str
    tools: list[tuple[str, dict[str, Any], bool]]
    required: bool
    parallel: bool

    def read(self) -> list[Tool]:
        """Return the tools."""
        format_ = BY_NAME[self.format]  # type: ignore[index]
        return [
            make_tool(format_, name, schema, strict=strict) for name, schema, strict in self.tools
        ]


class TranslatedTools(NamedTuple):
    """A Lark grammar, and for each tool with keywords that it does not enforce a phrase that names them."""

    grammar: str
    unenforced: tuple[str, ...]


def translate_tools(value: object, tokenizer: Tokenizer, *, level: int = 0) -> TranslatedTools:
    """Translate tools.

    Args:
        value: a `ToolsConstraint`.
        tokenizer: of the model.
        level: of the reduction of the schemas, for tools that are not strict.

    Raises:
        GrammarError: a schema is not valid, or cannot be enforced although its tool is strict.
    """
    assert isinstance(value, list | tuple)
    constraint = ToolsConstraint(*value)
    tools, phrases = [], []
    for tool in constraint.read():
        lowered, unenforced = _lowered(tool, constraint, level)
        tools.append(lowered)
        phrases += [f"the tool `{tool.name}`: {phrase}" for phrase in describe(unenforced)]
    grammar = calls_grammar(
        BY_NAME[constraint.format],  # type: ignore[index]
        tools,
        tokenizer,
        required=constraint.required,
        parallel=constraint.parallel,
    )
    return TranslatedTools(grammar, tuple(phrases))


def _lowered(
    tool: Tool, constraint: ToolsConstraint, level: int
) -> tuple[Tool, tuple[Unenforced, ...]]:
    format_ = BY_NAME[constraint.format]  # type: ignore[index]
    try:
        lowered, unenforced = lower_tool(format_, tool, 0 if tool.strict else level)
        if tool.strict:
            refuse(unenforced)
    except GrammarError as error:
        raise GrammarError(f"the tool `{tool.name}`: {error}") from None
    return dataclasses.replace(lowered), unenforced
