"""Processor time, memory and files of all processes that answer requests, under Prometheus' usual names.

Knows nothing of what they do.
"""

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
    """Adds up over processes; the start is that of the first, the limit of open files that of one.

    Args:
        registry: where it enters itself.
        pids: tells the processes that there are now; 0 and the ids of dead ones are passed over.
    """

    def __init__(self, registry: CollectorRegistry, pids: Callable[[], Iterable[float]]) -> None:
        self._pids = pids
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """The metrics of one process, with the values of all."""
        families: dict[str, Metric] = {}
        for pid in {int(pid) for pid in self._pids()} - {0}:
            for family in ProcessCollector(pid=partial(int, pid), registry=None).collect():
                (sample,) = family.samples
                if (first := families.setdefault(family.name, family)) is not family:
                    (so_far,) = first.samples
                    first.samples = [
                        so_far._replace(value=_join(sample.name, so_far.value, sample.value))
                    ]
        return families.values()


def _join(name: str, a: float, b: float) -> float:
    if name == _START:
        return min(a, b)
    return a if name == _LIMIT else a + b
