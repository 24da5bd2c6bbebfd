"""Tools of /v1/chat/completions: what is submitted, how calls are rendered, and what is refused."""

import json

import msgspec
import openai
import pytest

from model.text.chat_template import ChatTemplate
from server.engine.core.request import FinishReason
from server.http.dialects.openai.replies import ChatChunk, ChatReply
from tests.http.dialects.openai.events import chunks
from tests.http.fakes import EOS_ID, INFO, say
from tests.http.serving import Server

pytestmark = pytest.mark.anyio

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER_CALL = '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
UNSUPPORTED = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"properties": {"a": {"uniqueItems": True}}},
        "strict": True,
    },
}
USER = {"role": "user", "content": "hi"}
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
AWARE = "{{ tools | tojson }}{% for m in messages %}{{ m.tool_calls }}{% endfor %}"


@pytest.fixture(autouse=True)
def large_context(engine):
    engine.info = msgspec.structs.replace(INFO, max_model_len=4096, max_total_tokens=4096)


@pytest.fixture
async def ask(open_client, tokenizer):
    """Posts a conversation with tools to a server with a given chat template."""

    async def post(messages=(USER,), template=AWARE, tools=(TOOL, CLOCK), **fields):
        client = await open_client(chat_template=ChatTemplate({"default": template}, tokenizer))
        body = {"messages": list(messages), "tools": list(tools), **fields}
        return await client.post("/v1/chat/completions", json=body)

    return post


def prompt(engine, tokenizer):
    return tokenizer.decode(engine.requests[-1].prompt_token_ids)


async def test_a_call_is_a_part_of_the_message(ask, answer):
    answer(CALL + OTHER_CALL)

    reply = (await ask()).json()

    (choice,) = reply["choices"]
    first, second = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert second["function"] == {"name": "now", "arguments": "{}"}
    assert first["type"] == "function"
    assert first["id"].startswith("call_")
    assert first["id"] != second["id"]
    msgspec.convert(reply, ChatReply)


async def test_text_before_a_call_is_content(ask, answer):
    answer("I look." + CALL)

    message = (await ask()).json()["choices"][0]["message"]

    assert message["content"] == "I look."
    assert len(message["tool_calls"]) == 1


async def test_a_message_without_calls_is_as_without_tools(ask, answer):
    answer("Hi")

    (choice,) = (await ask()).json()["choices"]

    assert choice["message"] == {"role": "assistant", "content": "Hi", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_a_call_that_is_cut_off_ends_with_length(ask, answer):
    answer(CALL[:52], FinishReason.LENGTH)

    (choice,) = (await ask()).json()["choices"]

    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city"'


async def test_the_cut_off_end_of_a_call_is_no_content(ask, answer):
    answer(CALL[:-6], FinishReason.LENGTH)

    message = (await ask()).json()["choices"][0]["message"]

    assert message["content"] is None
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln"}'


async def test_calls_are_streamed_in_pieces(ask, answer):
    answer("Hm." + CALL + OTHER_CALL)

    events = chunks(await ask(stream=True, stream_options={"include_usage": True}))

    for event in events:
        msgspec.convert(event, ChatChunk)
    usage = events.pop()
    assert usage["choices"] == []
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hm."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    begun = [call for call in calls if "id" in call]
    assert [call["function"]["name"] for call in begun] == ["weather", "now"]
    assert [call["index"] for call in begun] == [0, 1]
    for index, expected in enumerate(('{"city": "Köln"}', "{}")):
        pieces = [call["function"]["arguments"] for call in calls if call["index"] == index]
        assert "".join(pieces) == expected
    assert len(calls) > 10
    assert [event["choices"][0]["finish_reason"] for event in events][-2:] == [None, "tool_calls"]


async def test_several_choices_call_tools_independently(ask, answer):
    answer(CALL)

    events = chunks(await ask(stream=True, n=2))

    for index in range(2):
        choices = [c for e in events for c in e["choices"] if c["index"] == index]
        calls = [call for c in choices for call in c["delta"].get("tool_calls", ())]
        assert "".join(c["function"]["arguments"] for c in calls) == '{"city": "Köln"}'
        assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "contained", "absent"),
    [
        ({}, ["TEXT", "weather", "now", ")*"], []),
        ({"parallel_tool_calls": False}, ["TEXT", "weather", "now"], [")*"]),
        ({"tool_choice": "required"}, ["weather", "now"], ["TEXT"]),
        (
            {"tool_choice": {"type": "function", "function": {"name": "now"}}},
            ["now"],
            ["TEXT", "weather", ")*"],
        ),
        ({"tool_choice": "now"}, ["now"], ["TEXT", "weather", ")*"]),
        ({"tool_choice": {"function": {"name": "now"}}}, ["now"], ["TEXT", "weather", ")*"]),
        ({"tools": [{"function": CLOCK["function"]}]}, ["TEXT", "now"], ["weather"]),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "weather"}}],
                    },
                }
            },
            ["weather"],
            ["TEXT", "now"],
        ),
    ],
)
async def test_the_grammar_allows_what_tool_choice_allows(ask, engine, fields, contained, absent):
    response = await ask(**fields)

    assert response.status_code == 200, response.text
    grammar = engine.requests[-1].sampling.grammar
    assert [text for text in contained if text not in grammar] == []
    assert [text for text in absent if text in grammar] == []


