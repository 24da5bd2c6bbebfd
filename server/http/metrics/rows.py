"""Metrics as rows of tables: name, kind and labels of each, and where its values come from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from prometheus_client.metrics_core import Metric

    from server.http.metrics.snapshot import Buckets, Snapshot
    from server.http.metrics.specs import Spec

Samples: TypeAlias = "Sequence[tuple[tuple[str, ...], float | Buckets | dict[str, str]]]"
"""Values of the labels, and a number, the buckets of a histogram, or the further labels of an information."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A metric.

    Attributes:
        name: as scraped, without the suffix that its kind adds.
        kind: of the metric.
        help: its meaning.
        read: returns its samples; None if the metric does not exist at the moment.
        labels: names of the labels, in the order of the samples'.
    """

    name: str
    kind: Callable[..., Any]
    help: str
    read: Callable[[Snapshot], Samples | None]
    labels: tuple[str, ...] = ()


def gauge(name: str, help_: str, field: str) -> Row:
    """Return the row of a gauge in `EngineStats`."""
    return Row(
        name, GaugeMetricFamily, help_, lambda read: [((), float(getattr(read.stats, field)))]
    )


def counter(name: str, help_: str, field: str) -> Row:
    """Return the row of a counter in `EngineStats`, over all engine processes."""
    return Row(
        name, CounterMetricFamily, help_, lambda read: [((), float(getattr(read.counters, field)))]
    )


def histogram(name: str, spec: Spec, help_: str | None = None) -> Row:
    """Return the row of one of the service's own histograms, by default with its own help."""
    return Row(
        name, HistogramMetricFamily, help_ or spec.help, lambda read: [((), read.histogram(spec))]
    )


def step_times(snapshot: Snapshot) -> Samples:
    """Return the histograms of the durations of steps, by phase."""
    return [((phase,), buckets) for phase, buckets in snapshot.step_times()]


class Reading(NamedTuple):
    """The samples of one metric at one moment.

    Attributes:
        metric: its name, kind and labels.
        common: labels that all metrics of its set have.
        samples: without the common labels.
    """

    metric: Spec | Row
    common: dict[str, str]
    samples: Samples

    def shape(self) -> Hashable:
        """Return what the text of the samples depends on, except for the values of numbers and the common labels."""
        return self.metric.name, *[
            (labels, *value.items()) if isinstance(value, dict) else labels
            for labels, value in self.samples
        ]

    def values(self) -> list[float]:
        """Return the numbers in the order in which `family` has them."""
        values: list[float] = []
        for _, value in self.samples:
            if isinstance(value, tuple):
                buckets, total = value
                values += [count for _, count in buckets]
                values += (buckets[-1][1], total)
            else:
                values.append(1.0 if isinstance(value, dict) else value)
        return values

    def family(self) -> Metric:
        """Return the samples as a record of `prometheus_client`."""
        metric = self.metric
        family = metric.kind(metric.name, metric.help, labels=[*self.common, *metric.labels])
        for labels, value in self.samples:
            values = [*self.common.values(), *labels]
            if isinstance(value, tuple):
                family.add_metric(values, *value)
            else:
                family.add_metric(values, value)
        return family  # type: ignore[no-any-return] # of the metric's kind


def read_rows(rows: Sequence[Row], snapshot: Snapshot, common: dict[str, str]) -> list[Reading]:
    """Read all metrics of a set that exist at the moment."""
    return [
        Reading(row, common, samples) for row in rows if (samples := row.read(snapshot)) is not None
    ]
