"""Every metric of the service: one table of names, and what counts them.

The front end counts what it sees of requests; gauges and counters of the engine are read from the
client when the metrics are scraped. Text from a client never becomes a label. Knows no routes.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from server.engine.protocol import EngineState
from server.http.counters import EngineTotals, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.metrics_core import Metric

    from server.engine.client import EngineClient
    from server.engine.plan_report import PlanReport
    from server.engine.protocol import EngineStats
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
# Counters of the engine: they start at 0 with each engine process, see `EngineTotals`.
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


class TokenClock:
    """Measures the waits between the tokens of one sequence."""

    __slots__ = ("_last", "_metrics", "_started")

    def __init__(self, metrics: Metrics, started: float) -> None:
        self._metrics = metrics
        self._started = started
        self._last = 0.0

    def tokens(self, count: int) -> None:
        """`count` tokens arrived together."""
        now = time.perf_counter()
        if self._last:
            self._metrics.itl.observe((now - self._last) / count, count)
        else:
            self._metrics.ttft.observe(now - self._started)
        self._last = now


class RequestRecord:
    """What is measured about one request; `finish` or `succeed` counts it, once.

    Attributes:
        started: when its first byte was seen, `time.perf_counter` seconds.
    """

    __slots__ = ("_endpoint", "_finished", "_metrics", "started")

    def __init__(self, metrics: Metrics, endpoint: Endpoint) -> None:
        self.started = time.perf_counter()
        self._metrics = metrics
        self._endpoint = endpoint
        self._finished = False

    def clock(self) -> TokenClock:
        """For one of the request's sequences."""
        return TokenClock(self._metrics, self.started)

    def finish(self, outcome: Outcome) -> None:
        """Count the request; further calls do nothing."""
        if not self._finished:
            self._finished = True
            requests = self._metrics.requests
            requests[self._endpoint, outcome] = requests.get((self._endpoint, outcome), 0) + 1
            self._metrics.read_engine_counters()

    def succeed(
        self, outcome: Outcome, *, queue_seconds: float, prompt_tokens: int, generated_tokens: int
    ) -> None:
        """Count a request that was answered in full."""
        if not self._finished:
            metrics = self._metrics
            metrics.duration.observe(time.perf_counter() - self.started)
            metrics.queue.observe(queue_seconds)
            metrics.prompt_length.observe(prompt_tokens)
            metrics.output_length.observe(generated_tokens)
        self.finish(outcome)


class Metrics(Collector):
    """Owns all counts of one app, and its registry; lives on the event loop.

    Args:
        client: where the engine's state and numbers are read.
        config: names the model.
        version: of this service.
        in_flight: tells how many sequences are admitted now.
    """

    def __init__(
        self, client: EngineClient, config: HTTPConfig, version: str, in_flight: Callable[[], int]
    ) -> None:
        self.requests: dict[tuple[Endpoint, Outcome], int] = {}
        self.ttft, self.itl, self.duration, self.queue, self.prompt_length, self.output_length = (
            Histogram(spec.buckets) for spec in _HISTOGRAMS
        )
        self.registry = CollectorRegistry()
        self._client = client
        self._config = config
        self._version = version
        self._in_flight = in_flight
        self._totals = EngineTotals()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def begin(self, endpoint: Endpoint) -> RequestRecord:
        """Start to measure a request."""
        return RequestRecord(self, endpoint)

    def read_engine_counters(self) -> dict[str, int]:
        """Totals of the engine's counters.

        Called at the end of every request too: when the engine dies, all requests end, and its
        last numbers are still there.
        """
        return self._totals.update(self._client.stats, self._client.info)

    def describe(self) -> Iterable[Metric]:
        """The names, without reading anything."""
        return [_family(spec) for spec in SPECS]

    def collect(self) -> Iterable[Metric]:
        """All metrics as they are now."""
        requests = _family(REQUESTS)
        for (endpoint, outcome), count in self.requests.items():
            requests.add_metric([endpoint.value, outcome.value], count)
        yield requests
        yield _single(IN_FLIGHT, self._in_flight())
        histograms = (
            self.ttft, self.itl, self.duration, self.queue, self.prompt_length, self.output_length
        )  # fmt: skip
        for spec, histogram in zip(_HISTOGRAMS, histograms, strict=True):
            family = _family(spec)
            family.add_metric([], *histogram.buckets())
            yield family
        yield from self._engine()

    def _engine(self) -> Iterable[Metric]:
        client = self._client
        for spec, value in _ENGINE_GAUGES:
            yield _single(spec, value(client.stats))
        totals = self.read_engine_counters()
        for spec, field in _ENGINE_COUNTERS:
            yield _single(spec, totals[field])
        yield _single(RESTARTS, client.restarts)
        yield _single(ENGINE_UP, client.state is EngineState.READY)
        states = _family(ENGINE_STATE)
        for state in EngineState:
            states.add_metric([state.value], client.state is state)
        yield states
        info = client.info
        build = {"version": self._version, "model_id": self._config.model_id}
        if info is not None:
            build |= {"dtype": info.dtype, "device": info.device}
            cache = {"block_size": str(info.block_size), "num_blocks": str(info.num_blocks)}
            cache |= {"dtype": info.kv_cache_dtype}
            yield _family(CACHE_CONFIG, cache)
            yield _attention_plan(info.plan)
        yield _family(BUILD, build)


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
