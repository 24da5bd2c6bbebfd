"""`functions` and `function_call` of /v1/chat/completions: the older form of tools, in requests and in replies."""

import json

import msgspec
import openai
import pytest

from model.text.chat_template import ChatTemplate
from server.engine.core.request import FinishReason
from server.http.dialects.openai.replies import ChatChunk, ChatReply
from tests.http.dialects.openai.events import chunks
from tests.http.dialects.openai.test_tools import AWARE, CALL, OTHER_CALL, PARAMETERS, PLAIN, USER
from tests.http.fakes import INFO
from tests.http.serving import Server

pytestmark = pytest.mark.anyio

WEATHER = {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}
CLOCK = {"name": "now"}


@pytest.fixture(autouse=True)
def large_context(engine):
    engine.info = msgspec.structs.replace(INFO, max_model_len=4096, max_total_tokens=4096)


@pytest.fixture
async def ask(open_client, tokenizer):
    async def post(messages=(USER,), template=AWARE, functions=(WEATHER, CLOCK), **fields):
        client = await open_client(chat_template=ChatTemplate({"default": template}, tokenizer))
        body = {"messages": list(messages), "functions": list(functions), **fields}
        return await client.post("/v1/chat/completions", json=body)

    return post


async def test_a_call_is_the_function_call_of_the_message(ask, answer):
    answer("Hm." + CALL)

    reply = (await ask()).json()

    (choice,) = reply["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hm.",
        "refusal": None,
        "function_call": {"name": "weather", "arguments": '{"city": "Köln"}'},
    }
    assert choice["finish_reason"] == "function_call"
    msgspec.convert(reply, ChatReply)


async def test_a_message_without_a_call_is_text(ask, answer):
    answer("Hi")

    (choice,) = (await ask()).json()["choices"]

    assert choice["message"] == {"role": "assistant", "content": "Hi", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_a_stream_has_the_call_in_pieces(ask, answer):
    answer("Hm." + CALL)

    events = chunks(await ask(stream=True))

    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert [call["name"] for call in calls if "name" in call] == ["weather"]
    assert "".join(call["arguments"] for call in calls) == '{"city": "Köln"}'
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hm."
    assert not any("tool_calls" in delta for delta in deltas)
    assert events[-1]["choices"][0]["finish_reason"] == "function_call"
    for event in events:
        msgspec.convert(event, ChatChunk)


async def test_a_call_that_is_cut_off_ends_with_length(ask, answer):
    answer(CALL[:52], FinishReason.LENGTH)

    (choice,) = (await ask()).json()["choices"]

    assert choice["finish_reason"] == "length"
    assert choice["message"]["function_call"]["arguments"] == '{"city"'


@pytest.mark.parametrize(
    ("fields", "contained", "absent"),
    [
        ({}, ["TEXT", "weather", "now"], [")*"]),
        ({"function_call": "auto"}, ["TEXT", "weather", "now"], [")*"]),
        ({"function_call": {"name": "now"}}, ["now"], ["TEXT", "weather", ")*"]),
    ],
)
async def test_the_grammar_allows_one_call_at_most(ask, engine, fields, contained, absent):
    response = await ask(**fields)

    assert response.status_code == 200, response.text
    grammar = engine.requests[-1].sampling.grammar
    assert [text for text in contained if text not in grammar] == []
    assert [text for text in absent if text in grammar] == []


async def test_no_function_is_called_if_none_may_be(ask, engine):
    await ask(function_call="none")

    assert engine.requests[-1].sampling.grammar is None


@pytest.mark.parametrize("template", [AWARE, PLAIN])
async def test_the_prompt_is_that_of_the_same_tools(ask, engine, tokenizer, template):
    call = {"name": "weather", "arguments": '{"city": "K"}'}
    older = [
        USER,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    newer = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "weather", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "weather", "name": "weather", "content": "rain"},
    ]

    response = await ask(older, template)
    assert response.status_code == 200, response.text
    response = await ask(newer, template)
    assert response.status_code == 200, response.text

    first, second = [tokenizer.decode(r.prompt_token_ids) for r in engine.requests]
    assert first == second
    assert "rain" in first or template == AWARE
    assert json.dumps("weather") in first


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": []}, "`functions` and `tools` exclude each other"),
        ({"tool_choice": "auto", "function_call": "auto"}, "`function_call` and `tool_choice` exclude each other"),
        ({"function_call": "weather"}, "`function_call` must be none, auto or an object with the `name`"),
        ({"function_call": {}}, "`function_call` must be none, auto or an object"),
        ({"function_call": {"name": "x"}}, "must be the name of a tool: `weather`, `now`. Given: `x`"),
        ({"functions": [{"name": "a b"}]}, "`functions.0.name` must have 1 to 64 letters"),
        ({"functions": [CLOCK, CLOCK]}, "several functions with the name `now`"),
    ],
)  # fmt: skip
async def test_what_cannot_be_used_is_refused_by_name(ask, fields, message):
    response = await ask(**fields)

    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


async def test_a_second_call_is_not_reported(ask, answer):
    answer(CALL + OTHER_CALL)

    message = (await ask()).json()["choices"][0]["message"]

    assert message["function_call"]["name"] == "weather"


async def test_the_openai_client_reads_the_call(make_app, tokenizer, answer):
    answer(CALL)
    app = make_app(ChatTemplate({"default": AWARE}, tokenizer))
    async with Server(app, "httptools") as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            reply = await client.chat.completions.create(
                model="fake/model",
                messages=[USER],
                functions=[WEATHER],
                function_call={"name": "weather"},
            )

    assert reply.choices[0].message.function_call.name == "weather"
    assert json.loads(reply.choices[0].message.function_call.arguments) == {"city": "Köln"}
    assert reply.choices[0].finish_reason == "function_call"
