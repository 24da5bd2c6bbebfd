"""GET /metrics: names, formats, counts, and counters that never fall."""

import pytest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from server.engine.core.messages import EngineStats
from server.engine.core.request import FinishReason
from server.engine.link.protocol import EngineReport, EngineState
from server.http.metrics.histogram import Histogram, cumulative, num_cells
from server.http.metrics.specs import SPECS
from server.version import version
from tests.http.fakes import event, put, say

pytestmark = pytest.mark.anyio


@pytest.fixture
def scrape(client):
    """Returns all samples, by name and labels."""

    async def read():
        response = await client.get("/metrics")
        assert response.status_code == 200
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(response.text)
            for sample in family.samples
        }

    return read


def requests(samples, endpoint="generate"):
    return {
        dict(key[1:])["outcome"]: value
        for key, value in samples.items()
        if key[0] == "tessera_requests_total" and dict(key[1:])["endpoint"] == endpoint
    }


async def test_prometheus_parses_all_metrics(client, engine):
    engine.others = [EngineReport()]  # some metrics are of services with several engines
    response = await client.get("/metrics")

    assert response.headers["content-type"].startswith("text/plain; version=")
    names = {family.name for family in text_string_to_metric_families(response.text)}
    assert {spec.name for spec in SPECS} <= names | {f"{n}".removesuffix("_info") for n in names}


async def test_openmetrics_is_served_on_request(client):
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

    response = await client.get(
        "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
    )

    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")
    families = {family.name: family.type for family in parse(response.text)}
    assert families["tessera_requests"] == "counter"
    assert families["tessera_build"] == "info"
    assert families["tessera_request_duration_seconds"] == "histogram"


def test_every_latency_histogram_has_bounds_at_half_a_millisecond_and_one():
    for spec in SPECS:
        if spec.name.endswith("_seconds") and spec.kind is HistogramMetricFamily:
            assert {0.0005, 0.001} <= set(spec.buckets), spec.name
        assert list(spec.buckets) == sorted(set(spec.buckets))


async def test_requests_are_counted_by_outcome(client, engine, scrape, tokenizer):
    body = {"inputs": "x"}
    for reason in (FinishReason.LENGTH, FinishReason.EOS, FinishReason.STOP):
        engine.script = say([1, 2], reason)
        await client.post("/generate", json=body)
    await client.post("/generate", json={"inputs": ""})
    await client.post("/generate", content=b"{")

    async def broken(_engine, _request, stream):
        put(stream, event(None, FinishReason.ERROR, error="x"))

    engine.script = broken
    await client.post("/generate", json=body)
    await client.post("/generate_stream", json=body)
    await client.post("/tokenize", json=body)
    engine.state = EngineState.RESTARTING
    await client.post("/generate", json=body)

    samples = await scrape()
    assert requests(samples) == {
        "length": 1, "eos_token": 1, "stop_sequence": 1, "validation": 2, "error": 1,
        "unavailable": 1,
    }  # fmt: skip
    assert requests(samples, "generate_stream") == {"error": 1}
    assert requests(samples, "tokenize") == {"ok": 1}


async def test_latencies_and_lengths_of_a_request_are_observed(client, engine, scrape, tokenizer):
    engine.script = say(tokenizer.encode("four"), FinishReason.LENGTH, wait=0.005)

    await client.post("/generate_stream", json={"inputs": "hello"})

    samples = await scrape()
    assert samples["tessera_time_to_first_token_seconds_count",] == 1
    assert samples["tessera_inter_token_latency_seconds_count",] == 3
    assert samples["tessera_inter_token_latency_seconds_sum",] > 0.01
    assert samples["tessera_request_duration_seconds_count",] == 1
    assert samples["tessera_request_queue_seconds_sum",] == 0.002
    assert samples["tessera_request_prompt_tokens_sum",] == 5
    assert samples["tessera_request_generated_tokens_sum",] == 4


async def test_engine_statistics_are_read_at_each_scrape(engine, scrape):
    engine.stats = EngineStats(
        num_running=3, num_waiting=2, num_blocks=64, num_free_blocks=10, kv_usage=0.5,
        prefix_cache_query_tokens=100, prefix_cache_hit_tokens=40, num_preemptions=1,
        prompt_tokens=7, generation_tokens=8, num_steps=9,
    )  # fmt: skip

    samples = await scrape()

    assert samples["tessera_requests_running",] == 3
    assert samples["tessera_requests_waiting",] == 2
    assert samples["tessera_kv_blocks",] == 64
    assert samples["tessera_kv_blocks_free",] == 10
    assert samples["tessera_kv_cache_usage_ratio",] == 0.5
    assert samples["tessera_prefix_cache_query_tokens_total",] == 100
    assert samples["tessera_prefix_cache_hit_tokens_total",] == 40
    assert samples["tessera_preemptions_total",] == 1
    assert samples["tessera_prompt_tokens_total",] == 7
    assert samples["tessera_generation_tokens_total",] == 8
    assert samples["tessera_engine_steps_total",] == 9


