"""Messages: tools, and the calls of a message."""

import itertools
import json

import pytest

from server.engine.core.request import FinishReason
from tests.http.dialects.anthropic.conftest import USER
from tests.http.dialects.anthropic.events import events, replayed
from tests.http.dialects.openai.test_tools import AWARE, CALL, OTHER_CALL, PARAMETERS

pytestmark = pytest.mark.anyio

TOOL = {"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}
CLOCK = {"type": "custom", "name": "now", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}


@pytest.fixture
def call(ask):
    """Posts a message with tools."""

    async def post(messages=(USER,), template=AWARE, tools=(TOOL, CLOCK), **fields):
        return await ask(messages, template, tools=list(tools), **fields)

    return post


def without_ids(content):
    """Return blocks without their ids, which must differ."""
    ids = [block.pop("id") for block in content if "id" in block]
    assert all(call_id.startswith("toolu_") for call_id in ids)
    assert len(set(ids)) == len(ids)
    return content


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_are_blocks_of_the_message(call, answer, stream):
    answer("I look." + CALL + OTHER_CALL)

    response = await call(stream=stream)

    reply = replayed(events(response)) if stream else response.json()
    assert reply["stop_reason"] == "tool_use"
    assert without_ids(reply["content"]) == [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Köln"}},
        {"type": "tool_use", "name": "now", "input": {}},
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_without_calls_ends_its_turn(call, answer, stream):
    answer("Hi")

    response = await call(stream=stream)

    reply = replayed(events(response)) if stream else response.json()
    assert reply["content"] == [{"type": "text", "text": "Hi"}]
    assert reply["stop_reason"] == "end_turn"


@pytest.mark.parametrize("end", [3, 11, 20, 37, 45, 52, 56, len(CALL) - 17])
async def test_a_call_that_is_cut_off_is_no_part_of_the_message(call, answer, end):
    answer("Hm." + CALL[:end], FinishReason.LENGTH)

    limit = {"max_tokens": len(("Hm." + CALL[:end]).encode())}
    reply = (await call(**limit)).json()
    streamed = replayed(events(await call(**limit, stream=True)))

    assert reply["stop_reason"] == streamed["stop_reason"] == "max_tokens"
    assert reply["content"] == streamed["content"]
    assert reply["content"] == [{"type": "text", "text": "Hm."}]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_calls_before_one_that_is_cut_off_stay(call, answer, stream):
    answer(CALL + OTHER_CALL[:40], FinishReason.LENGTH)

    response = await call(stream=stream)

    reply = replayed(events(response)) if stream else response.json()
    assert [block["name"] for block in reply["content"]] == ["weather"]


async def test_the_input_of_a_call_is_streamed_at_once_when_it_is_complete(call, answer):
    answer(CALL)

    found = events(await call(stream=True))

    deltas = [one["delta"] for one in found if one["type"] == "content_block_delta"]
    assert deltas == [{"type": "input_json_delta", "partial_json": '{"city": "Köln"}'}]


async def test_input_is_streamed_while_it_is_generated_if_the_tool_asks_for_it(call, answer):
    answer("Hm." + CALL + OTHER_CALL)
    tools = [TOOL | {"eager_input_streaming": True}, CLOCK]

    found = events(await call(tools=tools, stream=True))

    blocks = itertools.groupby(found[3:-2], lambda one: one["index"])
    counts = [sum(one["type"] == "content_block_delta" for one in group) for _, group in blocks]
    assert counts[1] > 10
    assert counts[2] == 1
    assert [b.get("input") for b in replayed(found)["content"]] == [None, {"city": "Köln"}, {}]


async def test_input_that_the_client_gets_at_once_ends_where_it_was_cut_off(call, answer):
    answer(CALL[:52], FinishReason.LENGTH)
    tools = [TOOL | {"eager_input_streaming": True}]

    found = events(await call(tools=tools, stream=True))
    reply = (await call(tools=tools)).json()

    kinds = [one["type"] for one in found]
    pieces = [one["delta"]["partial_json"] for one in found if one["type"] == "content_block_delta"]
    assert "".join(pieces) == '{"city"'
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert reply["content"] == []


@pytest.mark.parametrize("eager", [False, True])
async def test_a_call_that_is_cut_off_before_its_input_has_no_block(call, answer, eager):
    head = CALL.partition("{")[0] + '{"name": "weather", "arguments": '
    answer(head, FinishReason.LENGTH)
    tools = [TOOL | {"eager_input_streaming": eager}]

    found = events(await call(tools=tools, stream=True))

    assert [one["type"] for one in found] == [
        "message_start",
        "ping",
        "message_delta",
        "message_stop",
    ]


async def test_numbers_of_an_input_are_those_of_the_model(call, answer):
    answer(
        '<tool_call>\n{"name": "f", "arguments": {"n": 12345678901234567890123, "x": 1.50}}\n</tool_call>'
    )
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "x": {"type": "number"}}}

    response = await call(tools=[{"name": "f", "input_schema": schema}])

    assert '"input":{"n": 12345678901234567890123, "x": 1.50}' in response.text


