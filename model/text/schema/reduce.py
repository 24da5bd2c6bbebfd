"""A client's JSON schema, from its JSON to what a grammar enforces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

from model.errors import GrammarError
from model.text.schema.lower import LoweredSchema, Unenforced, lower_schema
from model.text.schema.modern import ModernSchema, read_schema

_MOST_NAMED: Final = 5
_MAX_PLACE: Final = 120


def read(value: object) -> ModernSchema:
    """Read a schema, an object or boolean or its JSON.

    Raises:
        GrammarError: it is not valid.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"is not valid JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise GrammarError("must be a JSON schema, an object")
    if isinstance(value, dict) and "x-guidance" in value:
        raise GrammarError("the JSON schema keyword `x-guidance` is not supported")
    try:
        return read_schema(value)
    except RecursionError:
        raise GrammarError("is too deeply nested") from None


def lower(value: object, *, strict: bool = False, level: int = 0) -> LoweredSchema:
    """Reduce a schema to what a grammar enforces.

    Args:
        value: an object or boolean, or its JSON.
        strict: whether a keyword that is left out is an error.
        level: see `lower_schema`.

    Raises:
        GrammarError: the schema is not valid, or it is strict and not all of it can be enforced.
    """
    modern = read(value)
    try:
        lowered = lower_schema(modern, level)
    except (OverflowError, ValueError):
        raise GrammarError("must have no integer of more than 64 bits") from None
    if strict:
        refuse(lowered.unenforced)
    return lowered


def refuse(unenforced: Iterable[Unenforced]) -> None:
    """Raise an error for the keywords that are not enforced, if there are any.

    Raises:
        GrammarError: it names them and their places.
    """
    found = list(unenforced)
    if not found:
        return
    names = sorted({item.keyword for item in found})
    shown = ", ".join(f"`{name}`" for name in names)
    noun, verb = ("keyword", "is") if len(names) == 1 else ("keywords", "are")
    raise GrammarError(f"the JSON schema {noun} {shown} {verb} not supported (at {_places(found)})")


def describe(unenforced: Iterable[Unenforced]) -> tuple[str, ...]:
    """Return a phrase that names the keywords that a grammar does not enforce; nothing if there are none."""
    found = list(unenforced)
    return (f"the grammar does not enforce {_places(found)}",) if found else ()


def _places(found: list[Unenforced]) -> str:
    shown = [f"`{printable(item.place)}`" for item in found[:_MOST_NAMED]]
    more = len(found) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def printable(text: str) -> str:
    """Return a text on one line, cut off if it is long."""
    if len(text) > _MAX_PLACE:
        text = text[: _MAX_PLACE // 2] + "..." + text[-_MAX_PLACE // 2 :]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
