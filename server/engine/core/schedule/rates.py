"""Rates of the engine under load, from which the front ends estimate how long a request will wait."""

from __future__ import annotations

import collections
from typing import Final

_FIRST_SECONDS: Final = 0.5
_SECONDS: Final = 5.0
"""Shortest windows, while the rate is not known and later; only the time that is measured passes."""
_WINDOWS: Final = 2
"""Windows whose highest rate counts. One alone may have a slow moment, as when kernels are loaded after the start."""


class Rate:
    """An amount per second, the higher of the last two windows: a slow moment says little about the next minute.

    Attributes:
        value: the rate; 0.0 until two windows were measured.
    """

    __slots__ = ("_amount", "_seconds", "_windows", "value")

    def __init__(self) -> None:
        self._amount = 0
        self._seconds = 0.0
        self._windows: collections.deque[float] = collections.deque(maxlen=_WINDOWS)
        self.value = 0.0

    def add(self, amount: int, seconds: float) -> None:
        """Count what was computed in some time."""
        self._amount += amount
        self._seconds += seconds
        is_known = len(self._windows) == _WINDOWS
        if self._seconds >= (_SECONDS if is_known else _FIRST_SECONDS) and self._amount:
            self._windows.append(self._amount / self._seconds)
            self._amount, self._seconds = 0, 0.0
            if len(self._windows) == _WINDOWS:
                self.value = max(self._windows)
