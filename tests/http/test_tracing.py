"""A span for each generation request: its attributes, its parent, and its export."""

import asyncio
import http.server
import logging
import threading

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from server.engine.core.request import FinishReason
from server.engine.link.protocol import EngineState
from server.http import tracing
from tests.http.fakes import event, put, say, silent
from tests.http.serving import Server
from tests.waiting import GIVE_UP

pytestmark = pytest.mark.anyio

PROMPT = "a secret prompt"
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.fixture
def exporter(monkeypatch):
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "create_exporter", lambda endpoint: exporter)
    return exporter


@pytest.fixture
def make_traced(make_app, exporter):
    """Makes applications whose spans the exporter keeps; closes them."""
    apps = []

    def make(**limits):
        apps.append(make_app(otlp_endpoint="http://collector:4318", **limits))
        return apps[-1]

    yield make
    for app in apps:
        close(app)


def close(app):
    if app.middleware_stack is not None:
        app.state.tracing.close()


@pytest.fixture
def trace(make_traced, exporter):
    """Serves one request and returns its spans."""

    async def request(path, body, headers="", **limits):
        import json

        app = make_traced(**limits)
        async with Server(app, "httptools") as server:
            reader, writer = await server.connect()
            content = json.dumps(body).encode()
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: t\r\n{headers}Connection: close\r\n"
                f"Content-Length: {len(content)}\r\n\r\n".encode()
                + content
            )
            await reader.read()
            writer.close()
        await asyncio.to_thread(app.state.tracing.close)
        return exporter.get_finished_spans(), server.port

    return request


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/generate", {"inputs": PROMPT}, "text_completion"),
        ("/generate_stream", {"inputs": PROMPT}, "text_completion"),
        ("/v1/completions", {"prompt": PROMPT, "stream": True, "max_tokens": 7}, "text_completion"),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 7}, "text_completion"),
    ],
)
async def test_a_span_has_the_attributes_of_generative_ai(trace, engine, path, body, operation):
    engine.script = say([72, 105, 33], FinishReason.LENGTH, wait=0.01)

    (span,), port = await trace(path, body, "X-Request-Id: job-1\r\n")

    attributes = dict(span.attributes)
    assert span.name == f"{operation} fake/model"
    assert span.kind is SpanKind.SERVER
    assert span.status.status_code is StatusCode.UNSET
    expected = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tessera",
        "gen_ai.request.model": "fake/model",
        "gen_ai.response.model": "fake/model",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 15,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.latency.time_in_queue": 0.002,
        "gen_ai.latency.time_in_model_prefill": 0.25,
        "gen_ai.latency.time_in_model_decode": 0.5,
        "http.request.method": "POST",
        "http.route": path,
        "http.response.status_code": 200,
        "server.address": "127.0.0.1",
        "server.port": port,
        "tessera.request_id": "job-1",
        "tessera.outcome": "length",
    }
    assert {name: attributes.get(name) for name in expected} == expected
    assert "error.type" not in attributes
    assert attributes["gen_ai.request.max_tokens"] == engine.requests[0].sampling.max_new_tokens
    assert PROMPT not in span.to_json()
    assert span.parent is None


async def test_events_mark_queue_prefill_and_decode_in_order_within_the_span(trace, engine):
    engine.script = say([72, 105, 33], FinishReason.LENGTH, wait=0.01)

    (span,), _ = await trace("/generate_stream", {"inputs": PROMPT})

    assert [e.name for e in span.events] == ["queue", "prefill", "decode"]
    queue, prefill, _ = (e.timestamp for e in span.events)
    assert span.start_time <= queue < prefill
    assert all(span.start_time <= e.timestamp <= span.end_time for e in span.events)
    assert span.end_time - span.start_time >= 20e6


async def test_sampling_parameters_and_the_name_of_the_model_are_reported(trace):
    body = {
        "prompt": PROMPT, "model": "alias", "temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 7, "n": 2,
        "frequency_penalty": 1, "presence_penalty": -1, "max_tokens": 9, "stop": ["secret"],
    }  # fmt: skip

    (span,), _ = await trace("/v1/completions", body, served_model_name=("main", "alias"))

    expected = {
        "gen_ai.request.model": "alias",
        "gen_ai.response.model": "main",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.seed": 7,
        "gen_ai.request.frequency_penalty": 1.0,
        "gen_ai.request.presence_penalty": -1.0,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ("length", "length"),
    }
    assert {name: span.attributes.get(name) for name in expected} == expected
    assert "secret" not in span.to_json()


