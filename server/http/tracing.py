"""OpenTelemetry traces: a span for each generation request, exported over OTLP/HTTP from a thread.

Names and values follow OpenTelemetry's semantic conventions for generative AI. A span never contains text of a prompt
or an answer, nor stop strings. It is made when the request has ended, from what is known then: tokens cost nothing.

Importing this module needs the packages of the extra `otel`; only `server.http.edge.stack` imports it, if traces are
wanted.
"""

from __future__ import annotations

import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.engine.core.request import FinishReason
from server.http.reply.generation import GENERATION, Generation
from server.http.request_id import CLIENT_CLOSED, CurrentRequest, RequestFigures, current_request
from server.version import version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from opentelemetry.context import Context
    from starlette.types import ASGIApp, Receive, Scope, Send

    from server.http.config import HTTPConfig

TRACES_PATH = "/v1/traces"
CLOSE_SECONDS = 3.0
"""How long `Tracing.close` waits for a collector."""

_EXPORT_INTERVAL_MS = 1000
# Encoding a span takes about 0.1 ms of the interpreter, in which no token is sent: small batches, short pauses.
_BATCH_SPANS = 64
_MAX_NAME_CHARACTERS = 200
_CONTEXT_HEADERS = {b"traceparent": "traceparent", b"tracestate": "tracestate"}
_FINISH_REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
    FinishReason.TIMEOUT: "timeout",
}
_FAILURES = frozenset({"validation", "overloaded", "unavailable", "abort", "timeout", "error"})
_propagator = TraceContextTextMapPropagator()


def create_exporter(endpoint: str) -> SpanExporter:
    """Create the exporter. OTEL_EXPORTER_OTLP_HEADERS and the SDK's other variables apply.

    Args:
        endpoint: base address of the collector, or its address for traces, which ends with `TRACES_PATH`.
    """
    base = endpoint.rstrip("/")
    return OTLPSpanExporter(base if base.endswith(TRACES_PATH) else base + TRACES_PATH)


class Tracing:
    """Owns the exporter and its thread.

    Args:
        config: of the service; has an `otlp_endpoint`.
    """

    def __init__(self, config: HTTPConfig) -> None:
        assert config.otlp_endpoint is not None
        self._exporter = create_exporter(config.otlp_endpoint)
        identity = {
            "service.name": "tessera",
            "service.version": version(),
            "service.instance.id": str(uuid.uuid4()),  # differs between front ends
        }
        detected = OTELResourceDetector().detect().attributes  # OTEL_SERVICE_NAME and others
        self._provider = TracerProvider(
            resource=Resource.create({**identity, **detected}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                schedule_delay_millis=_EXPORT_INTERVAL_MS,
                max_export_batch_size=_BATCH_SPANS,
            )
        )
        self._tracer = self._provider.get_tracer("tessera", version())
        self._model = (config.served_model_name or (config.model_id,))[0]

    def close(self) -> None:
        """Export the last spans, or give up after `CLOSE_SECONDS`. Blocks."""
        timer = threading.Timer(CLOSE_SECONDS, self._exporter.shutdown)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # the system refuses the thread: nothing would bound the export
            self._exporter.shutdown()
        self._provider.shutdown()
        timer.cancel()

    def record(self, scope: Scope, request: CurrentRequest) -> None:
        """Make the span of a generation request that has ended."""
        assert request.figures is not None
        figures = request.figures()
        generation: Generation | None = scope.get(GENERATION)
        now, end = time.monotonic(), time.time_ns()
        start = end - _nanoseconds(now - request.arrived)
        method, route = scope["method"], scope["route"].path
        name = f"{request.operation} {self._model}" if request.operation else f"{method} {route}"
        span = self._tracer.start_span(
            name,
            parent_context(scope["headers"]),
            SpanKind.SERVER,
            _attributes(scope, request, figures, self._model),
            start_time=start,
        )
        if span.is_recording():
            if generation is not None:
                span.set_attributes(_generation_attributes(generation, figures))
                _add_events(span, generation, figures, start)
            if figures.outcome in _FAILURES:
                span.set_attribute("error.type", figures.outcome)
                span.set_status(StatusCode.ERROR)
        span.end(end)


