"""The service's own metrics, in the order in which they are scraped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from server.engine.core.request import FinishReason
from server.engine.link.protocol import EngineState
from server.http.metrics import specs
from server.http.metrics.rows import Row, counter, gauge, histogram, read_rows, step_times

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from server.engine.link.protocol import EngineReport
    from server.http.metrics.rows import Reading, Samples
    from server.http.metrics.snapshot import Snapshot
    from server.http.metrics.specs import Spec


_REASONS: Final = [(reason.name.lower(),) for reason in FinishReason]


def _row(spec: Spec, read: Callable[[Snapshot], Samples | None]) -> Row:
    return Row(spec.name, spec.kind, spec.help, read, spec.labels)


def _number(spec: Spec, read: Callable[[Snapshot], float]) -> Row:
    return _row(spec, lambda snapshot: [((), float(read(snapshot)))])


def _by_reason(spec: Spec, field: str) -> Row:
    def read(snapshot: Snapshot) -> Samples:
        values = getattr(snapshot.totals, field) or [0] * len(_REASONS)
        return list(zip(_REASONS, map(float, values), strict=True))

    return _row(spec, read)


def _requests(snapshot: Snapshot) -> Samples:
    return [
        ((endpoint, outcome.value), count)
        for (endpoint, outcome), count in snapshot.requests.items()
    ]


def _device_seconds(snapshot: Snapshot) -> Samples:
    return [((phase,), total) for phase, (_, total) in snapshot.step_times()]


def _states(snapshot: Snapshot) -> Samples:
    return [((state.value,), float(snapshot.state is state)) for state in EngineState]


def _cache_config(snapshot: Snapshot) -> Samples | None:
    if (info := snapshot.info) is None:
        return None
    sizes = {"block_size": str(info.block_size), "num_blocks": str(info.num_blocks)}
    return [((), {**sizes, "dtype": info.kv_cache_dtype})]


def _attention_plan(snapshot: Snapshot) -> Samples | None:
    if (info := snapshot.info) is None:
        return None
    windows = [
        "none" if c.sliding_window is None else str(c.sliding_window) for c in info.plan.phases
    ]
    return [
        ((chosen.phase, window, chosen.kernel, info.plan.arch), {})
        for chosen, window in zip(info.plan.phases, windows, strict=True)
    ]


def _build(snapshot: Snapshot) -> Samples:
    build = {"version": snapshot.version, "model_id": snapshot.model_name}
    if (info := snapshot.info) is not None:
        build |= {"dtype": info.dtype, "quantization": info.quantization, "device": info.device}
    return [((), build)]


def _of_each(spec: Spec, read: Callable[[EngineReport], float]) -> Row:
    """Return a metric of each engine; of a single one it would repeat the metric of the service."""

    def read_each(snapshot: Snapshot) -> Samples | None:
        if len(snapshot.engines) == 1:
            return None
        return [((str(i),), float(read(report))) for i, report in enumerate(snapshot.engines)]

    return _row(spec, read_each)


def _gauge_of_each(spec: Spec, field: str) -> Row:
    return _of_each(spec, lambda report: getattr(report.stats, field))


def _counter_of_each(spec: Spec, field: str) -> Row:
    return _of_each(spec, lambda report: getattr(report.past, field) + getattr(report.stats, field))


ROWS: Final = (
    _row(specs.REQUESTS, _requests),
    _number(specs.IN_FLIGHT, lambda snapshot: snapshot.in_flight),
    *[histogram(spec.name, spec) for spec in specs.HISTOGRAMS],
    *[gauge(spec.name, spec.help, field) for field, spec in specs.ENGINE_GAUGES.items()],
    *[counter(spec.name, spec.help, field) for field, spec in specs.ENGINE_COUNTERS.items()],
    _row(specs.DEVICE_SECONDS, _device_seconds),
    _row(specs.STEP_DURATION, step_times),
    _by_reason(specs.SEQUENCES_ENDED, "num_ended"),
    _by_reason(specs.SEQUENCE_DEVICE_SECONDS, "device_seconds"),
    _by_reason(specs.SEQUENCE_BLOCK_SECONDS, "block_seconds"),
    _number(specs.RESTARTS, lambda snapshot: snapshot.restarts),
    _number(specs.DRAINING, lambda snapshot: snapshot.is_draining),
    _number(specs.ENGINE_UP, lambda snapshot: snapshot.state is EngineState.READY),
    _row(specs.ENGINE_STATE, _states),
    _number(specs.ENGINES, lambda snapshot: len(snapshot.engines)),
    _of_each(specs.PROCESS_UP, lambda report: report.state is EngineState.READY),
    _of_each(specs.PROCESS_RESTARTS, lambda report: report.restarts),
    *[_gauge_of_each(spec, field) for field, spec in specs.PROCESS_GAUGES.items()],
    *[_counter_of_each(spec, field) for field, spec in specs.PROCESS_COUNTERS.items()],
    _number(specs.LOG_LINES_DROPPED, lambda snapshot: snapshot.log_lines_dropped),
    _row(specs.CACHE_CONFIG, _cache_config),
    _row(specs.ATTENTION_PLAN, _attention_plan),
    _row(specs.BUILD, _build),
)


def read(snapshot: Snapshot) -> Sequence[Reading]:
    """Read all rows; the service's own metrics have no common labels."""
    return read_rows(ROWS, snapshot, {})
