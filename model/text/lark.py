"""Text of Lark grammars: literals, JSON schemas, and the form of generated JSON. Does not import llguidance."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from model.errors import GrammarError

MAX_TEXT_CHARACTERS: Final = 128 * 1024
"""Longest constraint, as JSON. The longest of MaskBench's schemas in common use are a third of it."""
MAX_DEPTH: Final = 64
"""Deepest nesting of a constraint's JSON."""

JSON_OPTIONS: Final = {
    # White space as `json.dumps` writes it. A free choice lets a small model add white space up to its token limit, and
    # leaves hardly any token forced.
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,  # keywords that are not implemented are errors
    "json_allowed_escapes": None,
    "json_allow_general_unicode_escapes": False,
}


def quote(text: str) -> str:
    """Return a literal."""
    # The lexer of Lark grammars refuses a raw DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def pattern(expression: str) -> str:
    """Return the terminal for a regular expression."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", expression, flags=re.DOTALL)
    return "/" + escaped.replace("\r", r"\r").replace("\n", r"\n") + "/"


def json_rule(schema: dict[str, Any] | bool) -> str:
    """Return the expression for JSON that follows a schema.

    Raises:
        GrammarError: the schema is too long, too deeply nested, or has a keyword of the library's own.
    """
    check_size(schema)
    if isinstance(schema, bool):
        schema = {"allOf": [schema]}
    if "x-guidance" in schema:
        raise GrammarError("the JSON schema keyword `x-guidance` is not supported")
    options = {key: option for key, option in JSON_OPTIONS.items() if option is not None}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def check_size(value: object) -> None:
    """Check the length and the nesting of a constraint, without recursion.

    Raises:
        GrammarError: it exceeds a limit.
    """
    size, depth, level = 0, 0, [value]
    while level:
        depth += 1
        below: list[object] = []
        for item in level:
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, dict):
                size += sum(map(len, item))
                below += item.values()
            elif isinstance(item, list):
                below += item
            size += 1
        if size > MAX_TEXT_CHARACTERS:
            raise GrammarError(f"must have at most {MAX_TEXT_CHARACTERS} characters")
        if depth > MAX_DEPTH:
            raise GrammarError(f"must be nested at most {MAX_DEPTH} levels deep")
        level = below
