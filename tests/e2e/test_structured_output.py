"""Structured output of the bundled model over HTTP, with two front ends."""

import concurrent.futures
import json
import time

import httpx
import jsonschema
import pytest

from tests.e2e.conftest import Service
from tests.waiting import GIVE_UP

pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
HOSTILE = {"type": "string", "allOf": [{"pattern": f"^.*a.{{{i}}}b"} for i in range(1, 40)]}


@pytest.fixture(scope="module")
def url():
    service = Service(["--device=cpu", "--frontends=2"])
    try:
        service.wait_until_healthy()
        yield service.url
    finally:
        service.stop()


def body(seed, schema=SCHEMA, **parameters):
    grammar = {"type": "json", "value": schema}
    sampling = {"temperature": 1.2, "seed": seed, "max_new_tokens": 200, "grammar": grammar}
    return {"inputs": "A user as JSON: ", "parameters": sampling | parameters}


def post(url, content):
    return httpx.post(f"{url}/generate", json=content, timeout=60)


def test_replies_follow_the_schema(url):
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda seed: post(url, body(seed)), range(12)))

    for reply in replies:
        assert reply.status_code == 200, reply.text
        jsonschema.validate(json.loads(reply.json()["generated_text"]), SCHEMA)


@pytest.mark.slow
def test_streams_follow_the_schema_and_equal_the_reply_with_details(url):
    with httpx.stream(
        "POST", f"{url}/generate_stream", json=body(3, details=True), timeout=60
    ) as stream:
        events = [json.loads(line[5:]) for line in stream.iter_lines() if line.startswith("data:")]
    reply = post(url, body(3, details=True)).json()

    text = events[-1]["generated_text"]
    assert text == "".join(e["token"]["text"] for e in events if not e["token"]["special"])
    assert text == reply["generated_text"]
    assert events[-1]["details"]["finish_reason"] == "eos_token"
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.slow
def test_hostile_schemas_do_not_delay_other_requests(url):
    post(url, body(0))
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        hostile = [
            threads.submit(post, url, body(i, HOSTILE | {"title": str(i)})) for i in range(3)
        ]
        slowest = 0.0
        while not all(reply.done() for reply in hostile):
            started = time.monotonic()
            assert httpx.get(f"{url}/health", timeout=GIVE_UP).status_code == 200
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.02)

    for reply in hostile:
        assert reply.result().status_code == 422
        assert "2 seconds" in reply.result().json()["error"]
    assert slowest < 1.5
