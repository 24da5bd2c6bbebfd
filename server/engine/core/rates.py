"""Rates of the engine under load, from which the front ends estimate how long a request will wait."""

from __future__ import annotations

import collections
import math
from typing import Final

_FIRST_SECONDS: Final = 0.5
_SECONDS: Final = 5.0
"""Shortest windows, while the rate is not known and later; only the time that is measured passes."""
_WINDOWS: Final = 2
"""Windows whose highest rate counts. One alone may have a slow moment, as when kernels are loaded after the start."""


class Rate:
    """An amount per second, the higher of the last two windows: a slow moment says little about the next minute.

    Attributes:
        value: the rate; 0.0 until enough was measured.
    """

    __slots__ = ("_amount", "_seconds", "_windows", "value")

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0
        self._windows: collections.deque[tuple[float, float]] = collections.deque(maxlen=_WINDOWS)
        self.value = 0.0

    def add(self, amount: float, seconds: float, pending: float = 0.0) -> None:
        """Count an amount that took some time.

        Args:
            amount: what was completed.
            seconds: time that it took.
            pending: what was begun and is not complete. A window does not end before as much is, because what began
                together ends together: the sequences of a burst all end late. Until then, the rate is at most what it
                would be if all of it were complete now, together with the window before.
        """
        self._amount += amount
        self._seconds += seconds
        least = _SECONDS if len(self._windows) == _WINDOWS else _FIRST_SECONDS
        if self._seconds >= least and 0 < self._amount >= pending:
            self._windows.append((self._amount, self._seconds))
            self.interrupt()
        found = math.inf
        if len(self._windows) == _WINDOWS:
            found = max(done / took for done, took in self._windows)
        if pending:
            done, took = self._windows[-1] if self._windows else (0.0, 0.0)
            took += self._seconds
            if took >= _FIRST_SECONDS:
                found = min(found, (done + self._amount + pending) / took)
        if found < math.inf:
            self.value = found

    def interrupt(self) -> None:
        """Begin a new window: what comes next does not follow what was counted last."""
        self._amount = self._seconds = 0.0
