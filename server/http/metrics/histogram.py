"""A histogram that is fast enough to update for every token."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence


def num_cells(bounds: Sequence[float]) -> int:
    """Return how many numbers a histogram has: a count per bucket, one above all bounds, and the sum."""
    return len(bounds) + 2


class Histogram:
    """Counts observations by bucket. Not thread-safe.

    About ten times faster than `prometheus_client.Histogram`, which takes a lock and iterates over its buckets in
    Python for each observation.

    Args:
        bounds: upper bounds of the buckets, inclusive, ascending.
        cells: the histogram's `num_cells` numbers. Counting continues from their values.
    """

    __slots__ = ("_bounds", "_cell", "_cells", "_sum", "_value")

    def __init__(self, bounds: Sequence[float], cells: memoryview[float]) -> None:
        self._bounds = tuple(bounds)
        self._sum = num_cells(bounds) - 1
        self._cells = cells
        self._value, self._cell = math.nan, 0  # the last value and its bucket

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times."""
        # Streams that get tokens of the same steps have waited for the same time.
        if value != self._value:
            self._value, self._cell = value, bisect.bisect_left(self._bounds, value)
        cells = self._cells
        cells[self._cell] += times
        cells[self._sum] += value * times


def cumulative(
    bounds: Sequence[float], cells: Sequence[float]
) -> tuple[list[tuple[str, float]], float]:
    """Return cumulative counts by upper bound, and the sum of all values.

    Args:
        bounds: the histogram's bounds.
        cells: the histogram's numbers, or the sums of the numbers of several histograms with these bounds.
    """
    *counts, total = cells
    _, *so_far = itertools.accumulate(counts, initial=0.0)
    return list(zip(bound_labels(tuple(bounds)), so_far, strict=True)), total


@functools.cache
def bound_labels(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Return the values of the label `le` of a histogram with these bounds."""
    return (*(repr(float(bound)) for bound in bounds), "+Inf")
