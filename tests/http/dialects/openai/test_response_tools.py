"""Tools of /v1/responses: items of replies and streams, calls and results in the input, and what is refused."""

import itertools
import json

import msgspec
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.text.chat_template import ChatTemplate
from server.engine.core.request import FinishReason
from server.http.dialects.openai.replies import ResponseEvent, ResponseReply
from tests.http.dialects.openai.responses_api.test_answer import events
from tests.http.dialects.openai.test_tools import AWARE, CALL, OTHER_CALL, PARAMETERS, PLAIN
from tests.http.fakes import EOS_ID, INFO, event, put, say
from tests.http.serving import Server

pytestmark = pytest.mark.anyio

TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
CLOCK = {"type": "function", "name": "now", "description": "The time."}
USER = {"role": "user", "content": "hi"}
CALLED = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "K"}'}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "rain"}
TEXT_FORMAT = {"format": {"type": "json_object"}}


@pytest.fixture(autouse=True)
def large_context(engine):
    engine.info = msgspec.structs.replace(INFO, max_model_len=4096, max_total_tokens=4096)


@pytest.fixture
async def ask(open_client, tokenizer):
    """Posts an input with tools to a server with a given chat template."""

    async def post(value="hi", /, template=AWARE, tools=(TOOL, CLOCK), path="responses", **fields):
        client = await open_client(chat_template=ChatTemplate({"default": template}, tokenizer))
        body = {"input": value, "tools": list(tools), **fields}
        if path != "responses":
            del body["input"]
        return await client.post(f"/v1/{path}", json=body)

    return post


def prompt(engine, tokenizer):
    return tokenizer.decode(engine.requests[-1].prompt_token_ids)


def without_ids(items):
    """Return items without their ids, which must differ."""
    ids = [item["id"] for item in items] + [i["call_id"] for i in items if "call_id" in i]
    assert len(set(ids)) == len(ids)
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]


def replayed(found):
    """Return the items that the events of a stream describe, after checking their order."""
    items = []
    for one in found:
        kind, index = one["type"].removeprefix("response."), one.get("output_index")
        if kind == "output_item.added":
            assert index == len(items)
            assert one["item"]["status"] == "in_progress"
            assert all(item["status"] != "in_progress" for item in items)
            items.append(json.loads(json.dumps(one["item"])))
        if index is None:
            continue
        assert index == len(items) - 1
        item = items[index]
        assert one.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            item["content"].append(one["part"])
        elif kind == "output_text.delta":
            part = item["content"][one["content_index"]]
            part["text"] += one["delta"]
            part["logprobs"] += one["logprobs"]
        elif kind == "function_call_arguments.delta":
            assert one["delta"]
            item["arguments"] += one["delta"]
        elif kind == "output_text.done":
            assert one["text"] == item["content"][0]["text"]
            assert one["logprobs"] == item["content"][0]["logprobs"]
        elif kind == "content_part.done":
            assert one["part"] == item["content"][0]
        elif kind == "function_call_arguments.done":
            assert one["arguments"] == item["arguments"]
        elif kind == "output_item.done":
            item["status"] = one["item"]["status"]
            assert one["item"] == item
    assert found[-1]["response"]["output"] == items
    return items


async def test_calls_are_items_of_the_output(ask, answer):
    answer(CALL + OTHER_CALL)

    reply = (await ask()).json()

    first, second = reply["output"]
    assert first["id"].startswith("fc_")
    assert first["call_id"].startswith("call_")
    assert without_ids([first, second]) == [
        {
            "type": "function_call",
            "name": "weather",
            "arguments": '{"city": "Köln"}',
            "status": "completed",
        },
        {"type": "function_call", "name": "now", "arguments": "{}", "status": "completed"},
    ]
    assert reply["status"] == "completed"
    assert (reply["tools"], reply["tool_choice"]) == ([TOOL, CLOCK], "auto")
    assert reply["parallel_tool_calls"] is True
    msgspec.convert(reply, ResponseReply)


