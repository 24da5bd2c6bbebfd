"""Whether a quantity grows: a line through samples, with the standard error of its slope."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_BLOCKS = 20
# 95 % of Student's distribution with 18 degrees of freedom.
_T_95 = 2.10


class Trend(NamedTuple):
    """A fitted line.

    Attributes:
        slope: per unit of x.
        error: standard error of the slope.
        first, last: means of the first and the last tenth of the samples.
    """

    slope: float
    error: float
    first: float
    last: float

    @property
    def is_flat(self) -> bool:
        """Whether the slope does not exceed 0 by more than its error, with 95 % confidence."""
        return self.slope <= _T_95 * self.error


def fit(x: Sequence[float], y: Sequence[float]) -> Trend:
    """Fit a line by least squares to the means of blocks of samples.

    Successive samples of a process's memory depend on each other, for which the usual standard error is far too small.
    Means of long blocks are nearly independent.

    Args:
        x: in ascending order, at least `_BLOCKS` samples.
        y: the samples.
    """
    size = len(x) / _BLOCKS
    assert size >= 1, f"{len(x)} samples are too few"
    edges = [round(i * size) for i in range(_BLOCKS + 1)]
    pairs = list(itertools.pairwise(edges))
    xs = [statistics.fmean(x[a:b]) for a, b in pairs]
    ys = [statistics.fmean(y[a:b]) for a, b in pairs]
    slope, offset = statistics.linear_regression(xs, ys)
    residual = sum((b - offset - slope * a) ** 2 for a, b in zip(xs, ys, strict=True))
    spread = sum((a - statistics.fmean(xs)) ** 2 for a in xs)
    tenth = max(1, len(y) // 10)
    return Trend(
        slope,
        math.sqrt(residual / (_BLOCKS - 2) / spread),
        statistics.fmean(y[:tenth]),
        statistics.fmean(y[-tenth:]),
    )
