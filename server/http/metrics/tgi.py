"""The metrics that Text Generation Inference's dashboard and autoscaling guides read, under its names.

Source of names and labels: router/src of huggingface/text-generation-inference@db931fcf. Its counters lack the suffix
`_total`, which Prometheus's format requires of a counter, so their type is not declared. The buckets are those of
`tessera_*`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, UnknownMetricFamily

from server.http.metrics import specs
from server.http.metrics.rows import Reading, Row, Samples, gauge, histogram, read_rows, step_times
from server.http.metrics.snapshot import Snapshot, empty_histogram
from server.http.metrics.specs import Outcome

_SUCCESSES = (Outcome.LENGTH, Outcome.EOS_TOKEN, Outcome.STOP_SEQUENCE)
# `timeout` and `unavailable` are Tessera's own: TGI has no deadlines and does not listen before its model is ready.
_FAILURES = {
    "validation": Outcome.VALIDATION,
    "overloaded": Outcome.OVERLOADED,
    "generation": Outcome.ERROR,
    "dropped": Outcome.ABORT,
    "timeout": Outcome.TIMEOUT,
    "unavailable": Outcome.UNAVAILABLE,
}


def _never(*values: str) -> Callable[[Snapshot], Samples]:
    labels: list[tuple[str, ...]] = [(value,) for value in values] or [()]
    return lambda _: [(one, empty_histogram()) for one in labels]


def _num_steps(snapshot: Snapshot) -> Samples:
    return [((phase,), counts[-1][1]) for phase, (counts, _) in snapshot.step_times()]


def _max_total_tokens(snapshot: Snapshot) -> Samples:
    info = snapshot.info
    return [] if info is None else [((), float(info.num_blocks * info.block_size))]


_COUNTER, _HISTOGRAM = UnknownMetricFamily, HistogramMetricFamily
_METHOD = ("method",)
_NO_PART = "Always 0: Tessera's steps have no such part."
# fmt: off
ROWS: Final = (
    Row(
        "tgi_request_count", _COUNTER, "Generation requests.",
        lambda snapshot: [((), snapshot.answered(*_SUCCESSES, *_FAILURES.values()))],
    ),
    Row(
        "tgi_request_success", _COUNTER, "Generation requests answered in full.",
        lambda snapshot: [((), snapshot.answered(*_SUCCESSES))],
    ),
    Row(
        "tgi_request_failure", _COUNTER, "Generation requests not answered in full.",
        lambda snapshot: [((err,), snapshot.answered(outcome)) for err, outcome in _FAILURES.items()],
        ("err",),
    ),
    gauge("tgi_queue_size", "Sequences in the engine's queue.", "num_waiting"),
    gauge("tgi_batch_current_size", "Sequences in the engine's batch.", "num_running"),
    gauge(
        "tgi_batch_current_max_tokens", "Tokens that the running sequences have if all reach their limits.",
        "num_reserved_tokens",
    ),
    Row("tgi_batch_max_total_tokens", GaugeMetricFamily, "Capacity of the KV cache in tokens.", _max_total_tokens),
    histogram("tgi_request_duration", specs.DURATION),
    histogram("tgi_request_validation_duration", specs.VALIDATION),
    histogram("tgi_request_queue_duration", specs.QUEUE),
    histogram("tgi_request_inference_duration", specs.INFERENCE),
    histogram("tgi_request_mean_time_per_token_duration", specs.TIME_PER_TOKEN),
    histogram("tgi_request_input_length", specs.PROMPT_LENGTH),
    histogram("tgi_request_generated_tokens", specs.OUTPUT_LENGTH),
    histogram("tgi_request_max_new_tokens", specs.MAX_NEW_TOKENS),
    Row(
        "tgi_request_skipped_tokens", _HISTOGRAM, "Always 0: no step generates more than one token of a sequence.",
        _never(),
    ),
    Row("tgi_batch_inference_count", _COUNTER, "Steps of the engine, by phase.", _num_steps, _METHOD),
    Row("tgi_batch_inference_duration", _HISTOGRAM, specs.STEP_DURATION.help, step_times, _METHOD),
    Row("tgi_batch_forward_duration", _HISTOGRAM, specs.STEP_DURATION.help, step_times, _METHOD),
    Row("tgi_batch_decode_duration", _HISTOGRAM, _NO_PART, _never("prefill", "decode"), _METHOD),
    Row("tgi_batch_filter_duration", _HISTOGRAM, _NO_PART, _never("prefill", "decode"), _METHOD),
    Row("tgi_batch_concat_duration", _HISTOGRAM, _NO_PART, _never("decode"), _METHOD),
    Row(
        "tgi_batch_concat", _COUNTER, "Always 0: sequences join the batch in any step.",
        lambda _: [((reason,), 0.0) for reason in ("backpressure", "chunking", "wait_exceeded")],
        ("reason",),
    ),
)
# fmt: on


def read(snapshot: Snapshot) -> list[Reading]:
    """Read all rows; TGI's metrics have no common labels."""
    return read_rows(ROWS, snapshot, {})