async def test_text_before_a_call_is_a_message(ask, answer):
    answer("I look." + CALL)

    message, call = (await ask()).json()["output"]

    assert (message["type"], message["status"]) == ("message", "completed")
    assert message["content"][0]["text"] == "I look."
    assert call["type"] == "function_call"


@pytest.mark.parametrize("text", ["Hi", ""])
async def test_a_response_without_calls_is_as_without_tools(ask, answer, text):
    answer(text)

    plain, tools = [(await ask(tools=given)).json() for given in ((), (TOOL,))]

    assert without_ids(tools["output"]) == without_ids(plain["output"])
    assert tools["output"][0]["content"][0]["text"] == text


async def test_a_call_that_is_cut_off_is_incomplete(ask, answer):
    answer(CALL[:52], FinishReason.LENGTH)

    reply = (await ask()).json()
    (item,) = replayed(events(await ask(stream=True)))

    assert (reply["status"], reply["output"][0]["status"]) == ("incomplete", "incomplete")
    assert item["arguments"] == reply["output"][0]["arguments"] == '{"city"'


async def test_a_call_with_all_its_arguments_is_complete_at_the_limit(ask, answer):
    answer(CALL[:-6], FinishReason.LENGTH)

    reply = (await ask()).json()

    assert reply["status"] == "incomplete"
    assert [item["status"] for item in reply["output"]] == ["completed"]


async def test_a_stream_has_the_events_of_each_item(ask, answer):
    answer("Hm." + CALL + OTHER_CALL)

    found = events(await ask(stream=True))

    kinds = [one["type"].removeprefix("response.") for one in found]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert [kind for kind, _ in itertools.groupby(kinds)] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *call,
        *call,
        "completed",
    ]
    assert kinds.count("function_call_arguments.delta") > 10
    items = without_ids(replayed(found))
    assert items == without_ids((await ask()).json()["output"])
    for one in found:
        msgspec.convert(one, ResponseEvent)


def in_pieces(tokens, sizes):
    """Make a script that delivers the tokens in groups of these sizes, the last one with the rest."""

    async def script(_engine, _request, stream):
        last = len(tokens) - 1
        waiting = [
            event(t, FinishReason.LENGTH if i == last else None) for i, t in enumerate(tokens)
        ]
        for size in [*sizes, len(waiting)]:
            put(stream, *waiting[:size])
            del waiting[:size]

    return script


@pytest.fixture
async def client_of_tools(open_client, tokenizer):
    return await open_client(chat_template=ChatTemplate({"default": AWARE}, tokenizer))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pieces=st.lists(
        st.sampled_from([CALL, OTHER_CALL, "Hm. ", "é", "<tool", CALL[:30], CALL[:-6], "}", "\n", "<|im_end|>"]),
        min_size=1,
        max_size=4,
    )
)  # fmt: skip
async def test_a_stream_has_the_items_of_the_reply(client_of_tools, engine, tokenizer, pieces):
    engine.script = in_pieces(tokenizer.encode("".join(pieces)), [1, 2, 3])

    body = {"input": "hi", "tools": [TOOL, CLOCK]}
    reply = (await client_of_tools.post("/v1/responses", json=body)).json()
    stream = await client_of_tools.post("/v1/responses", json=body | {"stream": True})
    streamed = replayed(events(stream))

    assert without_ids(streamed) == without_ids(reply["output"])


