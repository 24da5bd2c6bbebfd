"""What the engine's loop is doing and how long it may take, for a watchdog on another thread."""

from __future__ import annotations

import enum
import math
from typing import Final

_SLOW_FACTOR: Final = 20.0
"""A step counts as hung if it takes this many times as long as steps of its size have taken lately."""
_FIRST_USE_FACTOR: Final = 10.0
"""Loading, compiling, recording and the first step may take this many times as long as an ordinary short step."""
_DECAY: Final = 0.01
"""Share of a faster step in the expected duration of its size; a slower one counts at once and in full."""
_SIZES: Final = 32


class Activity(enum.Enum):
    """What the loop is doing; the values complete the sentence "the engine is ..."."""

    STARTING = "starting"
    IDLE = "idle"
    MESSAGES = "handling messages"
    SCHEDULING = "scheduling a step"
    LAUNCHING = "launching a step"
    WAITING = "waiting for the results of a step"
    RECORDING = "recording a step"


class Progress:
    """The progress of the engine's loop. The loop's thread writes it, a watchdog's thread reads it.

    Attributes:
        activity: what the loop is doing.
        count: grows whenever the loop makes progress.
        num_tokens: of the step that it is launching or waiting for; 0 if there is none.
    """

    __slots__ = ("_expected", "activity", "count", "num_tokens")

    def __init__(self) -> None:
        self.activity = Activity.STARTING
        self.count = 0
        self.num_tokens = 0
        self._expected = [0.0] * _SIZES  # seconds of a step, by the bits of its number of tokens

    def begin(self, activity: Activity, num_tokens: int = 0) -> None:
        """Note that an activity begins."""
        self.count += (
            1  # first, see `EngineWatch.check` in `server.engine.link.engine_process.watchdog`
        )
        self.activity = activity
        self.num_tokens = num_tokens

    def end_step(self, num_tokens: int, seconds: float) -> None:
        """Note the duration of a step, from which the limits of later ones follow."""
        size = num_tokens.bit_length()
        expected = self._expected[size]
        if seconds < expected:
            seconds = expected + _DECAY * (seconds - expected)
        self._expected[size] = seconds

    def allowed_seconds(self, hang_seconds: float) -> float:
        """Return how long the activity may take before it counts as hung.

        Args:
            hang_seconds: the limit of a step that is expected to be short.
        """
        if self.activity is Activity.IDLE:
            return math.inf
        if self.activity in (Activity.STARTING, Activity.RECORDING):
            return _FIRST_USE_FACTOR * hang_seconds
        if not self.num_tokens:
            return hang_seconds
        expected = self._expected_seconds(self.num_tokens.bit_length())
        if not expected:
            return _FIRST_USE_FACTOR * hang_seconds
        return max(hang_seconds, _SLOW_FACTOR * expected)

    def _expected_seconds(self, size: int) -> float:
        """Return the duration of a step of a size; 0 if there was none from which it can be estimated."""
        if self._expected[size]:
            return self._expected[size]
        # At most as long as a larger step, and at most in proportion to the tokens of a smaller one.
        larger = next(filter(None, self._expected[size + 1 :]), 0.0)
        if larger:
            return larger
        smaller = enumerate(self._expected[:size])
        return max((seconds * 2.0 ** (size - at) for at, seconds in smaller), default=0.0)


def start_seconds(hang_seconds: float) -> float:
    """Return how long a process may be silent while it starts."""
    return _FIRST_USE_FACTOR * hang_seconds
