"""All counters of the service at one moment, from which every set of metrics is rendered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.engine.core.accounting import STEP_SECONDS_BOUNDS
from server.engine.core.messages import add_counters
from server.http.metrics.histogram import cumulative
from server.http.metrics.specs import HISTOGRAM_CELLS, IN_FLIGHT_CELL, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from server.engine.core.messages import EngineInfo, EngineStats
    from server.engine.link.client import EngineHandle
    from server.engine.link.protocol import EngineReport
    from server.http.metrics.specs import Spec

Buckets: TypeAlias = tuple[list[tuple[str, float]], float]
"""Cumulative counts by upper bound, and the sum of all values."""


class Snapshot:
    """The counters of all front ends and of the engine.

    Args:
        model_name: the served model's name.
        version: the service's version.
        totals: the shared counters, summed over the front ends.
        requests: requests answered, by endpoint and outcome.
        client: the engine's client.

    Attributes:
        in_flight: sequences admitted and not yet answered.
        state: the engine's state.
        is_draining: whether the service is about to end; set by the creator.
        restarts: number of earlier engine processes.
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
        requests: dict[tuple[str, Outcome], float],
        client: EngineHandle,
    ) -> None:
        self.model_name = model_name
        self.version = version
        self.requests = requests
        self.in_flight = totals[IN_FLIGHT_CELL]
        self.state = client.state
        self.is_draining = False
        self.restarts = client.restarts
        self.stats: EngineStats = client.stats
        self.counters = add_counters(client.past, client.stats)
        self.totals = self.counters.decode_totals()
        self.info: EngineInfo | None = client.info
        self.engines: Sequence[EngineReport] = client.reports
        self._histograms = {
            spec: cumulative(spec.buckets, totals[cells]) for spec, cells in HISTOGRAM_CELLS.items()
        }
        self._outcomes = dict.fromkeys(Outcome, 0.0)
        for (_, outcome), count in requests.items():
            if count:
                self._outcomes[outcome] += count
        prefill, decode = self.counters.prefill_seconds, self.counters.decode_seconds
        self._step_times = [
            ("prefill", _step_times(self.totals.prefill_steps, prefill)),
            ("decode", _step_times(self.totals.decode_steps, decode)),
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


def _step_times(counts: list[int], seconds: float) -> Buckets:
    cells = counts or [0] * (len(STEP_SECONDS_BOUNDS) + 1)
    return cumulative(STEP_SECONDS_BOUNDS, [*cells, seconds])