async def test_logprobs_are_those_of_the_text(ask, engine, tokenizer):
    tokens = [*tokenizer.encode("Hé" + CALL), EOS_ID]
    engine.script = say(tokens, FinishReason.EOS, top=((1, -1.0),))
    include = ["message.output_text.logprobs"]

    message, _call = (await ask(include=include)).json()["output"]
    streamed = replayed(events(await ask(include=include, stream=True)))

    logprobs = message["content"][0]["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in logprobs).decode() == "Hé"
    assert streamed[0]["content"][0]["logprobs"] == logprobs


async def test_logprobs_without_calls_have_all_tokens(ask, engine, tokenizer):
    engine.script = say([*tokenizer.encode("Hi"), EOS_ID], FinishReason.EOS, top=((1, -1.0),))
    include = ["message.output_text.logprobs"]

    (message,) = (await ask(include=include)).json()["output"]
    streamed = replayed(events(await ask(include=include, stream=True)))

    assert [entry["token"] for entry in message["content"][0]["logprobs"]] == ["H", "i", "</s>"]
    assert streamed[0]["content"] == message["content"]


@pytest.mark.parametrize(
    ("fields", "contained", "absent"),
    [
        ({}, ["TEXT", "weather", "now", ")*"], []),
        ({"parallel_tool_calls": False}, ["TEXT", "weather", "now"], [")*"]),
        ({"tool_choice": "required"}, ["weather", "now"], ["TEXT"]),
        (
            {"tool_choice": {"type": "function", "name": "now"}},
            ["now"],
            ["TEXT", "weather", ")*"],
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "weather"}],
                }
            },
            ["weather"],
            ["TEXT", "now"],
        ),
    ],
)
async def test_the_grammar_allows_what_tool_choice_allows(ask, engine, fields, contained, absent):
    reply = (await ask(**fields)).json()

    grammar = engine.requests[-1].sampling.grammar
    assert [text for text in contained if text not in grammar] == []
    assert [text for text in absent if text in grammar] == []
    assert {name: reply[name] for name in fields} == fields


async def test_without_a_choice_of_tools_the_format_of_the_text_stands(ask, engine, tokenizer):
    response = await ask(tool_choice="none", text=TEXT_FORMAT)

    assert response.status_code == 200, response.text
    assert "tool_call" not in engine.requests[-1].sampling.grammar
    assert prompt(engine, tokenizer).startswith("null")


async def test_the_prompt_is_that_of_the_same_chat(ask, engine, tokenizer):
    message = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hm."}],
    }
    other = {"type": "function_call", "call_id": "2", "name": "now", "arguments": ""}
    parts = [{"type": "input_text", "text": "12:00"}]
    items = [
        {"id": "msg_1", "status": "completed", **message}, {"id": "fc_1", "status": "completed", **CALLED}, other,
        RESULT, RESULT | {"call_id": "2", "output": parts}, USER,
    ]  # fmt: skip
    functions = [
        {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
        {"type": "function", "function": {"name": "now", "description": "The time."}},
    ]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "K"}'}},
        {"id": "2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]  # fmt: skip
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "tool", "tool_call_id": "2", "content": "12:00"},
        USER,
    ]
    everything = "{{ tools }}{% for m in messages %}{{ m.items() | list | sort }}{% endfor %}"

    for template in (everything, PLAIN):
        response = await ask(items, template, instructions="Be brief.")
        assert response.status_code == 200, response.text
        of_items = prompt(engine, tokenizer)
        response = await ask(None, template, functions, "chat/completions", messages=messages)
        assert response.status_code == 200, response.text
        assert of_items == prompt(engine, tokenizer)
        assert "rain" in of_items


