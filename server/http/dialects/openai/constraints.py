"""Finds the constraint on a request's text, for which each API has names of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import msgspec

from server.errors import ValidationError
from server.http.body.validation import describe, quote
from server.http.text.structured_output import StructuredOutput

if TYPE_CHECKING:
    from server.http.dialects.openai.schema import ConstraintFields, ResponseFormat

_Kind: TypeAlias = Literal[
    "json_schema", "json_object", "regex", "choice", "lark", "structural_tag"
]

# By the type of a format: its language, and the places of its value, of which error messages name the first.
_FORMATS: Final[Mapping[str, tuple[_Kind, tuple[str, ...]]]] = {
    "json_object": ("json_schema", ("schema", "value", "json_schema.schema")),
    "json": ("json_schema", ("value", "schema", "json_schema.schema")),
    "json_schema": ("json_schema", ("json_schema.schema", "value.schema", "schema", "value")),
    "regex": ("regex", ("value", "pattern", "regex.regex", "regex")),
    "regex_schema": ("regex", ("regex_schema",)),
    "grammar": ("lark", ("grammar", "value")),
    "ebnf": ("lark", ("ebnf", "value")),
}
_FORMAT_VALUES: Final = (
    "json_schema", "schema", "value", "pattern", "regex", "regex_schema", "grammar", "ebnf",
    "structures", "triggers", "format",
)  # fmt: skip
_STRICT_PLACES: Final = ("json_schema.strict", "value.strict", "strict")
_TYPES: Final[Mapping[_Kind, tuple[tuple[type, ...], str]]] = {
    "json_schema": ((dict, bool, str), "a JSON schema"),
    "regex": ((str,), "a string"),
    "lark": ((str,), "a string"),
}
_MAX_PATTERN_CHARACTERS: Final = 100


def find_constraint(body: ConstraintFields) -> StructuredOutput | None:
    """Return the constraint that a body states; None if the text is free.

    Several fields may state the same one.

    Raises:
        ValidationError: there are several that differ, one lacks its value, or JSON cannot have the form that is asked
            for.
    """
    found: list[StructuredOutput] = []
    for field, read in _FIELDS:
        value = _at_field(body, field)
        if value is not None and (constraint := read(value, field)) is not None:
            found.append(_decoded(constraint))
    if not found:
        return None
    strict = any(constraint.strict for constraint in found)
    return _with_json_options(_only(found)._replace(strict=strict), body)


def read_strict(value: object, field: str) -> bool:
    """Return whether a schema is strict; null means that it is not.

    Raises:
        ValidationError: the value is neither null nor a boolean.
    """
    if value is not None and not isinstance(value, bool):
        raise ValidationError(f"`{field}` must be true or false. Given: {describe(value)}")
    return bool(value)


def _at_field(body: ConstraintFields, field: str) -> Any:  # noqa: ANN401 - of the field
    """Return the value of a field, or of a field of the object in it."""
    value: object = body
    for name in field.split("."):
        value = getattr(value, "json_schema" if name == "json" else name, None)
    return value


def _of_kind(kind: _Kind) -> Callable[[Any, str], StructuredOutput]:
    return lambda value, field: StructuredOutput(kind, value, field)


def _json_object(wanted: object, field: str) -> StructuredOutput | None:
    return StructuredOutput("json_object", None, field) if wanted else None


def _grammar(value: dict[str, Any] | str, field: str) -> StructuredOutput | None:
    """Read a grammar, or a format as Text Generation Inference writes it; an empty grammar is none."""
    if isinstance(value, dict):
        return _format(value, field)
    return StructuredOutput("lark", value, field) if value else None


def _json_format(value: dict[str, Any] | str, field: str) -> StructuredOutput | None:
    """Read a schema, or `json` for any object, as Ollama does; an empty string is none."""
    if value == "json":
        return StructuredOutput("json_object", None, field)
    return StructuredOutput("json_schema", value, field) if value != "" else None


def _response_format(wanted: ResponseFormat, field: str) -> StructuredOutput | None:
    return _format(wanted.model_dump(exclude_none=True, by_alias=True), field)


def _format(wanted: dict[str, Any], field: str) -> StructuredOutput | None:
    """Read a format: an object whose `type` tells which of its fields holds the constraint."""
    kind = wanted.get("type")
    if kind == "structural_tag":
        for name in ("structures", "triggers"):
            if name not in wanted and "format" not in wanted:
                raise ValidationError(f"`{field}.{name}` is required")
        return StructuredOutput("structural_tag", wanted, field)
    if kind != "text" and kind not in _FORMATS:
        given = quote("", kind) if isinstance(kind, str) else describe(kind)
        known = ", ".join(["text", *_FORMATS, "structural_tag"])
        raise ValidationError(f"`{field}.type` must be one of {known}. Given: {given}")
    language, places = _FORMATS.get(str(kind), ("json_schema", ()))
    if field == "text.format":
        places = ("schema", *places)
    found = [(place, value) for place in places if (value := _at(wanted, place)) is not None]
    roots = {place.partition(".")[0] for place in places}
    for name in _FORMAT_VALUES:
        if name in wanted and name not in roots:
            raise ValidationError(f"`{field}.{name}` needs another `type` than `{kind}`")
    if found:
        return _stated(wanted, field, language, found)
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput("json_object", None, field)
    raise ValidationError(f"`{field}.{places[0]}` is required")


def _stated(
    wanted: dict[str, Any], field: str, language: _Kind, found: list[tuple[str, object]]
) -> StructuredOutput:
    """Return the constraint that a format states, perhaps at several places, which are given with what is there."""
    types, expected = _TYPES[language]
    strict = any(read_strict(_at(wanted, name), f"{field}.{name}") for name in _STRICT_PLACES)
    stated: list[StructuredOutput] = []
    for place, value in found:
        # An object with a schema is none itself.
        if any(other.startswith(f"{place}.") for other, _ in found):
            continue
        if not isinstance(value, types):
            raise ValidationError(f"`{field}.{place}` must be {expected}. Given: {describe(value)}")
        stated.append(_decoded(StructuredOutput(language, value, f"{field}.{place}", strict)))
    return _only(stated)


def _only(stated: list[StructuredOutput]) -> StructuredOutput:
    """Return the first of several constraints, which are equal.

    Raises:
        ValidationError: they are not.
    """
    first = stated[0]
    for other in stated[1:]:
        if other.kind != first.kind or not _equal(other.value, first.value):
            raise ValidationError(f"`{first.field}` and `{other.field}` exclude each other")
    return first


def _equal(a: Any, b: Any) -> bool:  # noqa: ANN401 - JSON values
    """Return whether two JSON values are the same, for which `true` is not 1."""
    return bool(a == b) and msgspec.json.encode(a, order="deterministic") == msgspec.json.encode(
        b, order="deterministic"
    )


def _at(value: object, path: str) -> object:
    """Return the value at a path of keys; None if there is none."""
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


# Each row: a field and how its value is read.
_FIELDS: Final[tuple[tuple[str, Callable[[Any, str], StructuredOutput | None]], ...]] = (
    ("response_format", _response_format),
    ("text.format", _response_format),
    # Anthropic.
    ("output_config.format", _response_format),
    ("output_format", _response_format),
    ("structured_outputs.json", _of_kind("json_schema")),
    ("structured_outputs.regex", _of_kind("regex")),
    ("structured_outputs.choice", _of_kind("choice")),
    ("structured_outputs.grammar", _of_kind("lark")),
    ("structured_outputs.structural_tag", _of_kind("structural_tag")),
    ("structured_outputs.json_object", _json_object),
    # Older names in vLLM.
    ("guided_json", _of_kind("json_schema")),
    ("guided_regex", _of_kind("regex")),
    ("guided_choice", _of_kind("choice")),
    ("guided_grammar", _of_kind("lark")),
    # NVIDIA NIM and Dynamo.
    ("nvext.guided_json", _of_kind("json_schema")),
    ("nvext.guided_regex", _of_kind("regex")),
    ("nvext.guided_choice", _of_kind("choice")),
    ("nvext.guided_grammar", _of_kind("lark")),
    # SGLang and llama.cpp.
    ("json_schema", _of_kind("json_schema")),
    ("regex", _of_kind("regex")),
    ("ebnf", _of_kind("lark")),
    ("grammar", _grammar),
    ("structural_tag", _of_kind("structural_tag")),
    # Ollama.
    ("format", _json_format),
)


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


def _with_json_options(constraint: StructuredOutput, body: ConstraintFields) -> StructuredOutput:
    """Apply the fields that say how JSON is written. They have no effect on other constraints.

    Raises:
        ValidationError: it cannot be written so.
    """
    if constraint.kind not in ("json_schema", "json_object"):
        return constraint
    for field in _WHITESPACE_FIELDS:
        pattern = _at_field(body, field)
        if pattern is not None and not _allows_our_space(pattern):
            raise ValidationError(
                f"`{field}` must match a space and nothing, and have at most {_MAX_PATTERN_CHARACTERS} characters: "
                "JSON has a space after each `,` and `:` and no other white space"
            )
    if _at_field(body, "structured_outputs.disable_any_whitespace"):
        raise ValidationError(
            "`structured_outputs.disable_any_whitespace` must be false: JSON has a space after each `,` and `:` and no "
            "other white space"
        )
    if _at_field(body, "structured_outputs.disable_additional_properties"):
        return constraint._replace(value=_closed(constraint.value))
    return constraint


_WHITESPACE_FIELDS: Final = (
    "structured_outputs.whitespace_pattern",
    "guided_whitespace_pattern",
    "nvext.guided_whitespace_pattern",
)


def _allows_our_space(pattern: str) -> bool:
    """Return whether a pattern of white space in JSON matches what the text has."""
    if len(pattern) > _MAX_PATTERN_CHARACTERS:
        return False
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return bool(compiled.fullmatch(" ") and compiled.fullmatch(""))


def _closed(schema: Any) -> Any:  # noqa: ANN401 - a JSON value
    """Return a schema in which objects have declared properties only, unless it says otherwise."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        key: value if key in ("const", "enum", "default", "examples") else _closed(value)
        for key, value in schema.items()
    }
    if "properties" in schema and isinstance(schema["properties"], dict):
        closed.setdefault("additionalProperties", False)
    return closed
