"""Learns how long decode steps take by their number of tokens."""

from __future__ import annotations

import bisect
from typing import Final

_RATE: Final = 0.1
"""Weight of a new step in the mean."""
_FIRST: Final = 3
"""Steps of which the shortest counts at first, before there is a mean."""
_MOST_OUTLYING: Final = 1.5
"""A step counts as so many times the mean at most, since an interruption says nothing about later steps."""
_FREE_SHARE: Final = 0.75
"""Share of a step's time that more tokens do not change, until a step with more tokens has shown it."""
_KEPT_STEPS: Final = 8192
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

    Between two numbers that were measured the time is linear; beyond the last it grows as between the last two. A
    number with fewer than `_FIRST` steps takes no more than that: a step that was interrupted does not keep others from
    being tried.

    Args:
        most: largest number of tokens of a step that is learnt.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._means: dict[int, _Mean] = {}
        self._sizes: list[int] = []  # those of `_means` with enough steps, in order
        self._num_steps = 0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Enter the time of a step."""
        if not 0 < num_tokens <= self._most:
            return
        self._num_steps += 1
        mean = self._means.get(num_tokens)
        if mean is None:
            mean = self._means[num_tokens] = _Mean(seconds, self._num_steps)
        else:
            mean.add(seconds, self._num_steps)
        if mean.count == _FIRST:
            bisect.insort(self._sizes, num_tokens)
        if self._num_steps % _KEPT_STEPS == 0:
            oldest = self._num_steps - _KEPT_STEPS
            self._means = {n: it for n, it in self._means.items() if it.newest > oldest}
            self._sizes = sorted(n for n, it in self._means.items() if it.count >= _FIRST)

    def seconds(self, num_tokens: int) -> float:
        """Return the time of a step with `num_tokens` tokens; 0.0 as long as no step was measured."""
        found = self._means.get(num_tokens)
        if found is not None and found.count >= _FIRST:
            return found.seconds
        sizes = self._sizes or sorted(self._means)
        if not sizes:
            return 0.0
        estimate = self._between(sizes, num_tokens)
        return estimate if found is None else min(estimate, found.seconds)

    def _between(self, sizes: list[int], num_tokens: int) -> float:
        """Return the time of a step by those of some numbers of tokens."""
        means = self._means
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
