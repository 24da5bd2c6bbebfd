"""Tells patterns whose search takes a time proportional to the text from those that may take hours.

The tokenizers library searches with Oniguruma, which tries one way after another: `a+b` takes a time proportional to
the square of the number of `a`, `(a|a)*b` one that doubles with each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

# Alternatives of patterns in wide use.
_SPACES: Final = (r"\s+(?!\S)", r" +(?=\s)")
_LINES: Final = (r"\s*[\r\n]+", r"\s*[\r\n]")
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORDS: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _ENDINGS,
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _ENDINGS,
)
_KNOWN_STEPS: Final = 30.0
MAX_SEARCH_STEPS: Final = 500
"""Steps of the search at one place of a text; the library takes about 10 ns for each."""

# Other escapes are unknown, among them `\c[`, which is one character and no beginning of a class.
_ESCAPE: Final = re.compile(
    r"\\(?:[pP]\{[^}]*\}|x\{[^}]*\}|[pPxusSdDwWhHbBAzZnrtfvae0]|[^0-9A-Za-z])"
)
_ATOM: Final = re.compile(_ESCAPE.pattern + r"|[^\\\[\](){}*+?|]")
# What follows a counted repetition repeats it: it does not make it lazy or possessive (Oniguruma's syntax of Ruby).
_QUANTIFIER: Final = re.compile(
    r"(?:([*+?])[?+]?|\{(?:(\d{1,6})(?:(,)(\d{0,6}))?|(,)(\d{1,6}))\})(?![*+?{])"
)
_GROUP: Final = re.compile(r"\((?:\?(?:[:=!>]|<[=!]|[ims]+:))?(?!\?|\*)")


def is_linear(pattern: str) -> bool:
    """Return whether a pattern is certain to take a time proportional to the length of any text."""
    return steps_at_a_place(pattern) <= MAX_SEARCH_STEPS


def steps_at_a_place(pattern: str) -> float:
    """Return how many steps a search takes at most for each character of any text; infinite if it is not known.

    Each alternative must be known, or be such that the search goes back only a bounded number of times: no group is
    repeated, nothing in a group is repeated without end, and what follows such a repetition may be empty.
    """
    alternatives = _alternatives(pattern)
    if alternatives is None:
        return math.inf
    following = [*alternatives[1:], None]
    return sum(map(_steps, alternatives, following))


def _steps(alternative: str, following: str | None) -> float:
    """Return the steps of an alternative. One that may read a whole run in vain needs one that takes the run next."""
    if alternative in _SPACES or alternative == _WORDS[1]:
        return _KNOWN_STEPS
    if alternative in _LINES:
        return _KNOWN_STEPS if following in (r"\s+", _SPACES[0]) else math.inf
    if alternative == _WORDS[0]:
        return _KNOWN_STEPS if following == _WORDS[1] else math.inf
    items = list(_items(alternative))
    steps = _Steps(items).of_all()
    return steps if steps < math.inf and _never_goes_back(items) else math.inf


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
            if depth < 0:
                return None
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
            escape = _ESCAPE.match(pattern, at)
            if escape is None:
                return None
            at += len(escape[0]) - 1
        elif pattern[at] == "[":
            depth += 1
        elif pattern[at] == "]":
            depth -= 1
            if depth == 0:
                return at + 1 - i
        at += 1
    return None


def _items(alternative: str) -> Iterator[str]:
    i = 0
    while i < len(alternative):
        size = _item(alternative, i)
        assert size is not None
        yield alternative[i : i + size]
        i += size


class _Steps:
    """Counts the steps of a search at one place: how many ways there are, and what each costs.

    Infinite if a group is repeated, or something in a group without end.

    Args:
        items: an alternative's.
    """

    def __init__(self, items: list[str]) -> None:
        self._items, self._at = items, 0

    def of_all(self) -> float:
        """Return the steps of all items."""
        return self._of_group(depth=0)[1]

    def _of_group(self, depth: int) -> tuple[float, float]:
        """Return the ways and steps of the alternatives up to the end of a group."""
        all_ways, all_steps, ways, steps = 0.0, 0.0, 1.0, 0.0
        while self._at < len(self._items) and (item := self._items[self._at]) != ")":
            self._at += 1
            if item == "|":
                all_ways, all_steps, ways, steps = all_ways + ways, all_steps + steps, 1.0, 0.0
                continue
            is_group = item.startswith("(")
            if is_group:
                its_ways, its_steps = self._of_group(depth + 1)
                self._at += 1  # its end
            else:
                its_ways, its_steps = 1.0, 1.0
            if self._at < len(self._items) and (found := _quantifier(self._items[self._at])):
                self._at += 1
                its_ways, its_steps = _repeated(found, its_ways, its_steps, is_group, depth)
            steps += ways * its_steps
            ways *= its_ways
        return all_ways + ways, all_steps + steps


def _repeated(
    found: tuple[int, float], ways: float, steps: float, is_group: bool, depth: int
) -> tuple[float, float]:
    """Return the ways and steps of something that is repeated so many times."""
    least, most = found
    if least == 0 and most == 1:
        return ways + 1, steps + 1
    if is_group or most < least:  # the latter is possessive for some versions, an error for others
        return math.inf, math.inf
    if most == math.inf:  # what follows cannot fail
        return (1.0, 1.0 + least) if not depth else (math.inf, math.inf)
    return most - least + 1, most


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
        found = _quantifier(items[i]) if i < len(items) else None
        if found is None or found[0]:
            return False
        i += 1
    return True


def _is_endless(item: str) -> bool:
    found = _quantifier(item)
    return found is not None and found[1] == math.inf


def _quantifier(item: str) -> tuple[int, float] | None:
    """Return how often at least and at most something is repeated; None for what is no quantifier."""
    found = _QUANTIFIER.fullmatch(item)
    if found is None:
        return None
    sign, least, comma, most, _, only_most = found.groups()
    if sign:
        return int(sign == "+"), 1 if sign == "?" else math.inf
    if only_most:
        return 0, int(only_most)
    return int(least), int(most) if most else math.inf if comma else int(least)
