"""The names, kinds and buckets of the service's own metrics, and the cells of the counters that front ends share."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

from server.engine.core.accounting import STEP_SECONDS_BOUNDS
from server.http.metrics import client_counts
from server.http.metrics.histogram import num_cells


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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
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
DRAINING = Spec("tessera_draining", _GAUGE, "1 while the service ends and its health checks fail.")
ENGINE_STATE = Spec("tessera_engine_state", _GAUGE, "1 for the state the engine is in.", ("state",))
LOG_LINES_DROPPED = Spec(
    "tessera_log_lines_dropped", _COUNTER,
    "Lines of the log that were dropped because standard error did not take them in time.",
)
BUILD = Spec("tessera_build", _INFO, "What is served, and by which version.")
CACHE_CONFIG = Spec("tessera_cache_config", _INFO, "Size and dtype of the KV cache.")
ATTENTION_PLAN = Spec(
    "tessera_attention_plan", _INFO, "Attention kernel of each phase; GET /plan says why.",
    ("phase", "sliding_window", "kernel", "arch"),
)
TTFT = Spec(
    "tessera_time_to_first_token_seconds", _HISTOGRAM,
    "From the first byte of a request to its first token.", buckets=_TTFT_BUCKETS,
)
ITL = Spec(
    "tessera_inter_token_latency_seconds", _HISTOGRAM,
    "Between the tokens of a sequence; tokens that come together share the wait evenly.", buckets=_ITL_BUCKETS,
)
DURATION = Spec(
    "tessera_request_duration_seconds", _HISTOGRAM,
    "From the first byte of a successful request to the last byte of its answer.", buckets=_DURATION_BUCKETS,
)
VALIDATION = Spec(
    "tessera_request_validation_seconds", _HISTOGRAM,
    "From the first byte of a successful request until it was sent to the engine.", buckets=_DURATION_BUCKETS,
)
QUEUE = Spec(
    "tessera_request_queue_seconds", _HISTOGRAM,
    "Time a sequence waited in the engine before its first step.", buckets=_DURATION_BUCKETS,
)
PREFILL = Spec(
    "tessera_request_prefill_seconds", _HISTOGRAM,
    "From the first step of a successful request to its first token.", buckets=_DURATION_BUCKETS,
)
DECODE = Spec(
    "tessera_request_decode_seconds", _HISTOGRAM,
    "From the first token of a successful request to its last.", buckets=_DURATION_BUCKETS,
)
INFERENCE = Spec(
    "tessera_request_inference_seconds", _HISTOGRAM,
    "From the first step of a successful request to its last token.", buckets=_DURATION_BUCKETS,
)
TIME_PER_TOKEN = Spec(
    "tessera_request_time_per_output_token_seconds", _HISTOGRAM,
    "Decode time of a successful request per token after the first.", buckets=_ITL_BUCKETS,
)
PROMPT_LENGTH = Spec(
    "tessera_request_prompt_tokens", _HISTOGRAM, "Prompt tokens of successful requests.", buckets=_TOKEN_BUCKETS,
)
OUTPUT_LENGTH = Spec(
    "tessera_request_generated_tokens", _HISTOGRAM, "Generated tokens of successful requests.",
    buckets=_TOKEN_BUCKETS,
)
MAX_NEW_TOKENS = Spec(
    "tessera_request_max_new_tokens", _HISTOGRAM, "Limit of generated tokens of successful requests.",
    buckets=_TOKEN_BUCKETS,
)
HISTOGRAMS = (
    TTFT, ITL, DURATION, VALIDATION, QUEUE, PREFILL, DECODE, INFERENCE, TIME_PER_TOKEN, PROMPT_LENGTH, OUTPUT_LENGTH,
    MAX_NEW_TOKENS,
)
DEVICE_SECONDS = Spec("tessera_device_seconds", _COUNTER, "Device time of the engine's steps.", ("phase",))
STEP_DURATION = Spec(
    "tessera_step_duration_seconds", _HISTOGRAM, "Device time of a step, with and without a prefill.", ("phase",),
    STEP_SECONDS_BOUNDS,
)
SEQUENCES_ENDED = Spec("tessera_sequences_ended", _COUNTER, "Sequences that ended in the engine.", ("reason",))
SEQUENCE_DEVICE_SECONDS = Spec(
    "tessera_sequence_device_seconds", _COUNTER, "Device time charged to ended sequences.", ("reason",),
)
SEQUENCE_BLOCK_SECONDS = Spec(
    "tessera_sequence_kv_block_seconds", _COUNTER, "KV blocks times seconds charged to ended sequences.", ("reason",),
)
# By field of `EngineStats`. The counters start at 0 with each engine process.
ENGINE_GAUGES = {
    "num_running": Spec("tessera_requests_running", _GAUGE, "Sequences in the engine's batch."),
    "num_waiting": Spec("tessera_requests_waiting", _GAUGE, "Sequences in the engine's queue."),
    "kv_usage": Spec(
        "tessera_kv_cache_usage_ratio", _GAUGE, "Share of the KV cache's blocks that running sequences hold, 0 to 1.",
    ),
    "num_blocks": Spec("tessera_kv_blocks", _GAUGE, "Blocks of the KV cache."),
    "num_free_blocks": Spec("tessera_kv_blocks_free", _GAUGE, "Blocks that no running sequence holds."),
    "num_cached_blocks": Spec(
        "tessera_kv_blocks_cached", _GAUGE, "Blocks that no running sequence holds, with content of the prefix cache.",
    ),
    "num_snapshots": Spec(
        "tessera_state_snapshots", _GAUGE, "States of recurrent layers in the prefix cache.",
    ),
    "num_reserved_tokens": Spec(
        "tessera_reserved_tokens", _GAUGE, "Tokens that the running sequences have if all reach their limits.",
    ),
}
ENGINE_COUNTERS = {
    "prompt_tokens": Spec("tessera_prompt_tokens", _COUNTER, "Prompt tokens of admitted sequences."),
    "generation_tokens": Spec("tessera_generation_tokens", _COUNTER, "Tokens generated."),
    "prefix_cache_query_tokens": Spec(
        "tessera_prefix_cache_query_tokens", _COUNTER, "Prompt tokens looked up in the prefix cache.",
    ),
    "prefix_cache_hit_tokens": Spec(
        "tessera_prefix_cache_hit_tokens", _COUNTER, "Prompt tokens found in the prefix cache.",
    ),
    "num_snapshot_hits": Spec(
        "tessera_state_snapshot_hits", _COUNTER, "Sequences that began at a state of the prefix cache.",
    ),
    "num_snapshots_taken": Spec(
        "tessera_state_snapshots_taken", _COUNTER, "States of recurrent layers that came into the prefix cache.",
    ),
    "num_snapshots_evicted": Spec(
        "tessera_state_snapshots_evicted", _COUNTER, "States that left the prefix cache, alone or with their blocks.",
    ),
    "num_preemptions": Spec(
        "tessera_preemptions", _COUNTER, "Sequences put back into the queue because KV blocks ran out.",
    ),
    "num_steps": Spec("tessera_engine_steps", _COUNTER, "Forward passes of the engine."),
    "num_adapter_reads": Spec("tessera_adapter_reads", _COUNTER, "Adapters read from files."),
    "num_adapter_loads": Spec("tessera_adapter_loads", _COUNTER, "Adapters written to slots on the device."),
    "num_adapter_evictions": Spec(
        "tessera_adapter_evictions", _COUNTER, "Adapters that lost their slot to another one.",
    ),
    "num_failed_steps": Spec(
        "tessera_engine_failed_steps", _COUNTER, "Steps that failed and were computed again, in parts if necessary.",
    ),
    "num_invariant_violations": Spec(
        "tessera_engine_invariant_violations", _COUNTER, "Contradictions in the idle engine's bookkeeping; always 0.",
    ),
    "computed_tokens": Spec("tessera_computed_tokens", _COUNTER, "Tokens computed, of prompts and outputs."),
    "computed_prompt_tokens": Spec(
        "tessera_computed_prompt_tokens", _COUNTER, "Prompt tokens of ended sequences that were computed.",
    ),
    "recomputed_tokens": Spec(
        "tessera_recomputed_tokens", _COUNTER, "Tokens of ended sequences that were computed again after a preemption.",
    ),
    "num_drafts": Spec("tessera_drafts", _COUNTER, "Drafts computed: tokens proposed to follow those of a sequence."),
    "num_draft_tokens": Spec("tessera_draft_tokens", _COUNTER, "Tokens of drafts that were computed."),
    "num_accepted_tokens": Spec(
        "tessera_draft_accepted_tokens", _COUNTER, "Tokens of drafts that the model sampled too.",
    ),
    "block_seconds": Spec(
        "tessera_kv_block_seconds", _COUNTER, "KV blocks times seconds, for each sequence that holds a block.",
    ),
}
ENGINES = Spec("tessera_engines", _GAUGE, "Engine processes of the service (--data-parallel).")
_OF_ENGINE = ("engine",)
# Of a service with several engines, for each: what balance and failures show. The sums have the names above.
PROCESS_UP = Spec("tessera_engine_process_up", _GAUGE, "1 while this engine takes requests.", _OF_ENGINE)
PROCESS_SECONDS = Spec(
    "tessera_engine_process_cpu_seconds", _COUNTER,
    "Processor time of this engine's process in user and kernel mode, in seconds.", _OF_ENGINE,
)
PROCESS_MEMORY = Spec(
    "tessera_engine_process_resident_memory_bytes", _GAUGE,
    "Resident memory of this engine's process, without the GPU's, in bytes.", _OF_ENGINE,
)
PROCESS_RESTARTS = Spec(
    "tessera_engine_process_restarts", _COUNTER, "Times this engine's process was started again.", _OF_ENGINE,
)
# By field of `EngineStats`.
PROCESS_GAUGES = {
    "num_running": Spec(
        "tessera_engine_process_requests_running", _GAUGE, "Sequences in this engine's batch.", _OF_ENGINE,
    ),
    "num_waiting": Spec(
        "tessera_engine_process_requests_waiting", _GAUGE, "Sequences in this engine's queue.", _OF_ENGINE,
    ),
    "kv_usage": Spec(
        "tessera_engine_process_kv_cache_usage_ratio", _GAUGE,
        "Share of this engine's KV blocks that running sequences hold, 0 to 1.", _OF_ENGINE,
    ),
}
PROCESS_COUNTERS = {
    "generation_tokens": Spec(
        "tessera_engine_process_generation_tokens", _COUNTER, "Tokens that this engine generated.", _OF_ENGINE,
    ),
    "prefix_cache_query_tokens": Spec(
        "tessera_engine_process_prefix_cache_query_tokens", _COUNTER,
        "Prompt tokens looked up in this engine's prefix cache.", _OF_ENGINE,
    ),
    "prefix_cache_hit_tokens": Spec(
        "tessera_engine_process_prefix_cache_hit_tokens", _COUNTER,
        "Prompt tokens found in this engine's prefix cache.", _OF_ENGINE,
    ),
}
# fmt: on
SPECS: tuple[Spec, ...] = (
    REQUESTS,
    IN_FLIGHT,
    *HISTOGRAMS,
    *ENGINE_GAUGES.values(),
    *ENGINE_COUNTERS.values(),
    DEVICE_SECONDS,
    STEP_DURATION,
    SEQUENCES_ENDED,
    SEQUENCE_DEVICE_SECONDS,
    SEQUENCE_BLOCK_SECONDS,
    RESTARTS,
    DRAINING,
    ENGINE_UP,
    ENGINE_STATE,
    ENGINES,
    PROCESS_UP,
    PROCESS_SECONDS,
    PROCESS_MEMORY,
    PROCESS_RESTARTS,
    *PROCESS_GAUGES.values(),
    *PROCESS_COUNTERS.values(),
    LOG_LINES_DROPPED,
    BUILD,
    CACHE_CONFIG,
    ATTENTION_PLAN,
)


# Positions of the numbers in a row of the shared counters. All processes need the size of a row, including those
# without routes, so it has space for a fixed number of endpoints, in the order of registration.
MAX_ENDPOINTS = 32
IN_FLIGHT_CELL = MAX_ENDPOINTS * len(Outcome)
PID_CELL = IN_FLIGHT_CELL + 1
LOG_LINES_DROPPED_CELL = PID_CELL + 1
_FIRST_HISTOGRAM_CELL = LOG_LINES_DROPPED_CELL + 1
_STARTS = itertools.accumulate(
    (num_cells(spec.buckets) for spec in HISTOGRAMS), initial=_FIRST_HISTOGRAM_CELL
)
HISTOGRAM_CELLS = {
    spec: slice(a, b) for spec, (a, b) in zip(HISTOGRAMS, itertools.pairwise(_STARTS), strict=True)
}
NUM_METRICS = _FIRST_HISTOGRAM_CELL + sum(num_cells(spec.buckets) for spec in HISTOGRAMS)
"""Numbers at the beginning of a row that are added up for the metrics."""
NUM_CELLS = NUM_METRICS + client_counts.NUM_CELLS
"""Numbers in a row of a service's `SharedCounters`; the last of them are the row's `ClientCounts`."""
