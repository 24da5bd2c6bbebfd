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
_FASTER: Final = 2.0
"""A window that is so many times as fast as the rate ends after `_FIRST_SECONDS`: the work has changed. While requests
are refused for a rate that is too low, there may be no queue for longer.
"""


class Rate:
    """An amount per second, the higher of the last two windows: a slow moment says little about the next minute.

    Attributes:
        value: the rate; 0.0 until enough was measured.
    """

    __slots__ = ("_amount", "_most_pending", "_seconds", "_windows", "value")

    def __init__(self) -> None:
        self._amount = self._seconds = self._most_pending = 0.0
        self._windows: collections.deque[tuple[float, float]] = collections.deque(maxlen=_WINDOWS)
        self.value = 0.0

    def add(self, amount: float, seconds: float, pending: float = 0.0) -> None:
        """Count an amount that took some time.

        Args:
            amount: what was completed.
            seconds: time that it took.
            pending: what was begun and is not complete. A window does not end before as much is, because what began
                together ends together: the sequences of a burst all end late. Until then, the rate is at most what it
                would be if all of it were complete now, in this window and together with the one before.
        """
        self._amount += amount
        self._seconds += seconds
        self._most_pending = max(self._most_pending, pending)
        least = _SECONDS if len(self._windows) == _WINDOWS else _FIRST_SECONDS
        ends = self._seconds >= least and 0 < self._amount >= pending
        if ends or self._is_much_faster():
            self._windows.append((self._amount, self._seconds))
            self.interrupt()
        found = math.inf
        if len(self._windows) == _WINDOWS:
            found = max(done / took for done, took in self._windows)
        if pending:
            for done, took in ((0.0, 0.0), *list(self._windows)[-1:]):
                if took + self._seconds >= _FIRST_SECONDS:
                    complete = done + self._amount + pending
                    found = min(found, complete / (took + self._seconds))
        if found < math.inf:
            self.value = found

    def interrupt(self) -> None:
        """Begin a new window: what comes next does not follow what was counted last."""
        self._amount = self._seconds = self._most_pending = 0.0

    def _is_much_faster(self) -> bool:
        return (
            self._seconds >= _FIRST_SECONDS
            and self._amount >= 2 * self._most_pending
            and 0.0 < _FASTER * self.value * self._seconds < self._amount
        )
