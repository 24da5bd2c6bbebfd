"""Every metric of the service: one table of names, and what counts them.

The front end counts what it sees of requests, on a board that all front ends share; gauges and counters
of the engine are read from the client when the metrics are scraped. Text
from a client never becomes a label. Knows no routes.
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
from server.http.metrics.records import RequestRecord
from server.http.metrics.shared_counters import Board

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.metrics_core import Metric

    from server.engine.core.messages import EngineStats
    from server.engine.core.plan_report import PlanReport
    from server.engine.link.client import EngineHandle
    from server.http.config import HTTPConfig


class Endpoint(enum.Enum):
    """Routes that are counted, by their label."""

    GENERATE = "generate"
    GENERATE_STREAM = "generate_stream"
    COMPAT = "compat"
    TOKENIZE = "tokenize"


class Outcome(enum.Enum):
    """How a request ended; the first three are successes, named like the wire's finish reasons."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"  # noqa: S105 - not a secret
    STOP_SEQUENCE = "stop_sequence"
    OK = "ok"
    ABORT = "abort"
    VALIDATION = "validation"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """One metric: its name as scraped, without the suffix that its kind adds."""

    name: str
    kind: Callable[..., Any]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


# Upper bounds in seconds. The vLLM bounds are kept, so that its dashboards draw the same lines; those
# below are ours: a small model answers within a millisecond.
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

REQUESTS = Spec(
    "tessera_requests", CounterMetricFamily, "Requests answered, by outcome.", ("endpoint", "outcome")
)  # fmt: skip
IN_FLIGHT = Spec(
    "tessera_requests_in_flight", GaugeMetricFamily, "Sequences admitted and not yet answered."
)
TTFT = Spec(
    "tessera_time_to_first_token_seconds",
    HistogramMetricFamily,
    "From the first byte of a request to its first token.",
    buckets=_TTFT_BUCKETS,
)
ITL = Spec(
    "tessera_inter_token_latency_seconds",
    HistogramMetricFamily,
    "Between the tokens of a sequence; tokens that come together share the wait evenly.",
    buckets=_ITL_BUCKETS,
)
DURATION = Spec(
    "tessera_request_duration_seconds",
    HistogramMetricFamily,
    "From the first byte of a successful request to the last byte of its answer.",
    buckets=_DURATION_BUCKETS,
)
QUEUE = Spec(
    "tessera_request_queue_seconds",
    HistogramMetricFamily,
    "Time a sequence waited in the engine before its first step.",
    buckets=_DURATION_BUCKETS,
)
PROMPT_LENGTH = Spec(
    "tessera_request_prompt_tokens",
    HistogramMetricFamily,
    "Prompt tokens of successful requests.",
    buckets=_TOKEN_BUCKETS,
)
OUTPUT_LENGTH = Spec(
    "tessera_request_generated_tokens",
    HistogramMetricFamily,
    "Generated tokens of successful requests.",
    buckets=_TOKEN_BUCKETS,
)
RESTARTS = Spec(
    "tessera_engine_restarts", CounterMetricFamily, "Times the engine process was started again."
)
ENGINE_UP = Spec("tessera_engine_up", GaugeMetricFamily, "1 while the engine takes requests.")
ENGINE_STATE = Spec(
    "tessera_engine_state", GaugeMetricFamily, "1 for the state the engine is in.", ("state",)
)
BUILD = Spec("tessera_build", InfoMetricFamily, "What is served, and by which version.")
CACHE_CONFIG = Spec("tessera_cache_config", InfoMetricFamily, "Size and dtype of the KV cache.")
ATTENTION_PLAN = Spec(
    "tessera_attention_plan",
    InfoMetricFamily,
    "Attention kernel of each phase; GET /plan says why.",
    ("phase", "sliding_window", "kernel", "arch"),
)

