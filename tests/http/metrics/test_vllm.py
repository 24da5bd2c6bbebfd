"""Metrics under vLLM's names."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.engine.core.messages import EngineStats
from server.engine.core.request import FinishReason
from server.http.metrics.specs import HISTOGRAMS
from tests.http.fakes import event, put, say
from tests.http.metrics.dashboards import VLLM_DASHBOARD, VLLM_OTHERS, resolve

pytestmark = pytest.mark.anyio

# Source: vllm/v1/metrics/loggers.py@005a810b
VLLM_BUCKETS = {
    "tessera_time_to_first_token_seconds": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
        2560,
    ),
    "tessera_inter_token_latency_seconds": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
    ),
    "tessera_request_duration_seconds": (
        0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
    ),
}  # fmt: skip


@pytest.fixture
def scrape(client):
    async def read():
        text = (await client.get("/metrics")).text
        return [s for family in text_string_to_metric_families(text) for s in family.samples]

    return read


def value(samples, selector):
    (sample,) = resolve(selector, samples)
    assert sample.labels["model_name"] == "fake/model"
    assert sample.labels["engine"] == "0"
    return sample.value


@pytest.mark.parametrize("selector", VLLM_DASHBOARD + VLLM_OTHERS)
async def test_every_series_that_dashboards_and_gateways_select_exists(client, scrape, selector):
    await client.post("/generate", json={"inputs": "x"})

    assert resolve(selector, await scrape())


@pytest.mark.parametrize("name", VLLM_BUCKETS)
def test_the_buckets_contain_vllms(name):
    (spec,) = [spec for spec in HISTOGRAMS if spec.name == name]

    assert set(VLLM_BUCKETS[name]) <= set(spec.buckets)


async def test_values_are_those_of_the_own_metrics(client, engine, scrape, tokenizer):
    engine.stats = EngineStats(
        num_running=3, num_waiting=2, kv_usage=0.5, prefix_cache_query_tokens=100, prefix_cache_hit_tokens=40,
        num_preemptions=1, prompt_tokens=70, generation_tokens=8,
    )  # fmt: skip
    engine.past = EngineStats(generation_tokens=50)
    engine.script = say(tokenizer.encode("four"), FinishReason.LENGTH)
    await client.post("/generate", json={"inputs": "hello", "parameters": {"max_new_tokens": 9}})

    samples = await scrape()

    assert value(samples, "vllm:num_requests_running") == 3
    assert value(samples, "vllm:num_requests_waiting") == 2
    assert value(samples, "vllm:kv_cache_usage_perc") == 0.5
    assert value(samples, "vllm:prefix_cache_queries_total") == 100
    assert value(samples, "vllm:prefix_cache_hits_total") == 40
    assert value(samples, "vllm:num_preemptions_total") == 1
    assert value(samples, "vllm:prompt_tokens_total") == 70
    assert value(samples, "vllm:prompt_tokens_by_source_total{source=local_compute}") == 30
    assert value(samples, "vllm:generation_tokens_total") == 58
    assert value(samples, "vllm:request_prompt_tokens_sum") == 5
    assert value(samples, "vllm:request_generation_tokens_sum") == 4
    assert value(samples, "vllm:request_params_max_tokens_sum") == 9
    assert value(samples, "vllm:request_queue_time_seconds_sum") == 0.002
    assert value(samples, "vllm:request_prefill_time_seconds_sum") == 0.25
    assert value(samples, "vllm:request_decode_time_seconds_sum") == 0.5
    assert value(samples, "vllm:request_inference_time_seconds_sum") == 0.75
    assert value(samples, "vllm:request_time_per_output_token_seconds_sum") == 0.5 / 3
    assert value(samples, "vllm:cache_config_info{block_size=16,num_gpu_blocks=64}") == 1


async def test_requests_are_counted_by_finished_reason_with_aborts(
    make_app, client, engine, scrape
):
    for reason in (FinishReason.LENGTH, FinishReason.EOS, FinishReason.STOP, FinishReason.EOS):
        engine.script = say([1], reason)
        await client.post("/generate", json={"inputs": "x"})

    async def broken(_engine, _request, stream):
        put(stream, event(None, FinishReason.ERROR, error="x"))

    engine.script = broken
    await client.post("/generate", json={"inputs": "x"})

    samples = resolve("vllm:request_success_total{finished_reason}", await scrape())
    assert {s.labels["finished_reason"]: s.value for s in samples} == {
        "stop": 3, "length": 1, "abort": 0, "error": 1,
    }  # fmt: skip
