"""POST /v1/messages with the bundled model."""

import json

import httpx
import pytest

from tests.http.dialects.anthropic.events import events, replayed

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HEADER = "x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch="
TOOL = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def ask(bundled_service):
    def post(path="", **fields):
        body = {
            "model": "claude-opus-4-8",
            "max_tokens": 100,
            "temperature": 0,
            "messages": [{"role": "user", "content": "Return the sum of two numbers."}],
            **fields,
        }
        response = httpx.post(f"{bundled_service.url}/v1/messages{path}", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response

    return post


def test_requests_that_differ_in_their_billing_header_share_the_prefix_cache(ask):
    text = "You write functions in Python, with a docstring for each of them. " * 4
    first, second = [
        ask(
            max_tokens=1,
            system=[{"type": "text", "text": f"{HEADER}{i};"}, {"type": "text", "text": text}],
        ).json()["usage"]
        for i in range(2)
    ]

    total = first["input_tokens"] + first["cache_read_input_tokens"]
    assert second["cache_read_input_tokens"] > total - 20
    assert second["input_tokens"] + second["cache_read_input_tokens"] == total


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}])
def test_the_count_is_that_of_the_message(ask, fields):
    count = ask("/count_tokens", **fields).json()["input_tokens"]
    usage = ask(**fields).json()["usage"]

    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count


def test_a_stream_has_the_text_of_the_reply(ask):
    reply, streamed = ask().json(), replayed(events(ask(stream=True)))

    assert streamed["content"] == reply["content"]
    assert reply["content"][0]["text"]
    assert streamed["stop_reason"] == reply["stop_reason"]


def test_a_forced_call_has_its_input(ask):
    fields = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}

    reply, streamed = ask(**fields).json(), replayed(events(ask(**fields, stream=True)))

    assert reply["stop_reason"] == streamed["stop_reason"] == "tool_use"
    assert [block["input"] for block in reply["content"]] == [
        block["input"] for block in streamed["content"]
    ]
    assert reply["content"][-1]["input"].keys() == {"city", "days"}


def test_a_schema_is_followed(ask):
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }

    reply = ask(output_config={"format": {"type": "json_schema", "schema": schema}}).json()

    assert json.loads(reply["content"][0]["text"])["kind"] in ("a", "b")
