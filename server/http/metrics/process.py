"""Processor time, memory and open files of the service's processes.

Those of the front ends and their parent together have Prometheus' usual names, each engine's process names of its own.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from prometheus_client import ProcessCollector

from server.http.metrics.rows import Reading
from server.http.metrics.specs import PROCESS_MEMORY, PROCESS_SECONDS, Spec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client.metrics_core import Metric

    from server.engine.link.protocol import EngineReport

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


class EngineProcesses:
    """Reads the processes of the engines, which share the host with the front end."""

    _SPECS: Final = {
        "process_cpu_seconds": PROCESS_SECONDS,
        "process_resident_memory_bytes": PROCESS_MEMORY,
    }

    def __init__(self) -> None:
        self._processes: dict[int, Processes] = {}

    def read(self, engines: Sequence[EngineReport]) -> list[Reading]:
        """Read the metrics of each engine with a process, at most a second old."""
        pids = {i: it.info.pid for i, it in enumerate(engines) if it.info is not None}
        self._processes = {i: self._processes.get(i) or Processes() for i in pids}
        samples: dict[str, list[tuple[tuple[str, ...], float]]] = {it: [] for it in self._SPECS}
        for i, pid in pids.items():
            for reading in self._processes[i].read([pid]):
                if (found := samples.get(reading.metric.name)) is not None:
                    found.append(((str(i),), reading.values()[0]))
        return [Reading(spec, {}, samples[name]) for name, spec in self._SPECS.items()]


def _collector(pid: int) -> ProcessCollector:
    return ProcessCollector(pid=partial(int, pid), registry=None)


def _combine(name: str, a: float, b: float) -> float:
    if name == _START:
        return min(a, b)
    return a if name == _LIMIT else a + b
