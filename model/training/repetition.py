"""Shortens runs of lines of one form, as in long tests: they teach a small model to repeat itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

LONGEST_RUN = 4
"""Lines kept of a run of lines of one form."""

_CHANGING = re.compile(r"'[^'\\]*'|\"[^\"\\]*\"|\w+")
_IMPORT = re.compile(r"\s*(from|import)\s")


def without_runs(text: str) -> str:
    """Return a source file with at most `LONGEST_RUN` neighbouring lines of one form.

    Lines of one form differ only in names, numbers and strings: `f.write(a, 1)` and `g.close(b, 22)`. Imports are kept.

    Args:
        text: parses as Python.

    Returns:
        Text that parses; the text itself if it would not without the lines.
    """
    kept: list[str] = []
    lines = text.splitlines(keepends=True)
    repeated = repeated_lines(lines)
    if not any(repeated):
        return text
    kept = [line for line, is_repeated in zip(lines, repeated, strict=True) if not is_repeated]
    shorter = "".join(kept)
    try:
        ast.parse(shorter)
    except (SyntaxError, ValueError):
        return text
    return shorter


def repeated_lines(lines: Iterable[str]) -> list[bool]:
    """Return for each line whether it is further down than `LONGEST_RUN` in a run of lines of one form."""
    found = []
    form, length = "", 0
    for line in lines:
        its_form = _form(line)
        length = length + 1 if its_form and its_form == form else 1
        form = its_form
        found.append(length > LONGEST_RUN)
    return found


def _form(line: str) -> str:
    """Return what the lines of a run have in common, with their indentation; empty for a line of no run."""
    if not line.strip() or _IMPORT.match(line):
        return ""
    return _CHANGING.sub("x", line.rstrip())
