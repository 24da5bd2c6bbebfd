"""Processor time, memory and open files of all processes of the service, under Prometheus' usual names."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import ProcessCollector
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

_START, _LIMIT = "process_start_time_seconds", "process_max_fds"


class ProcessesCollector(Collector):
    """Sums `prometheus_client.ProcessCollector` over processes.

    The start time is the earliest one. The limit of open files is that of one process.

    Args:
        registry: the registry to register with.
        pids: returns the ids of the current processes; 0 and the ids of dead processes are ignored.
    """

    def __init__(self, registry: CollectorRegistry, pids: Callable[[], Iterable[float]]) -> None:
        self._pids = pids
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics with values for all processes together."""
        families: dict[str, Metric] = {}
        for pid in {int(pid) for pid in self._pids()} - {0}:
            for family in ProcessCollector(pid=partial(int, pid), registry=None).collect():
                (sample,) = family.samples
                if (first := families.setdefault(family.name, family)) is not family:
                    (so_far,) = first.samples
                    first.samples = [
                        so_far._replace(value=_combine(sample.name, so_far.value, sample.value))
                    ]
        return families.values()


def _combine(name: str, a: float, b: float) -> float:
    if name == _START:
        return min(a, b)
    return a if name == _LIMIT else a + b
