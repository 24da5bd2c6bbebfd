"""Checks finished texts against the JSON schemas that they were generated for. May take very long."""

from __future__ import annotations

import json
from typing import Any, Final

from model.text.schema.reduce import printable, read
from model.text.schema.validation import first_violation
from model.text.tools.formats import BY_NAME
from model.text.tools.parser import CallParser
from model.text.tools.translate import ToolsConstraint

_MOST: Final = 4


class UncheckedError(Exception):
    """A text cannot be checked: it is not certain which parts of it are values."""


def violations(kind: str, value: Any, text: str) -> list[str]:  # noqa: ANN401 - a constraint
    """Return how the values in a text violate their schemas, as phrases.

    Args:
        kind: of the constraint; see `model.sampling.grammar.translate`.
        value: the constraint.
        text: that ended where the grammar allowed it.

    Raises:
        UncheckedError: the text has values whose places are not known.
    """
    if kind == "tools":
        return _of_message(ToolsConstraint.decoded(value), text)[:_MOST]
    if kind == "structural_tag":
        return _of_tags(json.loads(value) if isinstance(value, str) else value, text)[:_MOST]
    if kind != "json_schema":
        return []
    found = _of_value(value, text)
    return [] if found is None else [found]


def _of_value(schema: Any, text: str) -> str | None:  # noqa: ANN401 - a JSON schema
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None  # a stop string cut it off
    return first_violation(read(schema), value)


def _of_message(constraint: ToolsConstraint, text: str) -> list[str]:
    tools = {tool.name: tool for tool in constraint.read()}
    constrained = constraint.text is not None
    format_ = BY_NAME[constraint.format]  # type: ignore[index]
    parser = CallParser(format_, list(tools.values()), constrained=constrained)
    calls: dict[int, tuple[str, str]] = {}
    for delta in (parser.push(text), parser.finish()):
        for call in delta.calls:
            name, arguments = calls.get(call.index, (call.name or "", ""))
            calls[call.index] = (name, arguments + call.arguments)
    if constraint.text is not None and not calls:
        return violations(constraint.text.kind, constraint.text.value, text)
    return [
        f"the call of `{name}`: {found}"
        for name, arguments in calls.values()
        if (found := _of_value(tools[name].schema, arguments)) is not None
    ]


def _of_tags(tags: dict[str, Any], text: str) -> list[str]:
    found = []
    decoder = json.JSONDecoder()
    for begin, schema in _begins(tags):
        place = 0
        while (place := text.find(begin, place)) >= 0:
            place += len(begin)
            try:
                value, _ = decoder.raw_decode(text, place)
            except (ValueError, RecursionError):
                continue
            violation = first_violation(read(schema), value)
            if violation is not None:
                found.append(f"after `{printable(begin)}`: {violation}")
    return found


def _begins(tags: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the schemas of a structural tag, each with the text before its values.

    Raises:
        UncheckedError: a value has no such text.
    """
    if "structures" in tags:
        return [(part["begin"], part.get("schema") or {}) for part in tags["structures"]]
    found: list[tuple[str, Any]] = []
    level: list[tuple[Any, object]] = [(tags["format"], None)]
    while level:
        node, begin = level.pop()
        if isinstance(node, list):
            level += [(part, begin) for part in node]
        elif isinstance(node, dict):
            if node.get("type") == "json_schema":
                if not isinstance(begin, str):
                    raise UncheckedError
                found.append((begin, node.get("json_schema", {})))
            else:
                level += [
                    (part, node.get("begin") if key == "content" else None)
                    for key, part in node.items()
                ]
    return found
