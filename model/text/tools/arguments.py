"""The arguments of calls in a conversation: JSON objects, or the text of one that was cut off."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator
from typing import Any, Final

_KEY_OF_TEXT: Final = "arguments"
"""The key under which an object holds a text that is no beginning of an object."""
_WORDS: Final = ("true", "false", "null")
# What JSON cannot end a string with: an escape that is cut off, or the first half of a surrogate pair.
_FIRST_HALF: Final = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_OPEN_ESCAPE: Final = re.compile(rf"({_FIRST_HALF})?\\(u[0-9a-fA-F]{{0,3}})?\Z|{_FIRST_HALF}\Z")
_OF_NUMBERS: Final = string.digits + ".eE+-"
_MOST_CUT: Final = (
    3  # a number that is cut off is one up to there, but for an exponent without digits
)


def read_arguments(value: object) -> dict[str, Any] | str:
    """Return the arguments of a call: an object if they are a complete one, otherwise their text.

    Args:
        value: a JSON value: an object, the text of one, or anything else. Nothing is an object without keys.
    """
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        return {} if value is None else json.dumps(value, ensure_ascii=False)
    if not value.strip():
        return {}
    decoded = _decode(value)
    if isinstance(decoded, dict):
        return decoded
    return {} if value.strip() == "null" else value


def complete_arguments(text: str) -> dict[str, Any]:
    """Return an object that holds everything that is in the text of arguments that were cut off.

    A string that is cut off ends there, and a key without a value has null.
    """
    closing, in_string = _open_parts(text)
    for ending in _endings(text, in_string=in_string):
        decoded = _decode(ending + closing)
        if isinstance(decoded, dict):
            return decoded
    return {_KEY_OF_TEXT: text}


def _decode(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _open_parts(text: str) -> tuple[str, bool]:
    """Return what closes the objects and lists that are open at the end, and whether a string is open there."""
    closing: list[str] = []
    in_string = escaped = False
    for character in text:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "{[":
            closing.append("}" if character == "{" else "]")
        elif character in "}]" and closing:
            closing.pop()
    return "".join(reversed(closing)), in_string


def _endings(text: str, *, in_string: bool) -> Iterator[str]:
    """Yield texts whose last value, key or separator is complete; some are not valid JSON."""
    text = _without_open_escape(text) + '"' if in_string else text.rstrip()
    yield text
    yield f"{text}: null"  # after a key
    yield text.removesuffix(",")
    yield f"{text} null"  # after a colon
    before = text.rstrip(string.ascii_lowercase)
    yield from (before + word for word in _WORDS if word.startswith(text[len(before) :]))
    before = text.rstrip(_OF_NUMBERS)
    for cut in range(1, min(_MOST_CUT, len(text) - len(before)) + 1):
        yield text[:-cut]
    yield f"{before}null"


def _without_open_escape(text: str) -> str:
    """Return the text of an open string without an escape that is cut off at its end."""
    found = _OPEN_ESCAPE.search(text)
    if found is None:
        return text
    before = text[: found.start()]
    backslashes = len(before) - len(before.rstrip("\\"))
    return text if backslashes % 2 else before