async def test_the_attention_plan_is_reported_by_phase_and_window(scrape):
    samples = await scrape()

    plans = [
        {**dict(key[1:]), "value": value}
        for key, value in samples.items()
        if key[0] == "tessera_attention_plan_info"
    ]
    assert plans == [
        {"arch": "h100", "kernel": kernel, "phase": phase, "sliding_window": window, "value": 1}
        for phase, window, kernel in (
            ("prefill", "none", "torch_prefill"),
            ("decode", "none", "portable_decode"),
            ("decode", "4096", "portable_decode"),
        )
    ]


async def test_no_plan_is_reported_before_the_engine_is_ready(engine, scrape):
    engine.info = None

    samples = await scrape()

    assert not [key for key in samples if key[0] == "tessera_attention_plan_info"]


async def test_the_engines_state_is_reported(engine, scrape):
    engine.state, engine.restarts, engine.info = EngineState.RESTARTING, 2, None

    samples = await scrape()

    assert samples["tessera_engine_up",] == 0
    assert samples["tessera_engine_restarts_total",] == 2
    assert samples["tessera_engine_state", ("state", "restarting")] == 1
    assert samples["tessera_engine_state", ("state", "ready")] == 0
    assert samples["tessera_build_info", ("model_id", "fake/model"), ("version", version())] == 1


async def test_counters_include_engines_that_have_ended(engine, scrape):
    engine.past, engine.stats = EngineStats(generation_tokens=50), EngineStats(generation_tokens=3)

    assert (await scrape())["tessera_generation_tokens_total",] == 53


async def test_text_from_a_client_never_becomes_a_label(client, scrape):
    await client.post("/nothing-here")
    await client.post("/generate", json={"inputs": "x", "secret-field": 1})
    await client.request("BREW", "/generate")

    assert not [key for key in await scrape() if "secret" in str(key) or "nothing" in str(key)]


async def test_in_flight_requests_are_those_not_yet_answered(client, engine, scrape):
    seen = []

    async def script(_engine, _request, stream):
        seen.append((await scrape())["tessera_requests_in_flight",])
        put(stream, event(1, FinishReason.LENGTH))

    engine.script = script

    await client.post("/generate", json={"inputs": "x"})

    assert seen == [1]
    assert (await scrape())["tessera_requests_in_flight",] == 0


def test_a_histogram_counts_a_value_in_the_first_bucket_that_contains_it():
    bounds = (1, 2, 5)
    cells = [0.0] * num_cells(bounds)
    histogram = Histogram(bounds, cells)

    for value in (0.5, 1, 1.5, 7):
        histogram.observe(value)
    histogram.observe(2, times=3)

    assert cumulative(bounds, cells) == ([("1.0", 2), ("2.0", 6), ("5.0", 6), ("+Inf", 7)], 16.0)


def test_a_histogram_counts_equal_values_in_sequence():
    bounds = (1, 2, 5)
    cells = [0.0] * num_cells(bounds)
    histogram = Histogram(bounds, cells)

    for value in (2, 2, 7, 2, 2):
        histogram.observe(value)

    assert cumulative(bounds, cells) == ([("1.0", 0), ("2.0", 4), ("5.0", 4), ("+Inf", 5)], 15.0)


async def test_several_engines_have_metrics_of_their_own_beside_the_sums(client, engine, scrape):
    assert ("tessera_engine_process_up", ("engine", "0")) not in await scrape()
    engine.past = EngineStats(generation_tokens=50)
    engine.stats = EngineStats(generation_tokens=3, num_running=2)
    engine.others = [
        EngineReport(
            state=EngineState.RESTARTING, restarts=4, stats=EngineStats(engine=1, kv_usage=0.5)
        )
    ]
    samples = await scrape()

    def of_each(name):
        return [samples[f"tessera_engine_process_{name}", ("engine", i)] for i in "01"]

    assert samples["tessera_engines",] == 2
    assert of_each("up") == [1, 0]
    assert of_each("restarts_total") == [0, 4]
    assert of_each("requests_running") == [2, 0]
    assert of_each("kv_cache_usage_ratio") == [0, 0.5]
    assert of_each("generation_tokens_total") == [53, 0]
