"""Checks values against JSON schemas. May take very long: call it where that ends the process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend

from model.text.schema.modern import ModernSchema, Schema, pointer
from model.text.schema.patterns import is_found

_MAX_CHARACTERS: Final = 200


def _pattern(_: object, pattern: str, value: object, __: object) -> Iterator[ValidationError]:
    if isinstance(value, str) and is_found(pattern, value) is False:
        yield ValidationError("does not match its pattern")


_Validator: Final = extend(Draft202012Validator, {"pattern": _pattern})  # type: ignore[no-untyped-call]


def validator(node: Schema, definitions: Mapping[str, Schema]) -> Validator:
    """Return a validator of a schema of draft 2020-12."""
    if isinstance(node, dict) and definitions:
        node = {**node, "$defs": definitions}
    found: Validator = _Validator(node)
    return found


def first_violation(schema: ModernSchema, value: Any) -> str | None:  # noqa: ANN401 - a JSON value
    """Return where and how a value violates a schema, None if it does not."""
    checker = validator(schema.root, schema.definitions)
    for error in checker.iter_errors(value):
        place = pointer("", *error.absolute_path) or "/"
        text = f"`{error.validator}` at `{place}`" if error.validator else f"at `{place}`"
        text = text[:_MAX_CHARACTERS]
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return None
