"""Finds the constraint on a request's text, which several fields can state."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from server.errors import ValidationError
from server.http.body.validation import describe
from server.http.text.structured_output import StructuredOutput

if TYPE_CHECKING:
    from server.http.dialects.openai.schema import ResponseFormat, StructuredOutputs, TextFields

_Kind: TypeAlias = Literal[
    "json_schema", "json_object", "regex", "choice", "lark", "structural_tag"
]

_FIELDS: tuple[tuple[str, _Kind], ...] = (
    ("json_schema", "json_schema"),
    ("regex", "regex"),
    ("choice", "choice"),
    ("grammar", "lark"),
    ("structural_tag", "structural_tag"),
)
_OLDER_FIELDS: tuple[tuple[str, _Kind], ...] = (
    ("guided_json", "json_schema"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "lark"),
)


def find_constraint(body: TextFields) -> StructuredOutput | None:
    """Return the constraint that a body states; None if the text is free.

    Several fields may state the same one.

    Raises:
        ValidationError: there are several different ones, or one lacks its value.
    """
    found = []
    if body.response_format is not None:
        found += _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        found += _of_structured_outputs(body.structured_outputs)
    found += [
        StructuredOutput(kind, value, name)
        for name, kind in _OLDER_FIELDS
        if (value := getattr(body, name)) is not None
    ]
    if not found:
        return None
    first, *others = map(_decoded, found)
    for other in others:
        if (other.kind, other.value) != (first.kind, first.value):
            raise ValidationError(
                f"`{first.field}` and `{other.field}` exclude each other, since they are not equal"
            )
    return first._replace(strict=any(one.strict for one in (first, *others)))


def _of_structured_outputs(outputs: StructuredOutputs) -> list[StructuredOutput]:
    found = [
        StructuredOutput(
            kind, value, "structured_outputs." + ("json" if kind == "json_schema" else name)
        )
        for name, kind in _FIELDS
        if (value := getattr(outputs, name)) is not None
    ]
    if outputs.json_object:
        found.append(StructuredOutput("json_object", None, "structured_outputs.json_object"))
    return found


def _of_response_format(wanted: ResponseFormat) -> list[StructuredOutput]:
    field = "response_format"
    match wanted.type:
        case "text":
            return []
        case "json_schema":
            named = wanted.json_schema or {}
            inner = f"{field}.json_schema"
            schema = _required("json_schema", named.get("schema"), f"{inner}.schema", dict | bool)
            return [schema._replace(strict=read_strict(named.get("strict"), f"{inner}.strict"))]
        case "json_object" if wanted.value is None:
            return [StructuredOutput("json_object", None, field)]
        case "json" | "json_object":
            return [_required("json_schema", wanted.value, f"{field}.value", dict | str)]
        case "regex":
            return [_required("regex", wanted.value, f"{field}.value", str)]
        case "structural_tag":
            for name in ("structures", "triggers"):
                if getattr(wanted, name) is None and wanted.format is None:
                    raise ValidationError(f"`{field}.{name}` is required")
            tag = wanted.model_dump(exclude_none=True, by_alias=True)
            return [StructuredOutput("structural_tag", tag, field)]


def read_strict(value: object, field: str) -> bool:
    """Return whether a schema is strict; null means that it is not.

    Raises:
        ValidationError: the value is neither null nor a boolean.
    """
    if value is not None and not isinstance(value, bool):
        raise ValidationError(f"`{field}` must be true or false. Given: {describe(value)}")
    return bool(value)


def _required(
    kind: _Kind, value: object, field: str, wanted: type | types.UnionType
) -> StructuredOutput:
    if value is None:
        raise ValidationError(f"`{field}` is required")
    if not isinstance(value, wanted):
        expected = "a string" if wanted is str else "a JSON schema"
        raise ValidationError(f"`{field}` must be {expected}. Given: {describe(value)}")
    return StructuredOutput(kind, value, field)


def _decoded(constraint: StructuredOutput) -> StructuredOutput:
    """Decode a schema or tag that is a string of JSON."""
    if constraint.kind not in ("json_schema", "structural_tag"):
        return constraint
    if not isinstance(constraint.value, str):
        return constraint
    try:
        return constraint._replace(value=msgspec.json.decode(constraint.value))
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        raise ValidationError(f"`{constraint.field}` must be JSON, but cannot be decoded") from None
