"""All counters of the service at one moment, from which every set of metrics is rendered."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from server.engine.core.accounting import STEP_SECONDS_BOUNDS
from server.engine.core.messages import EngineInfo, EngineStats, add_counters
from server.http.metrics.histogram import cumulative
from server.http.metrics.specs import (
    HISTOGRAM_CELLS,
    IN_FLIGHT_CELL,
    LOG_LINES_DROPPED_CELL,
    Outcome,
    Spec,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from server.engine.link.front_end.client import EngineHandle
    from server.engine.link.protocol import EngineReport

Buckets: TypeAlias = tuple[list[tuple[str, float]], float]
"""Cumulative counts by upper bound, and the sum of all values."""


_Source = TypeVar("_Source")
_Result = TypeVar("_Result")
_NO_COUNTERS = EngineStats()


class KeptResults:
    """Results that stay the same object as long as what they are computed from is equal.

    Few counters change between two scrapes, and a metric with the same object is not rendered again.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Any, Any]] = {}

    def get(
        self, name: Hashable, source: _Source, compute: Callable[[_Source], _Result]
    ) -> _Result:
        """Return `compute(source)`, or its last result under this name if that had an equal source."""
        kept = self._kept.get(name)
        if kept is None or kept[0] != source:
            kept = self._kept[name] = source, compute(source)
        result: _Result = kept[1]
        return result


class Snapshot:
    """The counters of all front ends and of the engine.

    Attributes:
        requests: requests answered, by endpoint and outcome; only those that there were.
        in_flight: sequences admitted and not yet answered.
        state: the engine's state.
        is_draining: whether the service is about to end; set by the creator.
        restarts: number of earlier engine processes.
        log_lines_dropped: lines of the log that the processes of the service have dropped.
        stats: the engine's newest statistics; its gauges are current.
        counters: the counters of this and all earlier engine processes; its gauges have no meaning.
        totals: those of `counters`, decoded.
        info: properties of the engine; None before it is ready.
        engines: a report for each engine process; `state` to `info` are those of all together.
    """

    def __init__(
        self,
        model_name: str,
        version: str,
        totals: Sequence[float],
        pairs: Sequence[tuple[str, Outcome]],
        client: EngineHandle,
        kept: KeptResults,
    ) -> None:
        self.model_name = model_name
        self.version = version
        self.in_flight = totals[IN_FLIGHT_CELL]
        self.state = client.state
        self.is_draining = False
        self.restarts = client.restarts
        self.stats: EngineStats = client.stats
        past, stats = client.past, self.stats
        self.counters = stats if past == _NO_COUNTERS else add_counters(past, stats)
        self.totals = self.counters.decode_totals()
        dropped = totals[LOG_LINES_DROPPED_CELL] + self.counters.num_log_lines_dropped
        self.log_lines_dropped = dropped
        self.info: EngineInfo | None = client.info
        self.engines: Sequence[EngineReport] = client.reports

        def count(counts: Sequence[float]) -> dict[tuple[str, Outcome], float]:
            return {pair: n for pair, n in zip(pairs, counts, strict=True) if n}

        self.requests = kept.get("requests", totals[: len(pairs)], count)
        self._outcomes = dict.fromkeys(Outcome, 0.0)
        for (_, outcome), n in self.requests.items():
            self._outcomes[outcome] += n
        self._histograms = {
            spec: kept.get(spec, totals[cells], functools.partial(cumulative, spec.buckets))
            for spec, cells in HISTOGRAM_CELLS.items()
        }
        self._step_times = [
            (phase, kept.get(phase, _step_cells(counts, seconds), _step_times))
            for phase, counts, seconds in (
                ("prefill", self.totals.prefill_steps, self.counters.prefill_seconds),
                ("decode", self.totals.decode_steps, self.counters.decode_seconds),
            )
        ]

    def histogram(self, spec: Spec) -> Buckets:
        """Return one of the histograms that the front ends keep."""
        return self._histograms[spec]

    def step_times(self) -> list[tuple[str, Buckets]]:
        """Return the histograms of the engine's step times, by phase."""
        return self._step_times

    def answered(self, *outcomes: Outcome) -> float:
        """Return how many requests had one of these outcomes."""
        return sum([self._outcomes[outcome] for outcome in outcomes])


def empty_histogram() -> Buckets:
    """Return a histogram of something that never happens."""
    return [("+Inf", 0.0)], 0.0


def _step_cells(counts: list[int], seconds: float) -> list[float]:
    return [*(counts or [0] * (len(STEP_SECONDS_BOUNDS) + 1)), seconds]


def _step_times(cells: list[float]) -> Buckets:
    return cumulative(STEP_SECONDS_BOUNDS, cells)
