"""Marks for parametrized tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(fast: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return `cases` as parameters named by `str`; all but those in `fast` are marked slow."""
    fast = list(fast)
    return [
        pytest.param(case, id=str(case), marks=() if case in fast else pytest.mark.slow)
        for case in cases
    ]
