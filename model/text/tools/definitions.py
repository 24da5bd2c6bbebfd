"""Definitions of tools, and the parameters of those whose arguments are not JSON."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

from model.errors import GrammarError
from model.text.schema.lower import Unenforced, lower_schema
from model.text.schema.modern import DEFINITIONS, Schema
from model.text.schema.reduce import read
from model.text.schema.references import References
from model.text.tools.formats import ToolFormat

_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_PARAMETER_NAME: Final = re.compile(r"[^<>\n\x00]+")
_MOST_REFERENCES: Final = 8
# A list of elements cannot break `additionalProperties`, as it has declared parameters only.
_OF_ELEMENTS: Final = frozenset({"type", "properties", "required", "additionalProperties", "$defs"})
_MOST_PARTS: Final = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a tool whose arguments are a list of elements.

    Attributes:
        name: the key.
        required: whether each call has it.
        schema: of its value, with the definitions that it may refer to.
        is_text: whether the value is text as it is, not JSON.
    """

    name: str
    required: bool
    schema: Any
    is_text: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A tool.

    Attributes:
        name: letters, digits, `_`, `-` and `.` only.
        schema: of the arguments, whose type is `object`.
        parameters: for formats with arguments as a list of elements; otherwise empty.
        strict: whether a keyword of the schema that the grammar cannot enforce is an error.
    """

    name: str
    schema: dict[str, Any]
    parameters: tuple[Parameter, ...] = ()
    strict: bool = False


def make_tool(
    format_: ToolFormat, name: str, schema: dict[str, Any] | None, *, strict: bool = False
) -> Tool:
    """Make a tool from its definition.

    Args:
        format_: in which it is called.
        name: of the tool.
        schema: of the arguments; None for a tool without parameters.
        strict: see `Tool`.

    Raises:
        GrammarError: the arguments are not an object, or cannot be written in this format.
    """
    schema = dict(schema) if schema else dict(_NO_PARAMETERS)
    kind = schema.get("type")
    if kind is not None and kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise GrammarError("the `type` must be `object`")
    schema["type"] = "object"
    if format_.arguments == "json":
        return Tool(name, schema, strict=strict)
    return Tool(name, schema, _read_parameters(schema), strict)


def _read_parameters(schema: dict[str, Any]) -> tuple[Parameter, ...]:
    references = References(schema)
    base = references.base_of(schema, "")
    properties: dict[str, Any] = {}
    required: dict[str, None] = {}
    for part in _object_parts(references, schema):
        found, needed = part.get("properties") or {}, part.get("required") or []
        if not isinstance(found, dict) or not isinstance(needed, list | bool):
            raise GrammarError("`properties` must be an object and `required` a list")
        for name, value in found.items():
            if value is not None:
                properties.setdefault(name, value)
        if not isinstance(needed, bool):
            required.update({name: None for name in needed if isinstance(name, str)})
    for name in required:
        properties.setdefault(name, True)
    parameters = []
    for name, value in properties.items():
        if not _PARAMETER_NAME.fullmatch(name):
            raise GrammarError(
                "the names in `properties` cannot be empty or have <, > or line ends"
            )
        if not isinstance(value, dict | bool):
            raise GrammarError("each value in `properties` must be a schema")
        parameters.append(
            Parameter(name, name in required, value, _is_text(references, value, base))
        )
    return tuple(parameters)


def _object_parts(references: References, schema: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - a JSON value
    """Return a schema and what it refers to or consists of, as far as it says which properties there are."""
    parts: list[dict[str, Any]] = []
    level = [(schema, references.base_of(schema, ""))]
    while level and len(parts) < _MOST_REFERENCES:
        node, base = level.pop(0)
        if not isinstance(node, dict):
            continue
        parts.append(node)
        if isinstance(reference := node.get("$ref"), str):
            level.append(references.find(reference, base))
        if isinstance(all_of := node.get("allOf"), list):
            level += [(part, base) for part in all_of]
    return parts


def _is_text(references: References, schema: Any, base: str) -> bool:  # noqa: ANN401 - a JSON value
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            break
        schema, base = references.find(reference, base)
    if not isinstance(schema, dict) or schema.get("nullable") is True:
        return False
    return schema.get("type") in ("string", ["string"])


def lower_tool(
    format_: ToolFormat, tool: Tool, level: int = 0
) -> tuple[Tool, tuple[Unenforced, ...]]:
    """Return a tool with the schemas for the grammar, and the keywords that they do not enforce.

    Args:
        format_: in which it is called.
        tool: as its definition says.
        level: see `model.text.schema.lower.lower_schema`.

    Raises:
        GrammarError: a schema is not valid.
    """
    modern = read(tool.schema)
    lowered = lower_schema(modern, level)
    if format_.arguments == "json":
        return dataclasses.replace(tool, schema=_as_object(lowered.schema)), lowered.unenforced
    unenforced = list(lowered.unenforced)
    known = {item.place for item in unenforced}
    if isinstance(lowered.schema, dict):
        beside = set(lowered.schema) - _OF_ELEMENTS - {"$ref", "allOf"}
        unenforced += [
            Unenforced(key, f"/{key}") for key in sorted(beside) if f"/{key}" not in known
        ]
    nodes: dict[str, list[Schema]] = {}
    pending: list[Schema] = [modern.root]
    for _ in range(_MOST_REFERENCES):
        node = pending.pop(0) if pending else True
        if not isinstance(node, dict):
            continue
        for name, value in node.get("properties", {}).items():
            nodes.setdefault(name, []).append(value)
        if "$ref" in node:
            pending.append(modern.definitions[node["$ref"].removeprefix(DEFINITIONS)])
        pending += node.get("allOf", [])
    parameters = []
    for parameter in tool.parameters:
        found = nodes.get(parameter.name, [True])
        node = found[0] if len(found) == 1 else {"allOf": found}
        schema = lower_schema(modern._replace(root=node), level).schema
        if parameter.is_text:
            schema, lost = _of_text(schema, f"/properties/{parameter.name}")
            unenforced += lost
        if schema is False and not parameter.required:
            continue
        parameters.append(dataclasses.replace(parameter, schema=schema))
    return dataclasses.replace(tool, parameters=tuple(parameters)), tuple(unenforced)


def _as_object(schema: Schema) -> dict[str, Any]:
    return {"allOf": [schema]} if isinstance(schema, bool) else schema


def _of_text(schema: Schema, place: str) -> tuple[Schema, list[Unenforced]]:
    """Return what the grammar of a parameter that is text reads of a schema, and what it does not read."""
    definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    out: dict[str, Any] = {"patterns": []}
    lost: list[Unenforced] = []
    pending: list[Schema] = [schema]
    for _ in range(_MOST_PARTS):
        part = pending.pop() if pending else True
        if part is False:
            return False, []
        if part is True:
            continue
        pending += part.get("allOf", [])
        if "$ref" in part:
            pending.append(definitions[part["$ref"].removeprefix(DEFINITIONS)])
        out["patterns"] += [part["pattern"]] if "pattern" in part else []
        out["minLength"] = max(out.get("minLength", 0), part.get("minLength", 0))
        if "maxLength" in part:
            out["maxLength"] = min(part["maxLength"], out.get("maxLength", part["maxLength"]))
        if "enum" in part:
            known = out.get("enum")
            out["enum"] = [v for v in part["enum"] if known is None or v in known]
        if "anyOf" in part:
            lost.append(Unenforced("anyOf", f"{place}/anyOf"))
    if pending:
        lost.append(Unenforced("allOf", f"{place}/allOf"))
    if "enum" in out and (out["patterns"] or out["minLength"] or "maxLength" in out):
        lost += [Unenforced("allOf", f"{place}/allOf")]
    return out, lost
