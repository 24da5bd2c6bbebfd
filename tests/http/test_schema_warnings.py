"""Schemas that grammars enforce in part: every kind of reply warns, and says if the value does not match."""

import json

import httpx
import msgspec
import pytest

from model.text.chat_template import ChatTemplate
from server.engine.core.request import FinishReason
from server.http.app import create_app
from tests.http.conftest import CONFIG
from tests.http.fakes import EOS_ID, INFO, FakeEngine, say

pytestmark = pytest.mark.anyio

ITEMS = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
PARAMETERS = {"type": "object", "properties": {"a": ITEMS}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": ITEMS}}
USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "parameters": PARAMETERS}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": %s}}\n</tool_call>'
UNENFORCED = "the grammar does not enforce"
MISMATCH = "the value does not match the schema"
ENDS = ("[DONE]", '{"type":"message_stop"}')
CASES = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [USER], "response_format": FORMAT},
        "%s",
        "response_format.json_schema.schema",
    ),
    "chat with tools": (
        "/v1/chat/completions",
        {"messages": [USER], "tools": [{"type": "function", "function": TOOL}]},
        CALL,
        "tools",
    ),
    "completions": (
        "/v1/completions",
        {"prompt": "x", "max_tokens": 60, "structured_outputs": {"json": ITEMS}},
        "%s",
        "structured_outputs.json",
    ),
    "structural tag": (
        "/v1/completions",
        {
            "prompt": "x",
            "max_tokens": 60,
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<f>", "schema": ITEMS, "end": "</f>"}],
                "triggers": ["<f>"],
            },
        },
        "<f>%s</f>",
        "response_format",
    ),
    "newer structural tag": (
        "/v1/completions",
        {
            "prompt": "x",
            "max_tokens": 60,
            "response_format": {
                "type": "structural_tag",
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<f>"],
                    "tags": [
                        {
                            "type": "tag",
                            "begin": "<f>",
                            "content": {"type": "json_schema", "json_schema": ITEMS},
                            "end": "</f>",
                        }
                    ],
                },
            },
        },
        "<f>%s</f>",
        "response_format",
    ),
    "responses": (
        "/v1/responses",
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": ITEMS}}},
        "%s",
        "text.format.schema",
    ),
    "responses with tools": (
        "/v1/responses",
        {"input": "hi", "tools": [{"type": "function", **TOOL}]},
        CALL,
        "tools",
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": [USER],
            "max_tokens": 60,
            "output_config": {"format": {"type": "json_schema", "schema": ITEMS}},
        },
        "%s",
        "output_config.format.schema",
    ),
    "messages with tools": (
        "/v1/messages",
        {
            "messages": [USER],
            "max_tokens": 200,
            "tools": [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}],
        },
        CALL,
        "tools",
    ),
    "TGI": (
        "/generate",
        {"inputs": "x", "parameters": {"grammar": {"type": "json", "value": ITEMS}}},
        "%s",
        "grammar.value",
    ),
    "TGI with details": (
        "/generate",
        {
            "inputs": "x",
            "parameters": {"grammar": {"type": "json", "value": ITEMS}, "details": True},
        },
        "%s",
        "grammar.value",
    ),
}


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
async def engine(anyio_backend):
    engine = FakeEngine()
    engine.info = msgspec.structs.replace(INFO, max_model_len=4096, max_total_tokens=4096)
    return engine


@pytest.fixture(scope="module")
async def client(engine, tokenizer):
    """One application for all tests: each starts a process that checks schemas, which takes a second."""
    template = ChatTemplate({"default": "{{ tools }}{{ messages[0].content }}"}, tokenizer)
    app = create_app(engine, tokenizer, CONFIG, chat_template=template)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture
def ask(client, tokenizer, engine):
    """Returns the JSON of the reply, or of the events of the stream, to a request of a case."""

    async def post(name, value, *, stream=False, reason=FinishReason.EOS, **fields):
        path, body, text, _ = CASES[name]
        ids = tokenizer.encode(text % value, add_special_tokens=False)
        engine.script = say([*ids, EOS_ID] if reason is FinishReason.EOS else ids, reason)
        if path == "/generate":
            path += "_stream" if stream else ""
        else:
            body = {**body, "stream": stream}
        reply = await client.post(path, json={**body, **fields})
        assert reply.status_code == 200, reply.text
        if not stream:
            return reply.json(), reply.headers
        lines = [line[5:].strip() for line in reply.text.splitlines() if line.startswith("data:")]
        return [json.loads(line) for line in lines if line not in ENDS], reply.headers

    return post


def warnings_of(record):
    return record.get("warnings") or record.get("response", {}).get("warnings") or []


@pytest.mark.parametrize("name", CASES)
async def test_a_reply_says_what_is_not_enforced_and_what_does_not_match(ask, name):
    good, _ = await ask(name, "[1, 2]")
    bad, headers = await ask(name, "[1, 1]")
    cut, _ = await ask(name, "[1, 1", reason=FinishReason.LENGTH)

    for reply in (good, bad, cut):
        assert CASES[name][3] in reply["warnings"][0]
        assert UNENFORCED in reply["warnings"][0]
        assert "uniqueItems" in reply["warnings"][0]
    assert len(good["warnings"]) == len(cut["warnings"]) == 1
    assert MISMATCH in bad["warnings"][1]
    assert "`uniqueItems`" in bad["warnings"][1]
    assert json.loads(headers["x-tessera-warnings"]) == bad["warnings"]


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_warns_in_its_last_event_that_can(ask, name):
    good, _ = await ask(name, "[1, 2]", stream=True)
    bad, headers = await ask(name, "[1, 1]", stream=True)

    for events in (good, bad):
        assert all(not warnings_of(event) for event in events[:-1])
    assert len(warnings_of(good[-1])) == 1
    assert MISMATCH in warnings_of(bad[-1])[1]
    assert UNENFORCED in json.loads(headers["x-tessera-warnings"])[0]


async def test_with_an_event_for_the_usage_that_one_warns(ask):
    events, _ = await ask("chat", "[1, 1]", stream=True, stream_options={"include_usage": True})

    assert events[-1]["usage"]["completion_tokens"] > 0
    assert MISMATCH in events[-1]["warnings"][1]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert "warnings" not in events[-2]


async def test_a_schema_that_is_enforced_causes_no_warning(ask):
    schema = {"type": "array", "uniqueItems": False, "title": "x", "items": {"type": "integer"}}
    response_format = {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}

    reply, _ = await ask("chat", "[1, 1]", response_format=response_format)

    assert "warnings" not in reply


@pytest.mark.parametrize("name", ["chat", "responses", "chat with tools", "responses with tools"])
async def test_a_strict_schema_that_cannot_be_enforced_is_refused(client, name):
    path, body, _, field = CASES[name]
    body = json.loads(json.dumps(body).replace('"name":', '"strict": true, "name":'))

    reply = await client.post(path, json=body)

    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    assert field.split(".")[0] in message
    assert "the JSON schema keyword `uniqueItems` is not supported" in message