async def test_without_a_choice_of_tools_the_model_answers_freely(ask, engine, tokenizer):
    response = await ask(tool_choice="none", response_format={"type": "text"})

    assert response.status_code == 200
    assert engine.requests[-1].sampling.grammar is None
    assert prompt(engine, tokenizer) == "null"


async def test_the_template_gets_tools_and_arguments_as_objects(ask, engine, tokenizer):
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": 1}'},
    }
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]

    await ask(messages)

    text = prompt(engine, tokenizer)
    assert json.dumps([TOOL, CLOCK]) in text
    assert "'arguments': {'city': 1}" in text


async def test_a_template_without_tools_gets_them_as_text(ask, engine, tokenizer):
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "K"}'},
    }
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]

    response = await ask(messages, template=PLAIN)

    assert response.status_code == 200, response.text
    text = prompt(engine, tokenizer)
    assert text.startswith("system:Be brief.\n\nYou can call these functions:\n" + json.dumps(TOOL))
    assert text.endswith(
        'user:hi\nassistant:<tool_call>\n{"name": "weather", "arguments": {"city": "K"}}\n</tool_call>\n'
        "user:<tool_response>\nrain\n</tool_response>\n"
    )


async def test_special_tokens_are_kept_only_for_calls(ask, engine, tokenizer):
    engine.script = say([*tokenizer.encode("<|im_end|>" + CALL), EOS_ID], FinishReason.EOS)

    reply = (await ask()).json()

    assert reply["choices"][0]["message"]["content"] == "<|im_end|>"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [TOOL, TOOL]}, "`tools` has several functions with the name `weather`"),
        ({"tools": [{"type": "custom"}]}, "`tools.0.type` must be `function`. Given: `custom`"),
        ({"tools": [{"type": "function"}]}, "`tools.0.function` must be an object"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "`tools.0.function.name` must have"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "`tools.0.function.parameters` of the tool `f` must be a JSON schema",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "`tools`: the tool `f` cannot be used: `parameters`: the `type` must be `object`",
        ),
        (
            {"tools": [TOOL, UNSUPPORTED]},
            "the tool `f` cannot be used: `parameters`: the JSON schema keyword `uniqueItems` is not supported",
        ),
        ({"tools": [TOOL] * 129}, "`tools` supports up to 128 entries. Given: 129"),
        ({"tool_choice": "rain"}, "`tool_choice` must be none, auto, required or an object. Given: `rain`"),
        ({"tool_choice": {"type": "x"}}, "`tool_choice.type` must be function or allowed_tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "`tool_choice.function.name` must be the name of a tool: `weather`, `now`. Given: `x`",
        ),
        ({"tool_choice": {"type": "allowed_tools"}}, "`tool_choice.allowed_tools.tools` must be a list"),
    ],
)  # fmt: skip
async def test_what_cannot_be_used_is_refused_by_name(ask, fields, message):
    response = await ask(**fields)

    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


async def test_the_openai_client_reads_streamed_calls(make_app, tokenizer, answer):
    answer(CALL + OTHER_CALL)
    app = make_app(ChatTemplate({"default": AWARE}, tokenizer))
    async with Server(app, "httptools") as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        async with (
            client,
            client.chat.completions.stream(
                model="fake/model", messages=[USER], tools=[TOOL, CLOCK]
            ) as stream,
        ):
            done = [
                event.arguments
                async for event in stream
                if event.type == "tool_calls.function.arguments.done"
            ]
            final = await stream.get_final_completion()

    assert done == ['{"city": "Köln"}', "{}"]
    assert final.choices[0].finish_reason == "tool_calls"
    names = [call.function.name for call in final.choices[0].message.tool_calls]
    assert names == ["weather", "now"]
