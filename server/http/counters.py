"""What counts: a histogram cheap enough for every token, and totals that survive a restarted engine.

Knows no metric names.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.engine.protocol import EngineInfo, EngineStats

# Fields of `EngineStats` that only grow while one engine process lives.
COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_query_tokens",
    "prefix_cache_hit_tokens",
    "num_preemptions",
    "num_steps",
)


class Histogram:
    """Counts observations by bucket; not thread-safe, it lives on the event loop.

    `prometheus_client.Histogram` takes a lock and walks its buckets in Python for each observation;
    this is about ten times cheaper, and it is called for every token.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` as often as `times`."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum of all values."""
        cumulative = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            cumulative += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), cumulative))
        return buckets, self._sum


class EngineTotals:
    """Makes the engine's counters monotonic: an engine that was started again counts from 0."""

    def __init__(self) -> None:
        self._info: EngineInfo | None = None
        self._base = dict.fromkeys(COUNTERS, 0)
        self._last = dict.fromkeys(COUNTERS, 0)

    def update(self, stats: EngineStats, info: EngineInfo | None) -> dict[str, int]:
        """Totals over all engine processes so far, as far as they were seen.

        Args:
            stats: the newest numbers of the engine.
            info: as the client has it; a new object with each engine that became ready, which is
                also when its numbers start at 0.
        """
        if info is not self._info:
            self._info = info
            for field in COUNTERS:
                self._base[field] += self._last[field]
        for field in COUNTERS:
            self._last[field] = getattr(stats, field)
        return {field: self._base[field] + self._last[field] for field in COUNTERS}
