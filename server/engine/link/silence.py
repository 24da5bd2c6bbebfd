"""Measures a silence by the clock of the process that watches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_MOST_SECONDS: Final = 1.0


def tick_seconds(hang_seconds: float) -> float:
    """Return the time between two looks at something that may be silent for `hang_seconds`."""
    return min(_MOST_SECONDS, hang_seconds / 8)


class SilenceTimer:
    """Adds up a silence from tick to tick; the watcher calls `tick` about once per period.

    A tick that comes late counts for at most two periods: the watcher did not run meanwhile, and what it watches was
    probably paused too, with the whole container or machine. A watcher that was paused for an hour has therefore waited
    for two periods, not for an hour.

    Attributes:
        seconds: duration of the silence.

    Args:
        period: seconds between two ticks.
        clock: monotonic, in seconds.
    """

    def __init__(self, period: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self._period = period
        self._clock = clock
        self._ticked = clock()

    def tick(self, *, alive: bool) -> float:
        """Note whether there was a sign of life since the last tick; return the duration of the silence."""
        now = self._clock()
        passed, self._ticked = min(now - self._ticked, 2 * self._period), now
        self.seconds = 0.0 if alive else self.seconds + passed
        return self.seconds
