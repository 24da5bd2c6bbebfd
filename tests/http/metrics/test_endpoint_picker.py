"""Replays how the endpoint picker of the Gateway API inference extension and llm-d reads /metrics."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.engine.core.messages import EngineStats
from server.engine.link.protocol import EngineReport

pytestmark = pytest.mark.anyio

GAUGES = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
CACHE = "vllm:cache_config_info"
LORA = "vllm:lora_requests_info"


def extract(text):
    """Return the picker's five fields. It takes the first series of a name, and integers of labels."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    fields = {name: families[name].samples[0].value for name in GAUGES}
    labels = families[CACHE].samples[0].labels
    fields["block_size"] = int(labels["block_size"])
    fields["num_gpu_blocks"] = int(labels["num_gpu_blocks"])
    return families, fields


@pytest.mark.parametrize("others", [[], [EngineReport()]], ids=["one engine", "two engines"])
async def test_the_picker_reads_its_five_fields_of_one_series_each(client, engine, others):
    engine.others = others
    engine.stats = EngineStats(num_running=7, num_waiting=4, kv_usage=0.25)

    families, fields = extract((await client.get("/metrics")).text)

    assert fields == {
        "vllm:num_requests_waiting": 4,
        "vllm:num_requests_running": 7,
        "vllm:kv_cache_usage_perc": 0.25,
        "block_size": 16,
        "num_gpu_blocks": 64,
    }
    assert {name: len(families[name].samples) for name in (*GAUGES, CACHE)} == dict.fromkeys(
        (*GAUGES, CACHE), 1
    )
    assert LORA not in families  # optional for the picker; this service has no adapters


async def test_an_idle_service_has_all_fields_from_the_first_scrape(client):
    _, fields = extract((await client.get("/metrics")).text)

    assert fields["vllm:num_requests_waiting"] == fields["vllm:num_requests_running"] == 0
    assert fields["vllm:kv_cache_usage_perc"] == 0


async def test_each_scrape_shows_the_load_of_its_moment(client, engine):
    seen = []
    for waiting in (0, 5, 1):
        engine.stats = EngineStats(num_waiting=waiting)
        seen.append(extract((await client.get("/metrics")).text)[1]["vllm:num_requests_waiting"])

    assert seen == [0, 5, 1]