_ENGINE_GAUGES: tuple[tuple[Spec, Callable[[EngineStats], float]], ...] = (
    (
        Spec("tessera_requests_running", GaugeMetricFamily, "Sequences in the engine's batch."),
        lambda stats: stats.num_running,
    ),
    (
        Spec("tessera_requests_waiting", GaugeMetricFamily, "Sequences in the engine's queue."),
        lambda stats: stats.num_waiting,
    ),
    (
        Spec(
            "tessera_kv_cache_usage_ratio",
            GaugeMetricFamily,
            "Share of the KV cache's blocks that running sequences hold, 0 to 1.",
        ),
        lambda stats: stats.kv_usage,
    ),
    (
        Spec("tessera_kv_blocks", GaugeMetricFamily, "Blocks of the KV cache."),
        lambda stats: stats.num_blocks,
    ),
    (
        Spec("tessera_kv_blocks_free", GaugeMetricFamily, "Blocks that no running sequence holds."),
        lambda stats: stats.num_free_blocks,
    ),
)
# Counters of the engine; they start at 0 with each engine process.
_ENGINE_COUNTERS: tuple[tuple[Spec, str], ...] = (
    (
        Spec("tessera_prompt_tokens", CounterMetricFamily, "Prompt tokens of admitted sequences."),
        "prompt_tokens",
    ),
    (
        Spec("tessera_generation_tokens", CounterMetricFamily, "Tokens generated."),
        "generation_tokens",
    ),
    (
        Spec(
            "tessera_prefix_cache_query_tokens",
            CounterMetricFamily,
            "Prompt tokens looked up in the prefix cache.",
        ),
        "prefix_cache_query_tokens",
    ),
    (
        Spec(
            "tessera_prefix_cache_hit_tokens",
            CounterMetricFamily,
            "Prompt tokens found in the prefix cache.",
        ),
        "prefix_cache_hit_tokens",
    ),
    (
        Spec(
            "tessera_preemptions",
            CounterMetricFamily,
            "Sequences put back into the queue for want of KV blocks.",
        ),
        "num_preemptions",
    ),
    (
        Spec("tessera_engine_steps", CounterMetricFamily, "Forward passes of the engine."),
        "num_steps",
    ),
)
_HISTOGRAMS = (TTFT, ITL, DURATION, QUEUE, PROMPT_LENGTH, OUTPUT_LENGTH)
SPECS: tuple[Spec, ...] = (
    REQUESTS,
    IN_FLIGHT,
    *_HISTOGRAMS,
    *(spec for spec, _ in _ENGINE_GAUGES),
    *(spec for spec, _ in _ENGINE_COUNTERS),
    RESTARTS,
    ENGINE_UP,
    ENGINE_STATE,
    BUILD,
    CACHE_CONFIG,
    ATTENTION_PLAN,
)


# Where each number stands in a row of the board.
_REQUEST_CELLS = {pair: i for i, pair in enumerate(itertools.product(Endpoint, Outcome))}
_IN_FLIGHT_CELL = len(_REQUEST_CELLS)
_PID_CELL = _IN_FLIGHT_CELL + 1
_STARTS = itertools.accumulate(
    (num_cells(spec.buckets) for spec in _HISTOGRAMS), initial=_PID_CELL + 1
)
_HISTOGRAM_CELLS = [slice(a, b) for a, b in itertools.pairwise(_STARTS)]
NUM_CELLS = _HISTOGRAM_CELLS[-1].stop
"""Numbers in a row of a service's `Board`."""


class Metrics(Collector):
    """Owns the counts of one process, and the registry that tells those of the service; lives on the event loop.

    Args:
        client: where the engine's state and numbers are read.
        config: names the model.
        version: of this service.
        board: of `NUM_CELLS`, where the service has several processes.
    """

    def __init__(
        self, client: EngineHandle, config: HTTPConfig, version: str, board: Board | None = None
    ) -> None:
        self._board = board or Board.private(NUM_CELLS)
        mine = self._board.mine
        mine[_IN_FLIGHT_CELL] = 0  # those of a process that was here before us are gone
        mark_process(self._board)
        self.ttft, self.itl, self.duration, self.queue, self.prompt_length, self.output_length = (
            Histogram(spec.buckets, mine[cells])
            for spec, cells in zip(_HISTOGRAMS, _HISTOGRAM_CELLS, strict=True)
        )
        self.registry = CollectorRegistry()
        self._client = client
        self._config = config
        self._version = version
        self.registry.register(self)
        ProcessesCollector(self.registry, lambda: [row[_PID_CELL] for row in self._board.rows])

    def begin(self, endpoint: Endpoint) -> RequestRecord:
        """Start to measure a request."""
        return RequestRecord(self, endpoint)

    def count_request(self, endpoint: Endpoint, outcome: Outcome) -> None:
        """Count a request that has ended."""
        self._board.mine[_REQUEST_CELLS[endpoint, outcome]] += 1

    @property
    def in_flight(self) -> int:
        """Sequences that the service admitted and did not yet answer, in all of its processes."""
        return int(self._board.total(_IN_FLIGHT_CELL))

    def add_in_flight(self, sequences: int) -> None:
        """Admit sequences; a negative number answers them."""
        self._board.mine[_IN_FLIGHT_CELL] += sequences

    def describe(self) -> Iterable[Metric]:
        """The names, without reading anything."""
        return [_family(spec) for spec in SPECS]

    def collect(self) -> Iterable[Metric]:
        """All metrics as they are now."""
        totals = self._board.totals()
        requests = _family(REQUESTS)
        for (endpoint, outcome), cell in _REQUEST_CELLS.items():
            if totals[cell]:
                requests.add_metric([endpoint.value, outcome.value], totals[cell])
        yield requests
        yield _single(IN_FLIGHT, totals[_IN_FLIGHT_CELL])
        for spec, cells in zip(_HISTOGRAMS, _HISTOGRAM_CELLS, strict=True):
            family = _family(spec)
            family.add_metric([], *cumulative(spec.buckets, totals[cells]))
            yield family
        yield from self._engine()

    def _engine(self) -> Iterable[Metric]:
        client = self._client
        for spec, value in _ENGINE_GAUGES:
            yield _single(spec, value(client.stats))
        for spec, field in _ENGINE_COUNTERS:
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


def mark_process(board: Board) -> None:
    """Let the metrics of a service have the processor time and memory of this process too."""
    board.mine[_PID_CELL] = os.getpid()


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
