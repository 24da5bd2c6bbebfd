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


class Constrained(NamedTuple):
    """A constraint on a text, of plain JSON types; see `server.http.text.structured_output.StructuredOutput`."""

    kind: str
    value: Any
    field: str
    strict: bool


class ToolsConstraint(NamedTuple):
    """The tools that a message may call, of plain JSON types.

    Attributes:
        format: name of the format of calls.
        tools: of each: name, schema of the arguments, and whether it is strict.
        required: whether the message is calls only.
        parallel: whether there may be several calls.
        text: the constraint on a message without calls; None if it is free text, before calls too.
    """

    format: str
    tools: list[tuple[str, dict[str, Any], bool]]
    required: bool
    parallel: bool
    text: Constrained | None = None

    @classmethod
    def decoded(cls, value: Any) -> ToolsConstraint:  # noqa: ANN401 - a JSON value
        """Return a constraint that was encoded as JSON."""
        constraint = cls(*value)
        return constraint._replace(text=constraint.text and Constrained(*constraint.text))

    def read(self) -> list[Tool]:
        """Return the tools."""
        format_ = BY_NAME[self.format]  # type: ignore[index]
        return [
            make_tool(format_, name, schema, strict=strict) for name, schema, strict in self.tools
        ]


class TranslatedTools(NamedTuple):
    """Tools as a grammar.

    Attributes:
        grammar: in Lark's syntax; without the rule `value` if there is a constraint on the text.
        unenforced: for each tool with keywords that it does not enforce, a phrase that names them.
        text: the constraint on the text.
        begins: texts of which one begins each message with calls.
    """

    grammar: str
    unenforced: tuple[str, ...]
    text: Constrained | None
    begins: tuple[str, ...]


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
    constraint = ToolsConstraint.decoded(value)
    tools, phrases = [], []
    for tool in constraint.read():
        lowered, unenforced = _lowered(tool, constraint, level)
        tools.append(lowered)
        phrases += [f"the tool `{tool.name}`: {phrase}" for phrase in describe(unenforced)]
    format_, text = BY_NAME[constraint.format], constraint.text  # type: ignore[index]
    grammar = calls_grammar(
        format_,
        tools,
        tokenizer,
        required=constraint.required,
        parallel=constraint.parallel,
        value=None if text is None else text.kind,
    )
    begins = [format_.marker or format_.optional_marker]
    if not format_.marker:
        begins += [format_.head_of(tool.name) for tool in tools]
    return TranslatedTools(grammar, tuple(phrases), text, tuple(filter(None, begins)))


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