@pytest.mark.parametrize(
    ("choice", "other"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "now"}, {"type": "function", "function": {"name": "now"}}),
    ],
)
@pytest.mark.parametrize("parallel", [True, False])
async def test_the_constraint_is_that_of_the_same_choice_in_chat(
    call, open_chat, engine, choice, other, parallel
):
    tools = [
        {"type": "function", "function": {"name": t["name"], "parameters": t["input_schema"]}}
        for t in (TOOL, CLOCK)
    ]
    await call(tool_choice=choice | {"disable_parallel_tool_use": not parallel})
    client = await open_chat(AWARE)
    await client.post(
        "/v1/chat/completions",
        json={
            "messages": [USER],
            "tools": tools,
            "tool_choice": other,
            "parallel_tool_calls": parallel,
        },
    )

    first, second = engine.requests
    assert first.sampling.grammar == second.sampling.grammar


async def test_the_template_gets_the_tools_as_in_chat(call, prompt):
    await call([USER], template="{{ tools | tojson }}", tools=[TOOL | {"cache_control": {}}])

    assert json.loads(prompt()) == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "The weather.",
                "parameters": PARAMETERS,
            },
        }
    ]


async def test_a_message_with_calls_and_their_results_can_be_sent_back(call, answer):
    answer("Hm." + CALL)
    content = (await call()).json()["content"]
    results = [{"type": "tool_result", "tool_use_id": content[1]["id"], "content": "rain"}]

    response = await call(
        [USER, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    )

    assert response.status_code == 200


async def test_tools_without_a_schema_are_left_out_with_a_warning(call, prompt):
    tools = [SEARCH, TOOL, {"type": "bash_20250124", "name": "bash"}]
    response = await call(tools=tools)

    assert response.json()["warnings"] == [
        "`tools.0`, `tools.2` cannot be called: only tools with a schema can"
    ]
    assert "web_search" not in prompt()


async def test_only_tools_without_a_schema_are_no_tools(call, engine):
    response = await call(tools=[SEARCH] * 10)

    assert response.json()["warnings"][0].endswith(
        "`tools.7` and 2 more cannot be called: only tools with a schema can"
    )
    assert engine.requests[0].sampling.grammar is None


async def test_a_name_may_have_128_characters(call, answer):
    answer("Hi")

    statuses = [
        (await call(tools=[TOOL | {"name": "f" * length}])).status_code for length in (128, 129)
    ]

    assert statuses == [200, 400]


async def test_tools_and_a_schema_go_together(call, answer):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    fields = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}

    answer(CALL)
    called = (await call(**fields)).json()
    answer('{"a": 1}')
    text = (await call(**fields)).json()

    assert (called["stop_reason"], called["content"][0]["name"]) == ("tool_use", "weather")
    assert (text["stop_reason"], text["content"]) == (
        "end_turn",
        [{"type": "text", "text": '{"a": 1}'}],
    )


async def test_fields_of_tools_without_effect_are_in_the_warnings(call):
    tool = TOOL | {"defer_loading": True, "input_examples": [{"city": "K"}]}
    response = await call(tools=[tool, CLOCK | {"defer_loading": False}])

    assert response.json()["warnings"] == [
        "`tools`: `defer_loading` has no effect",
        "`tools`: `input_examples` has no effect",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"name": "f"}]}, "`tools.0.input_schema` must be a JSON schema, an object. Given: null"),
        ({"tools": [SEARCH, {"name": 1, "input_schema": {}}]}, "`tools.1.name` must have 1 to 128 letters"),
        ({"tools": [{"name": {}, "input_schema": {}, "eager_input_streaming": True}]}, "`tools.0.name` must have"),
        ({"tools": [TOOL, TOOL]}, "`tools` has several functions with the name `weather`"),
        (
            {"tool_choice": {"type": "tool"}},
            "`tool_choice.name` must be the name of a tool with a schema. Given: null",
        ),
        (
            {"tool_choice": {"type": "tool", "name": "other"}},
            "`tool_choice.name` must be the name of a tool with a schema. Given: `other`",
        ),
        (
            {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
            "`tool_choice.name` must be the name of a tool with a schema. Given: `web_search`",
        ),
        ({"tools": [], "tool_choice": {"type": "any"}}, "`tool_choice` must be auto or none without `tools`."),
        ({"tool_choice": {"type": "sometimes"}}, "`tool_choice.type` must be 'auto', 'any', 'tool' or 'none'."),
        ({"tool_choice": "auto"}, "`tool_choice` must be an object. Given: a string"),
    ],
)  # fmt: skip
async def test_bad_tools_are_refused_by_name(call, engine, fields, message):
    response = await call(**fields)

    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)
    assert engine.requests == []
