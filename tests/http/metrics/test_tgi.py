"""Metrics under the names of Text Generation Inference."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.engine.core.accounting import STEP_SECONDS_BOUNDS
from server.engine.core.messages import EngineStats, EngineTotals, encode_totals
from server.engine.core.request import FinishReason
from tests.http.fakes import say
from tests.http.metrics.dashboards import TGI_DASHBOARD, resolve

pytestmark = pytest.mark.anyio


@pytest.fixture
def scrape(client):
    async def read():
        text = (await client.get("/metrics")).text
        return [s for family in text_string_to_metric_families(text) for s in family.samples]

    return read


def value(samples, selector):
    (sample,) = resolve(selector, samples)
    return sample.value


@pytest.mark.parametrize("selector", TGI_DASHBOARD)
async def test_every_series_of_the_dashboard_exists(client, scrape, selector):
    await client.post("/generate", json={"inputs": "x"})

    assert resolve(selector, await scrape())


async def test_requests_are_counted_as_successes_and_failures(client, scrape):
    await client.post("/generate", json={"inputs": "x"})
    await client.post("/generate", json={"inputs": ""})
    await client.post("/tokenize", json={"inputs": "x"})

    samples = await scrape()

    assert value(samples, "tgi_request_count") == 2
    assert value(samples, "tgi_request_success") == 1
    assert value(samples, "tgi_request_failure{err=validation}") == 1
    assert value(samples, "tgi_request_failure{err=dropped}") == 0


async def test_values_are_those_of_the_own_metrics(client, engine, scrape, tokenizer):
    steps = [0] * (len(STEP_SECONDS_BOUNDS) + 1)
    steps[3], steps[-1] = 2, 1
    engine.stats = EngineStats(
        num_running=3, num_waiting=2, num_reserved_tokens=77, prefill_seconds=7.5,
        totals=encode_totals(EngineTotals(prefill_steps=steps)),
    )  # fmt: skip
    engine.script = say(tokenizer.encode("four"), FinishReason.LENGTH)
    await client.post("/generate", json={"inputs": "hello", "parameters": {"max_new_tokens": 9}})

    samples = await scrape()

    assert value(samples, "tgi_queue_size") == 2
    assert value(samples, "tgi_batch_current_size") == 3
    assert value(samples, "tgi_batch_current_max_tokens") == 77
    assert value(samples, "tgi_batch_max_total_tokens") == 1024
    assert value(samples, "tgi_request_input_length_sum") == 5
    assert value(samples, "tgi_request_generated_tokens_sum") == 4
    assert value(samples, "tgi_request_max_new_tokens_sum") == 9
    assert value(samples, "tgi_request_inference_duration_sum") == 0.75
    assert value(samples, "tgi_request_mean_time_per_token_duration_sum") == 0.5 / 3
    assert value(samples, "tgi_batch_inference_count{method=prefill}") == 3
    assert value(samples, "tgi_batch_inference_duration_sum{method=prefill}") == 7.5
    assert value(samples, "tgi_batch_forward_duration_bucket{method=prefill,le=0.002}") == 2
    assert value(samples, "tgi_batch_forward_duration_count{method=decode}") == 0
