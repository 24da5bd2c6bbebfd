"""Finds texts in a text: special tokens, and the marks that stand for them."""

from __future__ import annotations

import re
from collections.abc import Iterable


def alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the texts, the longest first, as the tokenizers library does."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
