"""Definitions of tools, and the parameters of those whose arguments are not JSON."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

from model.errors import GrammarError
from model.text.tools.formats import ToolFormat

_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_PARAMETER_NAME: Final = re.compile(r"[^<>\n\x00]+")
_NOTES: Final = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "$comment"}
)
# A list of elements cannot break `additionalProperties`, as it has declared parameters only.
_OF_OBJECT: Final = _NOTES | {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id",
}  # fmt: skip
_OF_TEXT: Final = _NOTES | {"type", "minLength", "maxLength", "enum", "const"}
_MOST_REFERENCES: Final = 8


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
    schema = _NO_PARAMETERS if not schema else {"type": "object", **schema}
    if schema["type"] != "object":
        raise GrammarError("the `type` must be `object`")
    if format_.arguments == "json":
        return Tool(name, schema, strict=strict)
    return Tool(name, schema, _read_parameters(format_, schema), strict)


def _read_parameters(format_: ToolFormat, schema: dict[str, Any]) -> tuple[Parameter, ...]:
    if unknown := [key for key in schema if key not in _OF_OBJECT]:
        raise _unsupported(format_, unknown[0], "beside `properties`")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise GrammarError("`properties` must be an object and `required` a list")
    for name in required:
        if not isinstance(name, str) or name not in properties:
            raise GrammarError("each name in `required` must be in `properties`")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found = []
    for name, value in properties.items():
        if not _PARAMETER_NAME.fullmatch(name):
            raise GrammarError(
                "the names in `properties` cannot be empty or have <, > or line ends"
            )
        if not isinstance(value, dict | bool):
            raise GrammarError("each value in `properties` must be a schema")
        resolved = _resolve(schema, value)
        is_text = isinstance(resolved, dict) and resolved.get("type") == "string"
        if is_text:
            _check_text(format_, name, resolved)
        elif isinstance(value, dict):
            resolved = {**shared, **value}
        found.append(Parameter(name, name in required, resolved, is_text))
    return tuple(found)


def _check_text(format_: ToolFormat, name: str, schema: dict[str, Any]) -> None:
    """Check the schema of a parameter that is text.

    Raises:
        GrammarError: it cannot be followed.
    """
    if unknown := [key for key in schema if key not in _OF_TEXT]:
        raise _unsupported(format_, unknown[0], f"for the string `{name}`")
    for key in ("minLength", "maxLength"):
        if not _is_length(schema.get(key, 0)):
            raise GrammarError(f"`{key}` must be an integer from 0 to 100000")


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 100_000


def _resolve(root: dict[str, Any], schema: Any) -> Any:  # noqa: ANN401 - a JSON value
    """Follow references to definitions of the root; return what cannot be followed as it is."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for key in reference[2:].split("/"):
            if not isinstance(target, dict) or key not in target:
                return schema
            target = target[key]
        schema = target
    return schema


def _unsupported(format_: ToolFormat, keyword: str, where: str) -> GrammarError:
    shown = keyword[:60].encode("unicode_escape").decode()
    return GrammarError(
        f"the JSON schema keyword `{shown}` is not supported {where} in calls of the format {format_.name}"
    )
