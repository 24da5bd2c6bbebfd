"""Processor time, memory and open files of all processes of the service, under Prometheus' usual names."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import ProcessCollector

from server.http.metrics.rows import Reading
from server.http.metrics.specs import Spec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric

_KEPT_SECONDS = 1.0
"""Some read the metrics twenty times a second, and reading the processes takes longer than all the others."""
_START, _LIMIT = "process_start_time_seconds", "process_max_fds"


class Processes:
    """Sums `prometheus_client.ProcessCollector` over processes.

    The start time is the earliest one. The limit of open files is that of one process.
    """

    def __init__(self) -> None:
        self._collectors: dict[int, ProcessCollector] = {}
        self._readings: list[Reading] = []
        self._read_at = -math.inf

    def read(self, pids: Iterable[float]) -> list[Reading]:
        """Read the metrics with values for all processes together, at most a second old.

        Args:
            pids: ids of the current processes; 0 and the ids of dead processes are ignored.
        """
        current, now = {int(pid) for pid in pids} - {0}, time.monotonic()
        if current != self._collectors.keys() or now > self._read_at + _KEPT_SECONDS:
            self._readings, self._read_at = self._read(current), now
        return self._readings

    def _read(self, current: set[int]) -> list[Reading]:
        self._collectors = {pid: self._collectors.get(pid) or _collector(pid) for pid in current}
        families: dict[str, Metric] = {}
        values: dict[str, float] = {}
        for collector in self._collectors.values():
            for family in collector.collect():
                name, (sample,) = family.name, family.samples
                if families.setdefault(name, family) is family:
                    values[name] = sample.value
                else:
                    values[name] = _combine(name, values[name], sample.value)
        return [
            Reading(Spec(name, type(family), family.documentation), {}, [((), values[name])])
            for name, family in families.items()
        ]


def _collector(pid: int) -> ProcessCollector:
    return ProcessCollector(pid=partial(int, pid), registry=None)


def _combine(name: str, a: float, b: float) -> float:
    if name == _START:
        return min(a, b)
    return a if name == _LIMIT else a + b
