"""All metrics of the service: their names, and the collector that Prometheus scrapes.

Each front end counts its requests in counters that all front ends share. The engine's gauges and counters are read from
the engine client at each scrape. Text from a client never becomes a label.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import os
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from server.engine.link.protocol import EngineState
from server.http.metrics.histogram import Histogram, cumulative, num_cells
from server.http.metrics.process import ProcessesCollector
from server.http.metrics.shared_counters import SharedCounters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client.metrics_core import Metric

    from server.engine.core.plan_report import PlanReport
    from server.engine.link.client import EngineHandle
    from server.http.config import HTTPConfig


class Outcome(enum.Enum):
    """How a request ended. The first three are successes of generation requests, `OK` is the success of others.

    `TIMEOUT` is a success as well if the request had tokens when its deadline passed.
    """

    LENGTH = "length"
    EOS_TOKEN = "eos_token"  # noqa: S105 - not a secret
    STOP_SEQUENCE = "stop_sequence"
    OK = "ok"
    TIMEOUT = "timeout"
    ABORT = "abort"
    VALIDATION = "validation"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """A metric. Its name lacks the suffix that its kind adds to the scraped name."""

    name: str
    kind: Callable[..., Any]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_COUNTER, _GAUGE, _HISTOGRAM, _INFO = (
    CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily,
)  # fmt: skip
# Upper bounds in seconds. They include vLLM's, so that its dashboards show the same percentiles, and smaller ones,
# because a small model answers within a millisecond.
# Source: vllm/v1/metrics/loggers.py@005a810b
_TTFT_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5,
    10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_ITL_BUCKETS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_DURATION_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5,
    10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_TOKEN_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))

# fmt: off
REQUESTS = Spec("tessera_requests", _COUNTER, "Requests answered, by outcome.", ("endpoint", "outcome"))
IN_FLIGHT = Spec("tessera_requests_in_flight", _GAUGE, "Sequences admitted and not yet answered.")
RESTARTS = Spec("tessera_engine_restarts", _COUNTER, "Times the engine process was started again.")
ENGINE_UP = Spec("tessera_engine_up", _GAUGE, "1 while the engine takes requests.")
ENGINE_STATE = Spec("tessera_engine_state", _GAUGE, "1 for the state the engine is in.", ("state",))
BUILD = Spec("tessera_build", _INFO, "What is served, and by which version.")
CACHE_CONFIG = Spec("tessera_cache_config", _INFO, "Size and dtype of the KV cache.")
ATTENTION_PLAN = Spec(
    "tessera_attention_plan", _INFO, "Attention kernel of each phase; GET /plan says why.",
    ("phase", "sliding_window", "kernel", "arch"),
)
_HISTOGRAMS = (
    Spec(
        "tessera_time_to_first_token_seconds", _HISTOGRAM,
        "From the first byte of a request to its first token.", buckets=_TTFT_BUCKETS,
    ),
    Spec(
        "tessera_inter_token_latency_seconds", _HISTOGRAM,
        "Between the tokens of a sequence; tokens that come together share the wait evenly.", buckets=_ITL_BUCKETS,
    ),
    Spec(
        "tessera_request_duration_seconds", _HISTOGRAM,
        "From the first byte of a successful request to the last byte of its answer.", buckets=_DURATION_BUCKETS,
    ),
    Spec(
        "tessera_request_queue_seconds", _HISTOGRAM,
        "Time a sequence waited in the engine before its first step.", buckets=_DURATION_BUCKETS,
    ),
    Spec(
        "tessera_request_prompt_tokens", _HISTOGRAM, "Prompt tokens of successful requests.", buckets=_TOKEN_BUCKETS,
    ),
    Spec(
        "tessera_request_generated_tokens", _HISTOGRAM, "Generated tokens of successful requests.",
        buckets=_TOKEN_BUCKETS,
    ),
)
# By field of `EngineStats`. The counters start at 0 with each engine process.
_ENGINE_GAUGES = {
    "num_running": Spec("tessera_requests_running", _GAUGE, "Sequences in the engine's batch."),
    "num_waiting": Spec("tessera_requests_waiting", _GAUGE, "Sequences in the engine's queue."),
    "kv_usage": Spec(
        "tessera_kv_cache_usage_ratio", _GAUGE, "Share of the KV cache's blocks that running sequences hold, 0 to 1.",
    ),
    "num_blocks": Spec("tessera_kv_blocks", _GAUGE, "Blocks of the KV cache."),
    "num_free_blocks": Spec("tessera_kv_blocks_free", _GAUGE, "Blocks that no running sequence holds."),
}
_ENGINE_COUNTERS = {
    "prompt_tokens": Spec("tessera_prompt_tokens", _COUNTER, "Prompt tokens of admitted sequences."),
    "generation_tokens": Spec("tessera_generation_tokens", _COUNTER, "Tokens generated."),
    "prefix_cache_query_tokens": Spec(
        "tessera_prefix_cache_query_tokens", _COUNTER, "Prompt tokens looked up in the prefix cache.",
    ),
    "prefix_cache_hit_tokens": Spec(
        "tessera_prefix_cache_hit_tokens", _COUNTER, "Prompt tokens found in the prefix cache.",
    ),
    "num_preemptions": Spec(
        "tessera_preemptions", _COUNTER, "Sequences put back into the queue because KV blocks ran out.",
    ),
    "num_steps": Spec("tessera_engine_steps", _COUNTER, "Forward passes of the engine."),
}
# fmt: on
SPECS: tuple[Spec, ...] = (
    REQUESTS,
    IN_FLIGHT,
    *_HISTOGRAMS,
    *_ENGINE_GAUGES.values(),
    *_ENGINE_COUNTERS.values(),
    RESTARTS,
    ENGINE_UP,
    ENGINE_STATE,
    BUILD,
    CACHE_CONFIG,
    ATTENTION_PLAN,
)


# Positions of the numbers in a row of the shared counters. All processes need the size of a row, including those
# without routes, so it has space for a fixed number of endpoints, in the order of registration.
_MAX_ENDPOINTS = 16
_IN_FLIGHT_CELL = _MAX_ENDPOINTS * len(Outcome)
_PID_CELL = _IN_FLIGHT_CELL + 1
_STARTS = itertools.accumulate(
    (num_cells(spec.buckets) for spec in _HISTOGRAMS), initial=_PID_CELL + 1
)
_HISTOGRAM_CELLS = [slice(a, b) for a, b in itertools.pairwise(_STARTS)]
NUM_CELLS = _HISTOGRAM_CELLS[-1].stop
"""Numbers in a row of a service's `SharedCounters`."""


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
        assert len(endpoints) <= _MAX_ENDPOINTS, endpoints
        self._request_cells = {
            pair: cell for cell, pair in enumerate(itertools.product(endpoints, Outcome))
        }
        self._counters = counters or SharedCounters.private(NUM_CELLS)
        mine = self._counters.mine
        mine[_IN_FLIGHT_CELL] = 0  # requests of an earlier process with this row have ended
        mark_process(self._counters)
        self.ttft, self.itl, self.duration, self.queue, self.prompt_length, self.output_length = (
            Histogram(spec.buckets, mine[cells])
            for spec, cells in zip(_HISTOGRAMS, _HISTOGRAM_CELLS, strict=True)
        )
        self.registry = CollectorRegistry()
        self._client = client
        self._config = config
        self._version = version
        self.registry.register(self)
        ProcessesCollector(self.registry, lambda: [row[_PID_CELL] for row in self._counters.rows])

    def count_request(self, endpoint: str, outcome: Outcome) -> None:
        """Count a request that has ended."""
        self._counters.mine[self._request_cells[endpoint, outcome]] += 1

    @property
    def in_flight(self) -> int:
        """Sequences in flight in all processes of the service: admitted and not yet answered."""
        return int(self._counters.total(_IN_FLIGHT_CELL))

    def add_in_flight(self, sequences: int) -> None:
        """Count admitted sequences; a negative number removes answered ones."""
        self._counters.mine[_IN_FLIGHT_CELL] += sequences

    def describe(self) -> Iterable[Metric]:
        """Return all metrics without values."""
        return [_family(spec) for spec in SPECS]

    def collect(self) -> Iterable[Metric]:
        """Return all metrics with their current values."""
        totals = self._counters.totals()
        requests = _family(REQUESTS)
        for (endpoint, outcome), cell in self._request_cells.items():
            if totals[cell]:
                requests.add_metric([endpoint, outcome.value], totals[cell])
        yield requests
        yield _single(IN_FLIGHT, totals[_IN_FLIGHT_CELL])
        for spec, cells in zip(_HISTOGRAMS, _HISTOGRAM_CELLS, strict=True):
            family = _family(spec)
            family.add_metric([], *cumulative(spec.buckets, totals[cells]))
            yield family
        yield from self._engine()

    def _engine(self) -> Iterable[Metric]:
        client = self._client
        for field, spec in _ENGINE_GAUGES.items():
            yield _single(spec, getattr(client.stats, field))
        for field, spec in _ENGINE_COUNTERS.items():
            yield _single(spec, getattr(client.past, field) + getattr(client.stats, field))
        yield _single(RESTARTS, client.restarts)
        yield _single(ENGINE_UP, client.state is EngineState.READY)
        states = _family(ENGINE_STATE)
        for state in EngineState:
            states.add_metric([state.value], client.state is state)
        yield states
        info = client.info
        build = {"version": self._version, "model_id": self._config.model_id}
        if info is not None:
            build |= {"dtype": info.dtype, "quantization": info.quantization, "device": info.device}
            cache = {"block_size": str(info.block_size), "num_blocks": str(info.num_blocks)}
            cache |= {"dtype": info.kv_cache_dtype}
            yield _family(CACHE_CONFIG, cache)
            yield _attention_plan(info.plan)
        yield _family(BUILD, build)


def mark_process(counters: SharedCounters) -> None:
    """Include this process in the processor time and memory that the service reports."""
    counters.mine[_PID_CELL] = os.getpid()


def _attention_plan(plan: PlanReport) -> Metric:
    family = _family(ATTENTION_PLAN)
    for chosen in plan.phases:
        window = "none" if chosen.sliding_window is None else str(chosen.sliding_window)
        family.add_metric([chosen.phase, window, chosen.kernel, plan.arch], {})
    return family  # type: ignore[no-any-return]


def _family(spec: Spec, value: object = None) -> Any:  # noqa: ANN401 - the families share no `add_metric`
    if value is not None:
        return spec.kind(spec.name, spec.help, value=value)
    return spec.kind(spec.name, spec.help, labels=spec.labels)


def _single(spec: Spec, value: float) -> Metric:
    family = _family(spec)
    family.add_metric([], float(value))
    return family  # type: ignore[no-any-return]
