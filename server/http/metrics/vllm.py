"""The metrics that gateways, autoscalers and dashboards made for vLLM read, under vLLM's names.

Source of names and labels: vllm/v1/metrics/loggers.py@005a810b. The buckets are those of `tessera_*`, which contain
vLLM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from server.http.metrics import specs
from server.http.metrics.rows import Reading, Row, Samples, counter, gauge, histogram, read_rows
from server.http.metrics.specs import Outcome

if TYPE_CHECKING:
    from server.http.metrics.snapshot import Snapshot

_FINISHED_REASONS = {
    "stop": (Outcome.EOS_TOKEN, Outcome.STOP_SEQUENCE),
    "length": (Outcome.LENGTH,),
    "abort": (Outcome.ABORT, Outcome.TIMEOUT),
    "error": (Outcome.ERROR,),
}


def _requests(snapshot: Snapshot) -> Samples:
    return [
        ((reason,), snapshot.answered(*outcomes)) for reason, outcomes in _FINISHED_REASONS.items()
    ]


def _prompt_sources(snapshot: Snapshot) -> Samples:
    counters = snapshot.counters
    cached = counters.prefix_cache_hit_tokens
    computed = counters.prompt_tokens - cached
    return [(("local_compute",), float(computed)), (("local_cache_hit",), float(cached))]


def _accepted_by_place(snapshot: Snapshot) -> Samples:
    counts = snapshot.totals.accepted_by_place
    return [((str(place),), float(count)) for place, count in enumerate(counts)]


def _cache_config(snapshot: Snapshot) -> Samples:
    info = snapshot.info
    if info is None:
        return []
    return [((str(info.block_size), str(info.num_blocks), info.kv_cache_dtype), 1.0)]


def _adapters(snapshot: Snapshot) -> Samples | None:
    """Return one sample, whose labels list names as vLLM's do; vLLM's value is the time of the newest of several."""
    info, stats = snapshot.info, snapshot.stats
    if info is None or not info.max_loras:
        return None
    names = (",".join(it) for it in (stats.waiting_adapters, stats.running_adapters))
    return [((str(info.max_loras), *names), 1.0)]


# fmt: off
ROWS: Final = (
    gauge("vllm:num_requests_running", "Sequences in the engine's batch.", "num_running"),
    gauge("vllm:num_requests_waiting", "Sequences in the engine's queue.", "num_waiting"),
    gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", "kv_usage"),
    gauge("vllm:gpu_cache_usage_perc", "Former name of vllm:kv_cache_usage_perc.", "kv_usage"),
    Row(
        "vllm:cache_config_info", GaugeMetricFamily, "Configuration of the KV cache.", _cache_config,
        ("block_size", "num_gpu_blocks", "cache_dtype"),
    ),
    Row(
        "vllm:lora_requests_info", GaugeMetricFamily, "Adapters that requests have and wait for, at most 32 each.",
        _adapters, ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    ),
    counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_cache_query_tokens"),
    counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_cache_hit_tokens"),
    counter(
        "vllm:gpu_prefix_cache_queries", "Former name of vllm:prefix_cache_queries.", "prefix_cache_query_tokens",
    ),
    counter("vllm:gpu_prefix_cache_hits", "Former name of vllm:prefix_cache_hits.", "prefix_cache_hit_tokens"),
    counter("vllm:num_preemptions", "Preempted sequences.", "num_preemptions"),
    counter("vllm:prompt_tokens", "Prompt tokens of admitted sequences.", "prompt_tokens"),
    Row(
        "vllm:prompt_tokens_by_source", CounterMetricFamily, "Prompt tokens, by whether they were computed.",
        _prompt_sources, ("source",),
    ),
    counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", "prefix_cache_hit_tokens"),
    counter("vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
    counter("vllm:spec_decode_num_drafts", "Drafts computed.", "num_drafts"),
    counter("vllm:spec_decode_num_draft_tokens", "Tokens of drafts.", "num_draft_tokens"),
    counter("vllm:spec_decode_num_accepted_tokens", "Tokens of drafts that were kept.", "num_accepted_tokens"),
    Row(
        "vllm:spec_decode_num_accepted_tokens_per_pos", CounterMetricFamily,
        "Tokens of drafts that were kept, by their place.", _accepted_by_place, ("position",),
    ),
    Row("vllm:request_success", CounterMetricFamily, "Requests that ended.", _requests, ("finished_reason",)),
    histogram("vllm:time_to_first_token_seconds", specs.TTFT),
    histogram("vllm:inter_token_latency_seconds", specs.ITL),
    histogram(
        "vllm:time_per_output_token_seconds", specs.ITL, "Former name of vllm:inter_token_latency_seconds.",
    ),
    histogram("vllm:request_time_per_output_token_seconds", specs.TIME_PER_TOKEN),
    histogram("vllm:e2e_request_latency_seconds", specs.DURATION),
    histogram("vllm:request_queue_time_seconds", specs.QUEUE),
    histogram("vllm:request_inference_time_seconds", specs.INFERENCE),
    histogram("vllm:request_prefill_time_seconds", specs.PREFILL),
    histogram("vllm:request_decode_time_seconds", specs.DECODE),
    histogram("vllm:request_prompt_tokens", specs.PROMPT_LENGTH),
    histogram("vllm:request_generation_tokens", specs.OUTPUT_LENGTH),
    histogram("vllm:request_max_num_generation_tokens", specs.OUTPUT_LENGTH),
    histogram("vllm:request_params_max_tokens", specs.MAX_NEW_TOKENS),
)
# fmt: on


def read(snapshot: Snapshot) -> list[Reading]:
    """Read all rows, with vLLM's labels."""
    return read_rows(ROWS, snapshot, {"model_name": snapshot.model_name, "engine": "0"})
