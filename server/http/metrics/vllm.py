"""The metrics that gateways, autoscalers and dashboards made for vLLM read, under vLLM's names.

Source of names and labels: vllm/v1/metrics/loggers.py@005a810b. The buckets are those of `tessera_*`, which contain
vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from server.http.metrics import specs
from server.http.metrics.rows import Row, read_rows
from server.http.metrics.specs import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.http.metrics.rows import Reading, Samples
    from server.http.metrics.snapshot import Snapshot
    from server.http.metrics.specs import Spec

_FINISHED_REASONS = {
    "stop": (Outcome.EOS_TOKEN, Outcome.STOP_SEQUENCE),
    "length": (Outcome.LENGTH,),
    "abort": (Outcome.ABORT, Outcome.TIMEOUT),
    "error": (Outcome.ERROR,),
}


def _gauge(field: str) -> Callable[[Snapshot], Samples]:
    return lambda snapshot: [((), float(getattr(snapshot.stats, field)))]


def _counter(field: str) -> Callable[[Snapshot], Samples]:
    return lambda snapshot: [((), float(getattr(snapshot.counters, field)))]


def _histogram(spec: Spec) -> Callable[[Snapshot], Samples]:
    return lambda snapshot: [((), snapshot.histogram(spec))]


def _requests(snapshot: Snapshot) -> Samples:
    return [
        ((reason,), snapshot.answered(*outcomes)) for reason, outcomes in _FINISHED_REASONS.items()
    ]


def _prompt_sources(snapshot: Snapshot) -> Samples:
    counters = snapshot.counters
    cached = counters.prefix_cache_hit_tokens
    computed = counters.prompt_tokens - cached
    return [(("local_compute",), float(computed)), (("local_cache_hit",), float(cached))]


def _cache_config(snapshot: Snapshot) -> Samples:
    info = snapshot.info
    if info is None:
        return []
    return [((str(info.block_size), str(info.num_blocks), info.kv_cache_dtype), 1.0)]


_COUNTER, _GAUGE, _HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
# fmt: off
ROWS: Final = (
    Row("vllm:num_requests_running", _GAUGE, "Sequences in the engine's batch.", _gauge("num_running")),
    Row("vllm:num_requests_waiting", _GAUGE, "Sequences in the engine's queue.", _gauge("num_waiting")),
    Row("vllm:kv_cache_usage_perc", _GAUGE, "Share of the KV cache in use, 0 to 1.", _gauge("kv_usage")),
    Row("vllm:gpu_cache_usage_perc", _GAUGE, "Former name of vllm:kv_cache_usage_perc.", _gauge("kv_usage")),
    Row(
        "vllm:cache_config_info", _GAUGE, "Configuration of the KV cache.", _cache_config,
        ("block_size", "num_gpu_blocks", "cache_dtype"),
    ),
    Row(
        "vllm:prefix_cache_queries", _COUNTER, "Prompt tokens looked up in the prefix cache.",
        _counter("prefix_cache_query_tokens"),
    ),
    Row(
        "vllm:prefix_cache_hits", _COUNTER, "Prompt tokens found in the prefix cache.",
        _counter("prefix_cache_hit_tokens"),
    ),
    Row(
        "vllm:gpu_prefix_cache_queries", _COUNTER, "Former name of vllm:prefix_cache_queries.",
        _counter("prefix_cache_query_tokens"),
    ),
    Row(
        "vllm:gpu_prefix_cache_hits", _COUNTER, "Former name of vllm:prefix_cache_hits.",
        _counter("prefix_cache_hit_tokens"),
    ),
    Row("vllm:num_preemptions", _COUNTER, "Preempted sequences.", _counter("num_preemptions")),
    Row("vllm:prompt_tokens", _COUNTER, "Prompt tokens of admitted sequences.", _counter("prompt_tokens")),
    Row(
        "vllm:prompt_tokens_by_source", _COUNTER, "Prompt tokens, by whether they were computed.", _prompt_sources,
        ("source",),
    ),
    Row(
        "vllm:prompt_tokens_cached", _COUNTER, "Prompt tokens found in the prefix cache.",
        _counter("prefix_cache_hit_tokens"),
    ),
    Row("vllm:generation_tokens", _COUNTER, "Tokens generated.", _counter("generation_tokens")),
    Row("vllm:request_success", _COUNTER, "Requests that ended.", _requests, ("finished_reason",)),
    Row("vllm:time_to_first_token_seconds", _HISTOGRAM, specs.TTFT.help, _histogram(specs.TTFT)),
    Row("vllm:inter_token_latency_seconds", _HISTOGRAM, specs.ITL.help, _histogram(specs.ITL)),
    Row(
        "vllm:time_per_output_token_seconds", _HISTOGRAM, "Former name of vllm:inter_token_latency_seconds.",
        _histogram(specs.ITL),
    ),
    Row(
        "vllm:request_time_per_output_token_seconds", _HISTOGRAM, specs.TIME_PER_TOKEN.help,
        _histogram(specs.TIME_PER_TOKEN),
    ),
    Row("vllm:e2e_request_latency_seconds", _HISTOGRAM, specs.DURATION.help, _histogram(specs.DURATION)),
    Row("vllm:request_queue_time_seconds", _HISTOGRAM, specs.QUEUE.help, _histogram(specs.QUEUE)),
    Row("vllm:request_inference_time_seconds", _HISTOGRAM, specs.INFERENCE.help, _histogram(specs.INFERENCE)),
    Row("vllm:request_prefill_time_seconds", _HISTOGRAM, specs.PREFILL.help, _histogram(specs.PREFILL)),
    Row("vllm:request_decode_time_seconds", _HISTOGRAM, specs.DECODE.help, _histogram(specs.DECODE)),
    Row("vllm:request_prompt_tokens", _HISTOGRAM, specs.PROMPT_LENGTH.help, _histogram(specs.PROMPT_LENGTH)),
    Row("vllm:request_generation_tokens", _HISTOGRAM, specs.OUTPUT_LENGTH.help, _histogram(specs.OUTPUT_LENGTH)),
    Row(
        "vllm:request_max_num_generation_tokens", _HISTOGRAM, specs.OUTPUT_LENGTH.help,
        _histogram(specs.OUTPUT_LENGTH),
    ),
    Row("vllm:request_params_max_tokens", _HISTOGRAM, specs.MAX_NEW_TOKENS.help, _histogram(specs.MAX_NEW_TOKENS)),
)
# fmt: on


def read(snapshot: Snapshot) -> list[Reading]:
    """Read all rows, with vLLM's labels."""
    return read_rows(ROWS, snapshot, {"model_name": snapshot.model_name, "engine": "0"})