async def test_calls_of_different_turns_are_different_messages(ask, engine, tokenizer):
    second = CALLED | {"call_id": "2"}
    items = [USER, CALLED, RESULT, second, RESULT | {"call_id": "2"}]

    response = await ask(
        items, "{{ tools[0].type }}:{% for m in messages %} {{ m.role }}{% endfor %}"
    )

    assert response.status_code == 200, response.text
    assert prompt(engine, tokenizer) == "function: user assistant tool assistant tool"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "search"}]}, "tools.0.type", "must be `function`. Given: `search`"),
        ({"tools": [{"type": "mcp"}, {"type": "mpc"}]}, "tools.1.type", "must be `function`. Given: `mpc`"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "without `tools`"),
        ({"tools": [{"type": "custom", "name": "a b"}]}, "tools.0.name", "must have 1 to 64 letters"),
        (
            {"tools": [TOOL, {"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]},
            "tools.1.tools.0.name",
            "must have 1 to 64 letters",
        ),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "must have 1 to 64 letters"),
        ({"tools": [TOOL, TOOL]}, "tools", "has several functions with the name `weather`"),
        ({"tools": [TOOL | {"parameters": []}]}, "tools.0.parameters", "must be a JSON schema"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "name": "f",
                        "parameters": {"properties": {"a": {"uniqueItems": True}}},
                        "strict": True,
                    }
                ]
            },
            "tools",
            "the tool `f` cannot be used: `parameters`: the JSON schema keyword `uniqueItems` is not supported",
        ),
        ({"tool_choice": "weather"}, "tool_choice", "must be none, auto, required or an object"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "Given: `file_search`"),
        (
            {"tool_choice": {"type": "function", "name": "x"}},
            "tool_choice.name",
            "must be the name of a tool: `weather`, `now`. Given: `x`",
        ),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools", "must be a list"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}},
            "tool_choice.tools.0.name",
            "must be a string. Given: null",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "must be none or auto without `tools`"),
        ({"input": [{"type": "reasoning"}]}, "input.0.type", "Given: `reasoning`"),
        ({"input": [{"type": "thought"}]}, "input.0.type", "another type of the OpenAI API. Given: `thought`"),
        ({"input": [{"type": "shell_call", "call_id": "1"}]}, "input.0.action", "must be an object. Given: null"),
        ({"input": [CALLED | {"name": None}]}, "input.0.name", "must be a string. Given: null"),
        ({"input": [USER, RESULT]}, "input.1.call_id", "before it in `input`: nothing is stored"),
        ({"input": [CALLED, RESULT | {"output": None}]}, "input.1.output", "must be a string or a list of parts"),
        (
            {"input": [CALLED, RESULT | {"output": [{"type": "input_image"}]}]},
            "input.1.output.0.type",
            "the model reads text only. Given: `input_image`",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_used_is_refused_by_name(ask, engine, fields, param, message):
    value = fields.pop("input", "hi")
    response = await ask(value, **fields)

    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert engine.requests == []


async def test_the_openai_client_reads_streamed_calls(make_app, tokenizer, answer):
    answer("Hm." + CALL + OTHER_CALL)
    app = make_app(ChatTemplate({"default": AWARE}, tokenizer))
    async with Server(app, "httptools") as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        wanted = {"model": "fake/model", "input": "hi", "tools": [TOOL, CLOCK]}
        async with client:
            async with client.responses.stream(**wanted) as stream:
                done = [
                    one.arguments
                    async for one in stream
                    if one.type == "response.function_call_arguments.done"
                ]
                final = await stream.get_final_response()
            reply = await client.responses.create(**wanted)

    assert done == ['{"city": "Köln"}', "{}"]
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    assert final.output_text == reply.output_text == "Hm."
    assert final.output[1].parsed_arguments == {"city": "Köln"}
    assert [item.name for item in reply.output[1:]] == ["weather", "now"]
    assert reply.tools[0].name == "weather"


CUSTOM = {"type": "custom", "name": "patch", "description": "Applies a patch."}
SPACE = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [{"type": "function", "name": "find", "parameters": PARAMETERS}, CUSTOM],
}
PATCH = '*** Begin "Päch"\n\\ \u0001😀\n'


