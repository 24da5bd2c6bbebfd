"""The collector that Prometheus scrapes: the service's own metrics, and the same numbers under other servers' names.

Each front end counts its requests in counters that all front ends share. The engine's gauges and counters are read from
the engine client at each scrape. Text from a client never becomes a label.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from server.engine.core.request import FinishReason
from server.engine.link.protocol import EngineState
from server.http.metrics import specs, tgi, vllm
from server.http.metrics.histogram import Histogram
from server.http.metrics.process import ProcessesCollector
from server.http.metrics.shared_counters import SharedCounters
from server.http.metrics.snapshot import Snapshot
from server.http.metrics.specs import (
    HISTOGRAM_CELLS,
    HISTOGRAMS,
    IN_FLIGHT_CELL,
    MAX_ENDPOINTS,
    NUM_CELLS,
    PID_CELL,
    SPECS,
    Outcome,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prometheus_client.metrics_core import Metric

    from server.engine.core.plan_report import PlanReport
    from server.engine.link.client import EngineHandle
    from server.http.config import HTTPConfig
    from server.http.metrics.specs import Spec

_COMPATIBLE = (vllm, tgi)


class Metrics(Collector):
    """Owns this process's row of the counters and the registry of the service's metrics.

    Used only on the event loop.

    Args:
        client: provides the engine's state and statistics.
        config: provides the model's name.
        version: the service's version.
        endpoints: labels that requests are counted under; the same in all processes of the service.
        counters: rows of `NUM_CELLS` numbers; None if this process is the only one.
    """

    def __init__(
        self,
        client: EngineHandle,
        config: HTTPConfig,
        version: str,
        endpoints: Sequence[str],
        counters: SharedCounters | None = None,
    ) -> None:
        assert len(endpoints) <= MAX_ENDPOINTS, endpoints
        self._request_cells = {
            pair: cell for cell, pair in enumerate(itertools.product(endpoints, Outcome))
        }
        self._counters = counters or SharedCounters.private(NUM_CELLS)
        mine = self._counters.mine
        mine[IN_FLIGHT_CELL] = 0  # requests of an earlier process with this row have ended
        mark_process(self._counters)
        (
            self.ttft, self.itl, self.duration, self.validation, self.queue, self.prefill, self.decode, self.inference,
            self.time_per_token, self.prompt_length, self.output_length, self.max_new_tokens,
        ) = (Histogram(spec.buckets, mine[HISTOGRAM_CELLS[spec]]) for spec in HISTOGRAMS)  # fmt: skip
        self.registry = CollectorRegistry()
        self._client = client
        self._config = config
        self._version = version
        self.registry.register(self)
        ProcessesCollector(self.registry, lambda: [row[PID_CELL] for row in self._counters.rows])

    def count_request(self, endpoint: str, outcome: Outcome) -> None:
        """Count a request that has ended."""
        self._counters.mine[self._request_cells[endpoint, outcome]] += 1

    @property
    def in_flight(self) -> int:
        """Sequences in flight in all processes of the service: admitted and not yet answered."""
        return int(self._counters.total(IN_FLIGHT_CELL))

    def add_in_flight(self, sequences: int) -> None:
        """Count admitted sequences; a negative number removes answered ones."""
        self._counters.mine[IN_FLIGHT_CELL] += sequences

    def describe(self) -> Iterable[Metric]:
        """Return all metrics without values."""
        others = [
            row.family(row.name, row.help, labels=row.labels) for m in _COMPATIBLE for row in m.ROWS
        ]
        return [_family(spec) for spec in SPECS] + others

    def collect(self) -> Iterable[Metric]:
        """Return all metrics with their current values."""
        totals = self._counters.totals()
        requests = {pair: totals[cell] for pair, cell in self._request_cells.items()}
        snapshot = Snapshot(self._config.model_id, totals, requests, self._client)
        answered = _family(specs.REQUESTS)
        for (endpoint, outcome), count in requests.items():
            if count:
                answered.add_metric([endpoint, outcome.value], count)
        yield answered
        yield _single(specs.IN_FLIGHT, totals[IN_FLIGHT_CELL])
        for spec in HISTOGRAMS:
            family = _family(spec)
            family.add_metric([], *snapshot.histogram(spec))
            yield family
        yield from _engine_numbers(snapshot)
        yield from self._engine()
        for module in _COMPATIBLE:
            yield from module.collect(snapshot)

    def _engine(self) -> Iterable[Metric]:
        client = self._client
        yield _single(specs.RESTARTS, client.restarts)
        yield _single(specs.ENGINE_UP, client.state is EngineState.READY)
        states = _family(specs.ENGINE_STATE)
        for state in EngineState:
            states.add_metric([state.value], client.state is state)
        yield states
        info = client.info
        build = {"version": self._version, "model_id": self._config.model_id}
        if info is not None:
            build |= {"dtype": info.dtype, "quantization": info.quantization, "device": info.device}
            cache = {"block_size": str(info.block_size), "num_blocks": str(info.num_blocks)}
            cache |= {"dtype": info.kv_cache_dtype}
            yield _family(specs.CACHE_CONFIG, cache)
            yield _attention_plan(info.plan)
        yield _family(specs.BUILD, build)


def _engine_numbers(snapshot: Snapshot) -> Iterable[Metric]:
    counters = snapshot.counters
    for field, spec in specs.ENGINE_GAUGES.items():
        yield _single(spec, getattr(snapshot.stats, field))
    for field, spec in specs.ENGINE_COUNTERS.items():
        yield _single(spec, getattr(counters, field))
    seconds, durations = _family(specs.DEVICE_SECONDS), _family(specs.STEP_DURATION)
    for phase, (buckets, total) in snapshot.step_times():
        seconds.add_metric([phase], total)
        durations.add_metric([phase], buckets, total)
    yield seconds
    yield durations
    for spec, values in (
        (specs.SEQUENCES_ENDED, snapshot.totals.num_ended),
        (specs.SEQUENCE_DEVICE_SECONDS, snapshot.totals.device_seconds),
        (specs.SEQUENCE_BLOCK_SECONDS, snapshot.totals.block_seconds),
    ):
        family = _family(spec)
        for reason, value in zip(FinishReason, values or [0] * len(FinishReason), strict=True):
            family.add_metric([reason.name.lower()], float(value))
        yield family


def mark_process(counters: SharedCounters) -> None:
    """Include this process in the processor time and memory that the service reports."""
    counters.mine[PID_CELL] = os.getpid()


def _attention_plan(plan: PlanReport) -> Metric:
    family = _family(specs.ATTENTION_PLAN)
    for chosen in plan.phases:
        window = "none" if chosen.sliding_window is None else str(chosen.sliding_window)
        family.add_metric([chosen.phase, window, chosen.kernel, plan.arch], {})
    return family  # type: ignore[no-any-return] # of the spec's kind


def _family(spec: Spec, value: object = None) -> Any:  # noqa: ANN401 - the families share no `add_metric`
    if value is not None:
        return spec.kind(spec.name, spec.help, value=value)
    return spec.kind(spec.name, spec.help, labels=spec.labels)


def _single(spec: Spec, value: float) -> Metric:
    family = _family(spec)
    family.add_metric([], float(value))
    return family  # type: ignore[no-any-return] # of the spec's kind
