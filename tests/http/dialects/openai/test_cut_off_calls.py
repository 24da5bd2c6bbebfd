"""Calls that are cut off: their syntax is no text, their end reason is none of a call, and both replies agree."""

import json

import httpx
import msgspec
import pytest

from model.text.chat_template import ChatTemplate
from model.text.tools.formats import FORMATS
from server.engine.core.request import FinishReason
from tests.http.dialects.openai.events import chunks
from tests.http.dialects.openai.responses_api.test_answer import events
from tests.http.fakes import EOS_ID, INFO, say
from tests.model.text.tools.tool_cases import SCHEMAS, TEXTS

pytestmark = pytest.mark.anyio

NAMES = [row.name for row in FORMATS]
TEMPLATE = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FREE_TEXT = "a < b, [T or {x"


@pytest.fixture(autouse=True)
def large_context(engine):
    engine.info = msgspec.structs.replace(INFO, max_model_len=4096, max_total_tokens=4096)


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture
async def client(make_app, tokenizer, name):
    template = ChatTemplate({"default": TEMPLATE}, tokenizer)
    app = make_app(template, tool_call_format=name)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def whole(client, **fields):
    response = await client.post("/v1/chat/completions", json=BODY | fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in choice["message"].get("tool_calls", ())
    ]
    return choice["message"]["content"] or "", calls, choice["finish_reason"]


async def streamed(client, **fields):
    found = chunks(await client.post("/v1/chat/completions", json=BODY | fields | {"stream": True}))
    content, calls, reason = "", [], None
    for (choice,) in (event["choices"] for event in found):
        delta = choice["delta"]
        assert delta or choice["finish_reason"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append((call["function"]["name"], ""))
            assert call["index"] == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + call["function"]["arguments"])
        reason = choice["finish_reason"]
    return content, calls, reason


async def response_items(client, *, stream):
    body = {"input": "hi", "tools": FLAT, "stream": stream}
    reply = await client.post("/v1/responses", json=body)
    output = events(reply)[-1]["response"]["output"] if stream else reply.json()["output"]
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]


@pytest.mark.parametrize("before", ["", "Hm. "])
async def test_no_syntax_is_content_wherever_a_message_is_cut_off(
    client, engine, tokenizer, name, before
):
    if before and name == "llama3":
        before = ""
    tokens = tokenizer.encode(before + TEXTS[name])
    complete = {"weather": 'Köln "a}\\'}
    for length in [*range(1, 41), *range(48, len(tokens), 9)]:
        engine.script = say(tokens[:length], FinishReason.LENGTH)
        content, calls, reason = await whole(client)

        assert content == before[:length]
        assert reason == "length"
        for called, arguments in calls:
            assert called in SCHEMAS
            assert "parameter" not in arguments
            assert "tool_call" not in arguments
        if length % 3 == 0:
            assert await streamed(client) == (content, calls, reason)
        if length % 7 == 0:
            items = await response_items(client, stream=False)
            assert items == await response_items(client, stream=True)
            texts = [item["content"][0]["text"] for item in items if item["type"] == "message"]
            assert "".join(texts) == content
            called = [(i["name"], i["arguments"]) for i in items if i["type"] == "function_call"]
            assert called == calls
    assert complete["weather"] in json.loads(calls[0][1])["city"]


async def test_text_that_only_begins_like_a_call_is_content(client, engine, tokenizer):
    for text in (
        FREE_TEXT,
        "<tool_calls>",
        "[TOOL_CALLS",
        "<|python",
        '{"name": 1}',
        "<tool_call>x",
    ):
        tokens = tokenizer.encode(text)
        engine.script = say([*tokens, EOS_ID], FinishReason.EOS)
        assert await whole(client) == (text, [], "stop")
        assert await streamed(client) == (text, [], "stop")
        engine.script = say(tokenizer.encode(text + "!"), FinishReason.LENGTH)
        assert await whole(client) == (text + "!", [], "length")


async def test_a_value_by_a_format_is_content_at_every_length(client, engine, tokenizer):
    tokens = tokenizer.encode('{"a": 12345}')
    for length in range(1, len(tokens) + 1):
        engine.script = say(tokens[:length], FinishReason.LENGTH)
        content, calls, reason = await whole(client, response_format=FORMAT)
        assert calls == []
        assert await streamed(client, response_format=FORMAT) == (content, calls, reason)
        if length >= 3:  # up to there a call of llama3 would be the same
            assert content == '{"a": 12345}'[:length]


async def test_a_call_or_a_value_follows_tools_and_a_format(client, engine, tokenizer, name):
    for text, called in ((TEXTS[name], True), ('{"a": 3}', False)):
        engine.script = say([*tokenizer.encode(text), EOS_ID], FinishReason.EOS)
        content, calls, reason = await whole(client, response_format=FORMAT)
        assert await streamed(client, response_format=FORMAT) == (content, calls, reason)
        assert content == ("" if called else text)
        assert [c for c, _ in calls] == (["weather", "now", "weather"] if called else [])
        assert reason == ("tool_calls" if called else "stop")


async def test_a_stop_string_within_a_call_claims_no_complete_call(client, engine, tokenizer, name):
    engine.script = say([*tokenizer.encode(TEXTS[name]), EOS_ID], FinishReason.EOS)

    content, calls, reason = await whole(client, stop=["ln"])

    assert (content, reason) == ("", "stop")
    assert [called for called, _ in calls] == ["weather"]
    assert calls[0][1].endswith('"Kö')
    assert await streamed(client, stop=["ln"]) == (content, calls, reason)


async def test_a_stop_string_within_what_begins_a_call_leaves_no_syntax(
    client, engine, tokenizer, name
):
    engine.script = say([*tokenizer.encode(TEXTS[name]), EOS_ID], FinishReason.EOS)
    for stop in ("eather", "all", "ALL", "name", "thon", "func"):
        if stop not in TEXTS[name].partition("weather")[0] + "weather":
            continue
        for fields in ({"stop": [stop]}, {"stop": [stop], "include_stop_str_in_output": True}):
            assert await whole(client, **fields) == ("", [], "stop")
            assert await streamed(client, **fields) == ("", [], "stop")


async def test_text_before_a_stop_string_is_kept(client, engine, tokenizer):
    for text in ("a <", "a [", "a {", "<tool", "[TOOL"):
        engine.script = say(tokenizer.encode(text + "; more"), FinishReason.LENGTH)
        assert await whole(client, stop=[";"]) == (text, [], "stop")
        assert await streamed(client, stop=[";"]) == (text, [], "stop")


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
async def test_events_without_text_are_sent_only_for_what_they_report(
    client, engine, tokenizer, name, fields
):
    tokens = [*tokenizer.encode(TEXTS[name]), EOS_ID]
    engine.script = say(tokens, FinishReason.EOS)

    plain = chunks(await client.post("/v1/chat/completions", json=BODY | {"stream": True}))
    full = chunks(await client.post("/v1/chat/completions", json=BODY | {"stream": True} | fields))

    assert len(plain) < len(tokens)
    assert sum(bool(event["choices"]) for event in full) == len(tokens) + 1
