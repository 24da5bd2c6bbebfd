"""Checks the types, fields and fixed ranges of a request body. The error names the field, its value and the limit.

The message contains no text from the client except names of fields.
"""

from __future__ import annotations

import difflib
import functools
from typing import TYPE_CHECKING, TypeVar

import pydantic

from server.errors import ValidationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

ModelT = TypeVar("ModelT", bound=pydantic.BaseModel)

_MOST_PROBLEMS = 5
_LONGEST_NAME = 60
_LONGEST_NUMBER = 40
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}
_REFUSALS = {
    "missing": "is required",
    "string_too_short": "cannot be empty",
    "too_short": "cannot be empty",
    "extra_forbidden": "is an unknown field",
    "union_tag_not_found": "must have the key `type`: json, regex or json_schema",
    "union_tag_invalid": "must have one of the types json, regex and json_schema",
}
_LENGTHS = {
    "too_long": "supports up to {} entries",
    "string_too_long": "must have at most {} characters",
}
_BOUNDS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}


@functools.cache
def fields_of(model: type[pydantic.BaseModel]) -> Mapping[str, FieldInfo]:
    """Return the fields of a model by name; pydantic's `model_fields` takes longer than checking a small body."""
    return model.model_fields


def parse(model: type[ModelT], body: object) -> ModelT:
    """Check a decoded JSON body and convert it to a model.

    Raises:
        ValidationError: the body is not an object, or a field is unknown, missing, of the wrong type or outside
            its range.
    """
    if not isinstance(body, dict):
        raise ValidationError(f"the body must be a JSON object. Given: {describe(body)}")
    # Checked here because pydantic would build an error record for every unknown key, even for a million of them.
    unknown = _unknown_fields(model, body, "")
    parameters = body.get("parameters")
    nested = _model_of_parameters(model)
    if isinstance(parameters, dict) and nested is not None:
        unknown += _unknown_fields(nested, parameters, "parameters.")
    if unknown:
        raise ValidationError(_sentence(unknown))
    try:
        return model.model_validate(body)
    except pydantic.ValidationError as error:
        problems = error.errors(include_url=False)
        raise ValidationError(_sentence([_problem(problem) for problem in problems])) from None


def unsupported(field: str, value: object) -> str:
    """Return the message for a field of TGI that this server does not support."""
    return f"`{field}` is not supported: leave it out or send null. Given: {describe(value)}"


def describe(value: object) -> str:
    """Describe a JSON value: numbers and constants by their value, anything else by its type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        text = repr(value)
        return text if len(text) <= _LONGEST_NUMBER else f"{text[:_LONGEST_NUMBER]}..."
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"


def _sentence(problems: list[str]) -> str:
    shown = "; ".join(problems[:_MOST_PROBLEMS])
    more = len(problems) - _MOST_PROBLEMS
    return shown if more <= 0 else f"{shown}; and {more} more"


@functools.cache
def _model_of_parameters(model: type[pydantic.BaseModel]) -> type[pydantic.BaseModel] | None:
    """Return the model in `parameters: Model | None`; None if there is no such field."""
    field = model.model_fields.get("parameters")
    if field is None:
        return None
    options = (field.annotation, *getattr(field.annotation, "__args__", ()))
    return next(o for o in options if isinstance(o, type) and issubclass(o, pydantic.BaseModel))


def _unknown_fields(
    model: type[pydantic.BaseModel], body: dict[str, object], prefix: str
) -> list[str]:
    known = fields_of(model)
    if body.keys() <= known.keys():
        return []
    unknown = [name for name in body if name not in known]
    problems = [
        f"unknown field {quote(prefix, name)}{_hint(model, name, prefix)}"
        for name in unknown[:_MOST_PROBLEMS]
    ]
    return problems + unknown[_MOST_PROBLEMS:]  # the message only counts these


def _hint(model: type[pydantic.BaseModel], name: str, prefix: str) -> str:
    nested = None if prefix else _model_of_parameters(model)
    if nested is not None and name in nested.model_fields:
        return f"; did you mean `parameters.{name}`?"
    close = difflib.get_close_matches(name[:_LONGEST_NAME], model.model_fields, n=1)
    return f"; did you mean `{prefix}{close[0]}`?" if close else ""


def quote(prefix: str, name: str) -> str:
    """Return `prefix` and a name from the client, shortened and in backquotes.

    Control characters are escaped, so that a name cannot forge a log line.
    """
    shown = prefix + (name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}...")
    return f"`{shown if shown.isprintable() else shown.encode('unicode_escape').decode('ascii')}`"


def _problem(error: ErrorDetails) -> str:
    location = [
        str(part) for part in error["loc"] if part != "parameters" or len(error["loc"]) == 1
    ]
    field = quote("", ".".join(location))
    kind, value, context = error["type"], error.get("input"), error.get("ctx", {})
    if kind in _LENGTHS:
        given = context.get("actual_length") or len(str(value))
        return f"{field} {_LENGTHS[kind].format(context['max_length'])}. Given: {given}"
    if kind in _REFUSALS:
        return f"{field} {_REFUSALS[kind]}"
    if kind == "none_required":
        return unsupported(location[-1], value)
    if kind in _BOUNDS:
        key, sign = _BOUNDS[kind]
        limit = context[key]
        shown = f"{limit:g}" if isinstance(limit, float) else limit
        return f"{field} must be {sign} {shown}. Given: {describe(value)}"
    # The context has it if the value must be one of some constants, or of some types.
    if expected := context.get("expected", _EXPECTED.get(kind)):
        return f"{field} must be {expected}. Given: {describe(value)}"
    return f"{field} is not valid. Given: {describe(value)}"
