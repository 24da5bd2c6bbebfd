"""Regular expressions from a checkpoint, which must not take long: whoever wrote them may mean harm."""

from __future__ import annotations

import functools
import re
from typing import Final

from model.errors import UnsupportedModelError
from model.json_input import shorten

_MOST_CHARACTERS: Final = 1000
_MOST_STEPS: Final = 1 << 22
_NAME_LENGTH: Final = 64
"""Characters of the name of a module, about."""
_PARTS: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[:=!<]*|\{\d*,?\d*\}|.", re.DOTALL)
_REPEATS: Final = ("*", "+", "?")


@functools.lru_cache(maxsize=1024)
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression that matches names of modules in a bounded number of steps.

    Raises:
        UnsupportedModelError: it is none, or could take too many steps.
    """
    if len(pattern) > _MOST_CHARACTERS:
        raise UnsupportedModelError(
            f"the pattern {shorten(pattern)} has {len(pattern)} characters; at most {_MOST_CHARACTERS} are read"
        )
    if _steps(pattern) > _MOST_STEPS:
        raise UnsupportedModelError(
            f"the pattern {shorten(pattern)} may take too many steps: it has too many repeats and alternatives, or "
            "repeats a group"
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UnsupportedModelError(
            f"{shorten(pattern)} is no regular expression: {error}"
        ) from None


def _steps(pattern: str) -> float:
    """Return a bound of the ways in which a pattern can match a name; infinite if it repeats a group."""
    steps, alternatives, previous = 1.0, [1], ""
    for part in _PARTS.findall(pattern):
        if part in _REPEATS or (part.startswith("{") and len(part) > 1):
            if previous == ")" and part != "?":
                return float("inf")
            # A second sign after a repeat only says how it is tried.
            is_new = previous not in _REPEATS and not previous.startswith("{")
            steps *= (2 if part == "?" else _NAME_LENGTH) if is_new else 1
        elif part.startswith("("):
            alternatives.append(1)
        elif part == "|":
            alternatives[-1] += 1
        elif part == ")" and len(alternatives) > 1:
            steps *= alternatives.pop()
        previous = part
    for count in alternatives:
        steps *= count
    return steps