class TracingMiddleware:
    """ASGI middleware that makes a span of each generation request. It does not wrap `send`.

    Needs `RequestIdMiddleware` around it.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        request = current_request()
        try:
            await self._app(scope, receive, send)
        finally:
            if scope["type"] == "http" and request.figures is not None:
                self._tracing.record(scope, request)


def parent_context(headers: Iterable[tuple[bytes, bytes]]) -> Context:
    """Return the context of a request's W3C headers; an empty one if they are absent or not valid."""
    carrier: dict[str, str] = {}
    for name, value in headers:
        if (key := _CONTEXT_HEADERS.get(name)) is not None:
            text = value.decode("latin-1")
            # A client may split `tracestate` over several headers, but send only one `traceparent`.
            carrier[key] = f"{carrier[key]},{text}" if key in carrier else text
    return _propagator.extract(carrier)


def _attributes(
    scope: Scope, request: CurrentRequest, figures: RequestFigures, model: str
) -> Mapping[str, Any]:
    """Return the attributes that every span has."""
    status = CLIENT_CLOSED if request.status is None or request.disconnected else request.status
    attributes = {
        "gen_ai.provider.name": "tessera",
        "gen_ai.request.model": (request.model or model)[:_MAX_NAME_CHARACTERS],
        "gen_ai.response.model": model,
        "http.request.method": scope["method"],
        "http.route": scope["route"].path,
        "http.response.status_code": status,
        "tessera.request_id": request.id,
    }
    if request.operation is not None:
        attributes["gen_ai.operation.name"] = request.operation
    if scope.get("server"):
        attributes["server.address"], attributes["server.port"] = scope["server"]
    if figures.outcome is not None:
        attributes["tessera.outcome"] = figures.outcome
    return {name: value for name, value in attributes.items() if value is not None}


def _generation_attributes(generation: Generation, figures: RequestFigures) -> Mapping[str, Any]:
    """Return the attributes of a request that was submitted to the engine."""
    first = generation.completions[0]
    sampling, usage = first.prompt.sampling, generation.usage()
    attributes: dict[str, Any] = {
        "gen_ai.request.max_tokens": generation.max_new_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.frequency_penalty": float(sampling.frequency_penalty),
        "gen_ai.request.presence_penalty": float(sampling.presence_penalty),
        "gen_ai.usage.input_tokens": generation.prompt_tokens,
        "gen_ai.usage.output_tokens": generation.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": generation.cached_tokens,
        "gen_ai.latency.time_in_queue": usage.queue_ms / 1000,
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if sampling.seed < 2**63:  # the protocol's integers are signed
        attributes["gen_ai.request.seed"] = sampling.seed
    if len(generation.completions) > 1:
        attributes["gen_ai.request.choice.count"] = len(generation.completions)
    if sampling.grammar is not None:
        attributes["tessera.request.structured_output"] = True
    reasons = [c.finish_reason for c in generation.returned if c.finish_reason is not None]
    if reasons:
        attributes["gen_ai.response.finish_reasons"] = [_FINISH_REASONS[r] for r in reasons]
    if figures.ttft_ms is not None:
        attributes["gen_ai.latency.time_to_first_token"] = figures.ttft_ms / 1000
    if usage.steps:  # the engine has reported what the request used
        attributes |= {
            "gen_ai.latency.time_in_model_prefill": usage.prefill_ms / 1000,
            "gen_ai.latency.time_in_model_decode": usage.decode_ms / 1000,
            "tessera.usage.steps": usage.steps,
            "tessera.usage.device_seconds": usage.device_seconds,
            "tessera.usage.kv_block_seconds": usage.kv_block_seconds,
        }
    return attributes


def _add_events(span: Span, generation: Generation, figures: RequestFigures, start: int) -> None:
    """Mark when the request entered the queue, when its first step began, and when its first token arrived."""
    queued = time.time_ns() - _nanoseconds(time.perf_counter() - generation.submitted)
    span.add_event("queue", timestamp=queued)
    if figures.ttft_ms is not None:
        begun = queued + _nanoseconds(generation.usage().queue_ms / 1000)
        span.add_event("prefill", timestamp=begun)
        span.add_event("decode", timestamp=start + _nanoseconds(figures.ttft_ms / 1000))


def _nanoseconds(seconds: float) -> int:
    return int(1e9 * seconds)