async def test_the_parent_is_the_span_of_the_w3c_headers(trace):
    headers = f"traceparent: {PARENT}\r\ntracestate: a=1\r\ntracestate: b=2\r\n"

    (span,), _ = await trace("/generate", {"inputs": "x"}, headers)

    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == SPAN_ID
    assert span.context.trace_state.to_header() == "a=1,b=2"


async def test_a_parent_that_is_not_sampled_has_no_span(trace):
    headers = f"traceparent: {PARENT[:-2]}00\r\n"

    spans, _ = await trace("/generate", {"inputs": "x"}, headers)

    assert spans == ()


@pytest.mark.parametrize("value", ["", "nonsense", f"00-{'0' * 32}-{SPAN_ID}-01", "\xff" * 55])
async def test_a_parent_that_is_not_valid_is_ignored(value):
    context = tracing.parent_context([(b"traceparent", value.encode("latin-1"))])

    assert not context


@pytest.mark.parametrize(
    ("body", "state", "status", "error"),
    [
        ({"inputs": 3}, EngineState.READY, 422, "validation"),
        ({"inputs": "x"}, EngineState.STARTING, 503, "unavailable"),
    ],
)
async def test_a_refused_request_has_a_span_with_its_error(
    trace, engine, body, state, status, error
):
    engine.state = state

    (span,), _ = await trace("/generate", body)

    assert span.name == "POST /generate"
    assert span.attributes["error.type"] == error
    assert span.attributes["http.response.status_code"] == status
    assert span.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_request_whose_client_disconnects_has_a_span(make_traced, engine, exporter, path):
    async def script(_engine, _request, stream):
        put(stream, event(1))
        await silent(_engine, _request, stream)

    engine.script = script
    app = make_traced()
    async with Server(app, "httptools") as server:
        _, writer = await server.post(path, {"inputs": PROMPT})
        async with asyncio.timeout(GIVE_UP):
            while not engine.running:  # noqa: ASYNC110 - no event signals it
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.wait_for(engine.abort_seen.wait(), GIVE_UP)
        await asyncio.sleep(0.05)
    await asyncio.to_thread(app.state.tracing.close)

    (span,) = exporter.get_finished_spans()
    assert span.attributes["error.type"] == "abort"
    assert span.attributes["http.response.status_code"] == 499
    assert span.attributes["gen_ai.usage.output_tokens"] == 1


async def test_other_routes_have_no_span(make_traced, exporter):
    import httpx

    app = make_traced()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        for path in ("/info", "/health", "/metrics", "/v1/models", "/nowhere"):
            await client.get(path)
    app.state.tracing.close()

    assert exporter.get_finished_spans() == ()


class Collector(http.server.BaseHTTPRequestHandler):
    received: list

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.received = []
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("suffix", ["", "/", "/v1/traces"])
async def test_spans_reach_a_collector_over_http(make_app, collector, monkeypatch, suffix):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    app = make_app(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}{suffix}")
    async with Server(app, "httptools") as server:
        for _ in range(3):
            reader, writer = await server.post("/generate", {"inputs": PROMPT})
            await reader.readuntil(b"}")
            writer.close()
        await asyncio.sleep(0.05)
    await asyncio.to_thread(app.state.tracing.close)

    requests = [ExportTraceServiceRequest.FromString(body) for _, body in collector.received]
    assert {path for path, _ in collector.received} == {"/v1/traces"}
    resources = [resource for request in requests for resource in request.resource_spans]
    spans = [s for r in resources for scope in r.scope_spans for s in scope.spans]
    assert [span.name for span in spans] == ["text_completion fake/model"] * 3
    identity = {a.key: a.value.string_value for a in resources[0].resource.attributes}
    assert identity["service.name"] == "tessera"
    assert identity["service.instance.id"]
    assert identity["deployment.environment.name"] == "test"


async def test_an_absent_collector_delays_neither_answers_nor_the_end(
    make_app, monkeypatch, caplog
):
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.3)
    app = make_app(otlp_endpoint="http://127.0.0.1:1")
    async with Server(app, "httptools") as server:
        reader, writer = await server.post("/generate", {"inputs": "x"})
        await asyncio.wait_for(reader.readuntil(b"}"), GIVE_UP)
        writer.close()
    await asyncio.wait_for(asyncio.to_thread(app.state.tracing.close), GIVE_UP)
