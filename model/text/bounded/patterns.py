"""Tells patterns whose search takes a time proportional to the text from those that may take hours.

The tokenizers library searches with Oniguruma, which tries one way after another: `a+b` takes a time proportional to
the square of the number of `a`, `(a|a)*b` one that doubles with each.
"""

from __future__ import annotations

import re
from typing import Final

# Alternatives of patterns in wide use. That of spaces needs one after it which takes spaces without a line break.
_SPACES: Final = (r"\s+(?!\S)", r" +(?=\s)")
_LINES: Final = (r"\s*[\r\n]+", r"\s*[\r\n]")
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORDS: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _ENDINGS,
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _ENDINGS,
)
_MAX_WAYS: Final = 10_000
_ATOM: Final = re.compile(r"\\[pP]\{[^}]*\}|\\x\{[^}]*\}|\\[^1-9kgKGXyYRQ]|[^\\\[\](){}*+?|]")
# What follows a counted repetition repeats it: it does not make it lazy or possessive (Oniguruma's syntax of Ruby).
_QUANTIFIER: Final = re.compile(r"(?:([*+?])[?+]?|\{(\d{0,6})(,?)(\d{0,6})\})(?![*+?{])")
_GROUP: Final = re.compile(r"\((?:\?(?:[:=!>]|<[=!]|[ims]+:))?(?!\?|\*)")
_MAX_COUNT: Final = 1_000


def is_linear(pattern: str) -> bool:
    """Return whether a pattern is certain to take a time proportional to the length of any text.

    Each alternative must be known, or be such that the search goes back only a bounded number of times: no group is
    repeated, nothing in a group is repeated without end, and what follows such a repetition may be empty.
    """
    alternatives = _alternatives(pattern)
    if alternatives is None:
        return False
    takes_spaces = r"\s+" in alternatives or _SPACES[0] in alternatives
    return all(
        it in _SPACES or it in _WORDS or (it in _LINES and takes_spaces) or _is_simple(it)
        for it in alternatives
    )


def _alternatives(pattern: str) -> list[str] | None:
    """Return the alternatives of a pattern; None if it has something unknown."""
    found, start, depth, i = [], 0, 0, 0
    while i < len(pattern):
        size = _item(pattern, i)
        if size is None:
            return None
        if pattern[i] == "(":
            depth += 1
        elif pattern[i] == ")":
            depth -= 1
        elif pattern[i] == "|" and depth == 0:
            found.append(pattern[start:i])
            start = i + 1
        i += size
    return None if depth else [*found, pattern[start:]]


def _item(pattern: str, i: int) -> int | None:
    """Return the length of the atom, the quantifier, or the beginning or end of a group at a place; None if unknown."""
    if pattern[i] == "[":
        return _class_length(pattern, i)
    if pattern[i] in ")|":
        return 1
    form = _GROUP if pattern[i] == "(" else _QUANTIFIER if pattern[i] in "*+?{" else _ATOM
    found = form.match(pattern, i)
    return None if found is None else len(found[0])


def _class_length(pattern: str, i: int) -> int | None:
    depth, at = 0, i
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth += 1
        elif pattern[at] == "]":
            depth -= 1
            if depth == 0:
                return at + 1 - i
        at += 1
    return None


def _is_simple(alternative: str) -> bool:
    items, i = [], 0
    while i < len(alternative):
        size = _item(alternative, i)
        assert size is not None
        items.append(alternative[i : i + size])
        i += size
    return _repeats_little(items) and _never_goes_back(items)


def _repeats_little(items: list[str]) -> bool:
    """Return whether no group is repeated, and the ways to match what comes before an endless repetition are few."""
    depth, ways, last = 0, 1, ""
    for item in items:
        depth += (item[0] == "(") - (item == ")")
        if found := _QUANTIFIER.fullmatch(item):
            sign, least, comma, most = found.groups()
            if last == ")" and sign != "?":
                return False
            if _is_endless(item):
                if depth:
                    return False
            elif sign:
                ways *= 2
            else:
                count = int(most if comma else least)
                ways *= count - int(least or 0) + 1
                if count > _MAX_COUNT:
                    return False
        elif item == "|":
            ways *= 2
        last = item
    return ways <= _MAX_WAYS


def _never_goes_back(items: list[str]) -> bool:
    """Return whether all that follows an endless repetition may be missing, so that it cannot fail."""
    i = next((i for i, item in enumerate(items) if _is_endless(item)), len(items)) + 1
    while i < len(items):
        depth = 0
        while True:  # one atom, or one group
            depth += (items[i][0] == "(") - (items[i] == ")")
            i += 1
            if depth == 0:
                break
        found = _QUANTIFIER.fullmatch(items[i]) if i < len(items) else None
        if found is None or not (
            found[1] in ("*", "?") or (found[2] is not None and not int(found[2] or 0))
        ):
            return False
        i += 1
    return True


def _is_endless(item: str) -> bool:
    found = _QUANTIFIER.fullmatch(item)
    return found is not None and (found[1] in ("*", "+") or bool(found[3] and not found[4]))
