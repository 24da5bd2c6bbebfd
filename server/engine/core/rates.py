"""Rates of the engine under load, from which the front ends estimate how long a request will wait."""

from __future__ import annotations

from typing import Final

_MEMORY_SECONDS: Final = 10.0
"""Time after which a measurement counts 1/e; only the time that is measured passes."""


class Rate:
    """An exponentially weighted mean of an amount per second.

    Attributes:
        value: the mean; 0.0 until something was measured.
    """

    __slots__ = ("_amount", "_seconds", "value")

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0
        self.value = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Count an amount that took some time."""
        kept = max(0.0, 1.0 - seconds / _MEMORY_SECONDS)
        self._amount = kept * self._amount + amount
        self._seconds = kept * self._seconds + seconds
        if self._seconds > 0.0:
            self.value = self._amount / self._seconds
