"""What the replies report adds up to what the engine reports."""

import concurrent.futures
import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.test_serve import idle
from tests.waiting import until

pytestmark = pytest.mark.e2e

REASONS = {"eos_token": "eos", "stop_sequence": "stop", "length": "length"}


def totals(service, name, label):
    text = httpx.get(f"{service.url}/metrics").text
    return {
        sample.labels.get(label, ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def ended_sequences(service):
    return totals(service, "tessera_sequences_ended_total", "reason")


def plain(service, i):
    """Return why a reply ended, and what it reports."""
    parameters = {"max_new_tokens": 90 + i, "details": True, "ignore_eos": True}
    if i % 3 == 0:
        parameters["stop"] = ["e"]
    body = {"inputs": f"import os\n\ndef f{i % 4}(x):\n", "parameters": parameters}
    reply = httpx.post(f"{service.url}/generate", json=body, timeout=60)
    assert reply.status_code == 200
    keys = ("device-seconds", "kv-block-seconds", "computed-prompt-tokens", "recomputed-tokens")
    figures = {key: float(reply.headers[f"x-tessera-{key}"]) for key in keys}
    return REASONS[reply.json()["details"]["finish_reason"]], figures


def streamed(service, i):
    parameters = {"max_new_tokens": 90 + i, "details": True, "ignore_eos": True}
    if i % 4 == 0:
        parameters["stop"] = ["return"]
    body = {"inputs": f"class A{i % 3}:\n", "parameters": parameters}
    with httpx.stream("POST", f"{service.url}/generate_stream", json=body, timeout=60) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("data:")]
    details = json.loads(lines[-1].removeprefix("data:"))["details"]
    figures = {key.replace("_", "-"): value for key, value in details["usage"].items()}
    return REASONS[details["finish_reason"]], figures


def abandoned(service, i):
    body = {"inputs": f"abandoned {i}", "parameters": {"max_new_tokens": 150}}
    with httpx.stream("POST", f"{service.url}/generate_stream", json=body, timeout=60) as reply:
        next(reply.iter_lines())


@pytest.mark.slow
@pytest.mark.parametrize("frontends", [1, 2])
def test_what_replies_report_adds_up_to_the_engines_totals(start_service, frontends):
    # The small cache makes sequences wait for blocks and preempts some.
    service = start_service(
        "--device=cpu", "--kv-cache-tokens=512", f"--frontends={frontends}", "--max-model-len=256"
    )
    service.wait_until_healthy()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        replies = [pool.submit(plain, service, i) for i in range(14)]
        replies += [pool.submit(streamed, service, i) for i in range(6)]
        left = [pool.submit(abandoned, service, i) for i in range(3)]
        reported = [reply.result() for reply in replies]
        for one in left:
            one.result()
    # The metrics are those of the engine's last message, which may arrive after the last reply.
    until(lambda: idle(service) and sum(ended_sequences(service).values()) == 23)

    device = totals(service, "tessera_sequence_device_seconds_total", "reason")
    blocks = totals(service, "tessera_sequence_kv_block_seconds_total", "reason")
    ended = ended_sequences(service)
    for reason in ("stop", "length"):
        mine = [figures for name, figures in reported if name == reason]
        assert len(mine) == ended[reason] > 0
        assert sum(f["device-seconds"] for f in mine) == pytest.approx(device[reason], rel=0.01)
        assert sum(f["kv-block-seconds"] for f in mine) == pytest.approx(blocks[reason], rel=0.01)
    assert ended["abort"] == 3
    assert sum(ended.values()) == 23
    all_steps = totals(service, "tessera_device_seconds_total", "phase")
    assert sum(device.values()) == pytest.approx(sum(all_steps.values()), rel=0.01)
    assert sum(blocks.values()) == pytest.approx(
        service.metric("tessera_kv_block_seconds_total"), rel=0.01
    )
    assert service.metric("tessera_preemptions_total") > 0
    assert sum(f["recomputed-tokens"] for _, f in reported) > 0
