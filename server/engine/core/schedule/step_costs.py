"""Learns how long decode steps take by their number of tokens."""

from __future__ import annotations

import bisect
from typing import Final

_RATE: Final = 0.1
"""Weight of a new step in the mean."""
_FIRST: Final = 3
"""Steps of which the shortest counts at first: one that was interrupted would keep others from being tried."""
_MOST_OUTLYING: Final = 1.5
"""A step counts as so many times the mean at most, since an interruption says nothing about later steps."""
_FREE_SHARE: Final = 0.75
"""Share of a step's time that more tokens do not change, until a step with more tokens has shown it."""
_KEPT_STEPS: Final = 2048
"""Steps after which a mean that no step renewed is dropped: contexts have grown, or other programs run."""


class _Mean:
    __slots__ = ("count", "newest", "seconds")

    def __init__(self, seconds: float, newest: int) -> None:
        self.seconds, self.newest, self.count = seconds, newest, 1

    def add(self, seconds: float, newest: int) -> None:
        self.newest = newest
        self.count += 1
        if self.count <= _FIRST:
            self.seconds = min(self.seconds, seconds)
        else:
            most = _MOST_OUTLYING * self.seconds
            self.seconds += _RATE * (min(seconds, most) - self.seconds)


class StepCosts:
    """Mean times of decode steps by their number of tokens.

    Between two numbers that were measured the time is linear; beyond the last it grows as between the last two.

    Args:
        most: largest number of tokens of a step that is learnt.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._means: dict[int, _Mean] = {}
        self._sizes: list[int] = []  # those of `_means`, in order
        self._num_steps = 0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Enter the time of a step."""
        if not 0 < num_tokens <= self._most:
            return
        self._num_steps += 1
        mean = self._means.get(num_tokens)
        if mean is not None:
            mean.add(seconds, self._num_steps)
        else:
            self._means[num_tokens] = _Mean(seconds, self._num_steps)
            self._sizes = sorted(self._means)
        if self._num_steps % _KEPT_STEPS == 0:
            oldest = self._num_steps - _KEPT_STEPS
            self._means = {n: it for n, it in self._means.items() if it.newest > oldest}
            self._sizes = sorted(self._means)

    def seconds(self, num_tokens: int) -> float:
        """Return the time of a step with `num_tokens` tokens; 0.0 as long as no step was measured."""
        means, sizes = self._means, self._sizes
        if (found := means.get(num_tokens)) is not None:
            return found.seconds
        if not sizes:
            return 0.0
        at = bisect.bisect(sizes, num_tokens)
        if at == 0:
            first = sizes[0]
            return means[first].seconds * (_FREE_SHARE + (1 - _FREE_SHARE) * num_tokens / first)
        low = sizes[at - 1]
        base = means[low].seconds
        if at < len(sizes):
            slope = (means[sizes[at]].seconds - base) / (sizes[at] - low)
        elif at > 1:
            slope = max(0.0, (base - means[sizes[at - 2]].seconds) / (low - sizes[at - 2]))
        else:
            slope = (1 - _FREE_SHARE) * base / low
        return base + slope * (num_tokens - low)