def call_of(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize(
    "tool",
    [
        {"type": kind}
        for kind in (
            "apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation",
            "local_shell", "mcp", "shell", "tool_search", "web_search", "web_search_preview",
        )
    ],
)  # fmt: skip
async def test_tools_that_run_elsewhere_are_skipped_with_a_warning(ask, answer, engine, tool):
    answer("Hi")

    alone = (await ask(tools=[tool])).json()
    beside = (await ask(tools=[tool, CLOCK])).json()

    expected = [f"`tools.0`: tools of the type `{tool['type']}` are not available"]
    assert alone["warnings"] == beside["warnings"] == expected
    assert alone["tools"] == [tool]
    assert engine.requests[0].sampling.grammar is None
    assert "now" in engine.requests[1].sampling.grammar


async def test_a_custom_tool_is_called_with_a_text(ask, answer):
    answer("Hm." + call_of("patch", {"input": PATCH}))

    reply = (await ask(tools=[CUSTOM])).json()
    found = events(await ask(tools=[CUSTOM], stream=True))

    message, call = reply["output"]
    assert message["type"] == "message"
    assert call["id"].startswith("ctc_")
    assert call["call_id"].startswith("call_")
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", PATCH)
    assert "custom tool is a function" in reply["warnings"][0]
    kinds = [one["type"].removeprefix("response.") for one in found]
    assert [kind for kind, _ in itertools.groupby(kinds)][-5:] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    deltas = [one["delta"] for one in found if one["type"].endswith("tool_call_input.delta")]
    assert "".join(deltas) == PATCH
    assert all(deltas)
    assert len(deltas) > 10
    assert next(one for one in found if one["type"].endswith("input.done"))["input"] == PATCH
    assert without_ids([found[-1]["response"]["output"][1]]) == without_ids([call])
    msgspec.convert(reply, ResponseReply)


@pytest.mark.parametrize("length", range(0, 100, 7))
async def test_the_text_of_a_custom_tool_may_be_cut_off(ask, answer, length):
    text = call_of("patch", {"input": PATCH * 3})
    answer(text[: 52 + length], FinishReason.LENGTH)

    (call,) = (await ask(tools=[CUSTOM], tool_choice="required")).json()["output"]

    assert (PATCH * 3).startswith(call["input"])
    assert call["status"] == "incomplete"


async def test_functions_of_a_namespace_have_its_name(ask, answer, engine):
    answer(call_of("crm.find", {"city": "K"}) + "\n" + call_of("crm.patch", {"input": "x"}))

    reply = (await ask(tools=[SPACE, CLOCK])).json()

    first, second = reply["output"]
    assert (first["type"], first["namespace"], first["name"]) == ("function_call", "crm", "find")
    assert (second["type"], second["namespace"], second["name"]) == (
        "custom_tool_call", "crm", "patch",
    )  # fmt: skip
    assert all(name in engine.requests[0].sampling.grammar for name in ("crm.find", "now"))
    assert reply["tools"] == [SPACE, CLOCK]
    assert "namespace" in reply["warnings"][0]


@pytest.mark.parametrize(
    ("choice", "contained", "absent"),
    [
        ({"type": "custom", "name": "patch"}, ["patch"], ["now"]),
        ({"type": "function", "name": "find"}, ["crm.find"], ["now"]),
        (
            {"type": "allowed_tools", "mode": "required",
             "tools": [{"type": "custom", "name": "patch"}, {"type": "web_search"}]},
            ["patch"],
            ["now", "find"],
        ),
    ],
)  # fmt: skip
async def test_a_choice_names_tools_as_the_request_does(ask, engine, choice, contained, absent):
    response = await ask(tools=[SPACE, CUSTOM, CLOCK, {"type": "web_search"}], tool_choice=choice)

    assert response.status_code == 200, response.text
    grammar = engine.requests[-1].sampling.grammar
    assert [text for text in contained if text not in grammar] == []
    assert [text for text in absent if f'"{text}' in grammar or f".{text}" in grammar] == []
    assert response.json()["tool_choice"] == choice


async def test_the_pattern_of_a_custom_tool_is_enforced(ask, engine):
    format_ = {"type": "grammar", "syntax": "regex", "definition": "[ab]+q"}

    reply = (await ask(tools=[CUSTOM | {"format": format_}])).json()

    assert "[a-b]+q" in engine.requests[0].sampling.grammar
    assert len(reply["warnings"]) == 1


async def test_another_grammar_of_a_custom_tool_is_a_warning(ask):
    format_ = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}

    reply = (await ask(tools=[CUSTOM | {"format": format_}])).json()

    assert "`tools.0.format`: the grammar of the text is not enforced" in reply["warnings"]


