"""All counters of the service at one moment, from which every set of metrics is rendered."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from server.engine.core.accounting import STEP_SECONDS_BOUNDS
from server.engine.core.messages import add_counters
from server.http.metrics.histogram import cumulative
from server.http.metrics.specs import HISTOGRAM_CELLS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, TypeAlias

    from prometheus_client.metrics_core import Metric

    from server.engine.core.messages import EngineInfo, EngineStats
    from server.engine.link.client import EngineHandle
    from server.http.metrics.specs import Outcome, Spec

Buckets: TypeAlias = tuple[list[tuple[str, float]], float]
"""Cumulative counts by upper bound, and the sum of all values."""
Samples: TypeAlias = "Iterable[tuple[tuple[str, ...], float | Buckets]]"
"""Values of the labels, and a number or the buckets of a histogram."""


class Snapshot:
    """The counters of all front ends and of the engine.

    Args:
        model_name: the served model's name.
        totals: the shared counters, summed over the front ends.
        requests: requests answered, by endpoint and outcome.
        client: the engine's client.

    Attributes:
        stats: the engine's newest statistics; its gauges are current.
        counters: the counters of this and all earlier engine processes; its gauges have no meaning.
        totals: those of `counters`, decoded.
        info: properties of the engine; None before it is ready.
    """

    def __init__(
        self,
        model_name: str,
        totals: Sequence[float],
        requests: dict[tuple[str, Outcome], float],
        client: EngineHandle,
    ) -> None:
        self.model_name = model_name
        self.requests = requests
        self.stats: EngineStats = client.stats
        self.counters = add_counters(client.past, client.stats)
        self.totals = self.counters.decode_totals()
        self.info: EngineInfo | None = client.info
        self._totals = totals

    def histogram(self, spec: Spec) -> Buckets:
        """Return one of the histograms that the front ends keep."""
        return cumulative(spec.buckets, self._totals[HISTOGRAM_CELLS[spec]])

    def step_times(self) -> list[tuple[str, Buckets]]:
        """Return the histograms of the engine's step times, by phase."""
        counters = self.counters
        return [
            ("prefill", _step_times(self.totals.prefill_steps, counters.prefill_seconds)),
            ("decode", _step_times(self.totals.decode_steps, counters.decode_seconds)),
        ]

    def answered(self, *outcomes: Outcome) -> float:
        """Return how many requests had one of these outcomes."""
        return sum(count for (_, outcome), count in self.requests.items() if outcome in outcomes)


def empty_histogram() -> Buckets:
    """Return a histogram of something that never happens."""
    return [("+Inf", 0.0)], 0.0


def _step_times(counts: list[int], seconds: float) -> Buckets:
    cells = counts or [0] * (len(STEP_SECONDS_BOUNDS) + 1)
    return cumulative(STEP_SECONDS_BOUNDS, [*cells, seconds])


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A metric with the name that another server gives it.

    Attributes:
        name: as scraped, without the suffixes of a histogram.
        family: kind of the metric.
        help: its meaning.
        read: returns its samples.
        labels: names of the labels, in the order of the samples'.
    """

    name: str
    family: Callable[..., Any]
    help: str
    read: Callable[[Snapshot], Samples]
    labels: tuple[str, ...] = ()

    def render(self, snapshot: Snapshot, common: dict[str, str]) -> Metric:
        """Render the metric with labels that all metrics of the set have."""
        family = self.family(self.name, self.help, labels=[*common, *self.labels])
        for labels, value in self.read(snapshot):
            values = [*common.values(), *labels]
            if isinstance(value, tuple):
                family.add_metric(values, *value)
            else:
                family.add_metric(values, value)
        return family  # type: ignore[no-any-return] # of the spec's kind