@pytest.mark.parametrize(
    ("item", "result", "name", "arguments"),
    [
        (
            {"type": "custom_tool_call", "name": "patch", "input": "x"},
            {"type": "custom_tool_call_output", "output": "ok"},
            "patch",
            {"input": "x"},
        ),
        (
            {"type": "function_call", "namespace": "crm", "name": "find", "arguments": "{}"},
            {"type": "function_call_output", "output": "ok"},
            "crm.find",
            {},
        ),
        (
            {"type": "local_shell_call", "id": "l", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "output": "ok", "id": "1"},
            "local_shell",
            {"type": "exec", "command": ["ls"]},
        ),
        (
            {"type": "shell_call", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "output": [{"stdout": "ok", "stderr": ""}]},
            "shell",
            {"commands": ["ls"]},
        ),
        (
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "ok"}, "status": "completed"},
            {"type": "apply_patch_call_output", "status": "ok"},
            "apply_patch",
            {"type": "delete_file", "path": "ok"},
        ),
    ],
)  # fmt: skip
async def test_other_calls_and_results_become_messages(
    ask, engine, tokenizer, item, result, name, arguments
):
    items = [USER, item | {"call_id": "1"}, {"call_id": "1"} | result, USER]
    if "id" in result:
        del items[2]["call_id"]
    template = "{% for m in messages %}{{ m.items() | list | sort }}{% endfor %}{{ tools }}"

    response = await ask(items, template)

    assert response.status_code == 200, response.text
    text = prompt(engine, tokenizer)
    assert str({"name": name, "arguments": arguments}) in text
    assert "'role', 'tool'" in text
    assert "ok" in text.partition("'tool'")[0]
    assert "warnings" not in response.json()


async def test_a_call_of_an_mcp_server_has_its_result(ask, engine, tokenizer):
    call = {
        "type": "mcp_call",
        "id": "m",
        "name": "f",
        "arguments": "{}",
        "server_label": "s",
        "output": "rain",
    }

    await ask(
        [USER, call],
        "{{ tools[0].type }}{% for m in messages %} {{ m.role }}:{{ m.content or m.tool_calls[0].function }}"
        "{% endfor %}",
    )

    written = "{'name': 'f', 'arguments': {}}"
    assert prompt(engine, tokenizer) == f"function user:hi assistant:{written} tool:rain"


@pytest.mark.parametrize(
    "item",
    [
        {"type": "item_reference", "id": "msg_1"},
        {"id": "msg_1"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "file_search_call", "id": "fs_1", "queries": []},
        {"type": "code_interpreter_call", "id": "ci_1", "code": "1"},
        {"type": "image_generation_call", "id": "ig_1", "result": None},
        {"type": "computer_call", "call_id": "1", "action": {}},
        {"type": "computer_call_output", "call_id": "1", "output": {}},
        {"type": "mcp_list_tools", "tools": []},
        {"type": "mcp_approval_request", "name": "f"},
        {"type": "mcp_approval_response", "approve": True},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "tool_search_call", "arguments": {}},
        {"type": "tool_search_output", "tools": []},
        {"type": "additional_tools", "role": "developer", "tools": []},
    ],
)
async def test_items_that_only_the_provider_reads_are_skipped_with_a_warning(ask, item, templates):
    reply = (await ask([USER, item, item, USER], tools=[])).json()

    kind = item.get("type", "item_reference")
    assert reply["warnings"] == [f"`input`: items of the type `{kind}` are skipped"]
    assert [message["role"] for message in templates[0][0]] == ["user", "user"]


async def test_the_result_of_a_call_that_is_a_reference_is_kept(ask, templates):
    response = await ask([USER, {"type": "item_reference", "id": "fc_1"}, RESULT])

    assert response.status_code == 200, response.text
    assert templates[0][0][-1] == {"role": "tool", "tool_call_id": "1", "content": "rain"}


async def test_a_dump_of_a_response_is_accepted_back(ask, answer):
    answer("Hm." + call_of("patch", {"input": "x"}))
    tools = [CUSTOM, SPACE]

    output = (await ask(tools=tools)).json()["output"]
    dumped = [{"caller": None, "namespace": None, "phase": None} | item for item in output]
    result = {"type": "custom_tool_call_output", "call_id": output[1]["call_id"], "output": "ok"}
    response = await ask([USER, *dumped, result], tools=tools)

    assert response.status_code == 200, response.text
