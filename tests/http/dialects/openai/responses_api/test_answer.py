"""POST /v1/responses: replies, typed events, and what is refused."""

import json

import msgspec
import pytest

from server.engine.core.request import FinishReason
from server.http.dialects.openai import options
from server.http.dialects.openai.replies import ResponseEvent, ResponseReply
from server.http.text.grammar_compiler import Constraint
from server.http.text.structured_output import CompiledConstraint
from tests.http.dialects.openai.events import failing
from tests.http.fakes import EOS_ID, say

pytestmark = pytest.mark.anyio


@pytest.fixture
def respond(client, templates):
    async def post(value="hi", /, **fields):
        return await client.post("/v1/responses", json={"input": value, **fields})

    return post


def events(response):
    found = []
    for event in response.text.split("\n\n")[:-1]:
        kind, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
        msgspec.convert(found[-1], ResponseEvent)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_a_reply_has_the_message_and_the_usage(respond, engine, tokenizer):
    engine.script = say([*tokenizer.encode("Hi"), EOS_ID], FinishReason.EOS)

    reply = (await respond("yo", temperature=0, metadata={"a": "b"}, colour=1)).json()

    assert reply["id"].startswith("resp_")
    assert (reply["object"], reply["status"]) == ("response", "completed")
    (message,) = reply["output"]
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["content"] == [
        {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}
    ]
    assert reply["usage"]["input_tokens"] == len("<user>yo")
    assert reply["usage"]["output_tokens"] == 3
    assert (reply["temperature"], reply["metadata"]) == (0, {"a": "b"})
    assert reply["warnings"] == ["`colour` is unknown and has no effect"]
    msgspec.convert(reply, ResponseReply)


async def test_a_reply_at_the_limit_is_incomplete(respond, engine):
    reply = (await respond(max_output_tokens=2)).json()

    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert engine.requests[0].sampling.max_new_tokens == 2


async def test_instructions_and_messages_are_the_conversation(respond, templates):
    parts = [{"type": "input_text", "text": "a"}]
    messages = [{"type": "message", "role": "user", "content": parts, "id": "1"}]

    await respond(messages, instructions="be brief")

    assert templates[0][0] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
    ]


async def test_a_stream_is_typed_events(respond, engine, tokenizer):
    engine.script = say([*tokenizer.encode("aba"), EOS_ID], FinishReason.EOS)

    found = events(await respond(stream=True, colour=1))

    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 4,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(e["delta"] for e in found if "delta" in e) == "aba" == found[8]["text"]
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == "aba"
    assert found[-1]["response"]["warnings"] == ["`colour` is unknown and has no effect"]


async def test_logprobs_are_reported_on_request(respond, engine, tokenizer):
    engine.script = say(tokenizer.encode("ab"), FinishReason.LENGTH, top=((1, -1.0),))
    include = ["message.output_text.logprobs"]

    plain = (await respond(include=include, top_logprobs=1)).json()
    found = events(await respond(include=include, top_logprobs=1, stream=True))

    logprobs = plain["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["a", "b"]
    assert len(logprobs[0]["top_logprobs"]) == 1
    assert [e["logprobs"][0]["token"] for e in found if "delta" in e] == ["a", "b"]
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == logprobs


async def test_an_error_during_a_stream_is_the_last_event(respond, engine):
    engine.script = failing(1)

    last = events(await respond(stream=True))[-1]

    assert (last["type"], last["code"]) == ("error", "InternalServerError")


async def test_the_format_of_the_text_is_a_constraint(respond, engine, monkeypatch):
    async def compile_grammar(_context, wanted):
        constraint = Constraint(wanted.kind, wanted.value)
        return CompiledConstraint(f"{wanted.kind} in {wanted.field}", constraint)

    monkeypatch.setattr(options, "compile_grammar", compile_grammar)
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}

    reply = (await respond(text={"format": schema})).json()
    await respond(text={"format": {"type": "json_object"}})
    await respond(text={"format": {"type": "text"}})

    assert reply.get("text") == {"format": schema}
    assert [request.sampling.grammar for request in engine.requests] == [
        "json_schema in text.format.schema",
        "json_object in text.format",
        None,
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [1]}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"instructions": [1]}, "instructions"),
        ({"include": [1]}, "include.0"),
        ({"previous_response_id": "a"}, "previous_response_id"),
        ({"conversation": "a"}, "conversation"),
        ({"background": True}, "background"),
        ({"background": 0}, "background"),
        ({"truncation": "some"}, "truncation"),
        ({"tools": [{}]}, "tools.0.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 500}, "input"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ],
)  # fmt: skip
async def test_what_a_stateless_text_model_lacks_is_refused_by_name(
    client, templates, engine, fields, param
):
    response = await client.post("/v1/responses", json={"input": "a"} | fields)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert engine.requests == []


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"include": ["reasoning.encrypted_content"]}, "values of `include` other than"),
        ({"include": ["file_search_call.results", "code_interpreter_call.outputs"]}, "`include`"),
        ({"include": ["message.output_text.logprobs", "web_search_call.results"]}, "`include`"),
        ({"store": True}, "`store` has no effect"),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, "`reasoning` has no effect"),
        ({"text": {"verbosity": "low"}}, "`text.verbosity` has no effect"),
        ({"max_tool_calls": 3}, "`max_tool_calls` has no effect"),
        ({"service_tier": "priority"}, "`service_tier` has no effect"),
        ({"prompt_cache_key": "a"}, "`prompt_cache_key` has no effect"),
        ({"safety_identifier": "a"}, "`safety_identifier` has no effect"),
        ({"user": "a"}, "`user` has no effect"),
        ({"client_metadata": {"a": "b"}}, "`client_metadata` has no effect"),
        ({"stream_options": {"include_obfuscation": True}}, "`stream_options` has no effect"),
    ],
)
async def test_hints_are_warnings(respond, fields, warning):
    response = await respond(**fields)

    assert response.status_code == 200, response.text
    (found,) = response.json()["warnings"]
    assert warning in found


@pytest.mark.parametrize(
    "fields",
    [
        {"include": []},
        {"store": False},
        {"truncation": "auto"},
        {"truncation": "disabled"},
        {"reasoning": {"effort": None, "summary": None}},
        {"reasoning": None},
        {"stream_options": {"include_obfuscation": False}},
        {"service_tier": "auto", "metadata": {"a": "b"}, "parallel_tool_calls": True},
        {"instructions": None, "text": {"verbosity": None}},
    ],
)
async def test_values_that_ask_for_nothing_are_accepted(respond, fields):
    response = await respond(**fields)

    assert response.status_code == 200, response.text
    assert "warnings" not in response.json()


async def test_only_one_value_of_include_reports_logprobs(respond, engine):
    reply = (await respond(include=["reasoning.encrypted_content"])).json()

    assert reply["output"][0]["content"][0]["logprobs"] == []
    assert not engine.requests[0].sampling.logprobs


async def test_instructions_may_be_items(respond, templates):
    parts = [{"type": "input_text", "text": "be brief"}]

    reply = (await respond("a", instructions=[{"role": "developer", "content": parts}])).json()

    assert [m["content"] for m in templates[0][0]] == ["be brief", "a"]
    assert reply["instructions"] == [{"role": "developer", "content": parts}]


def turns(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ((20, 20, 20), 3),
        ((60, 20, 20), 1),
        ((60, 20, 40, 5, 30), 3),
        ((60, 90, 60, 5, 90), 1),
        ((9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9), 5),
    ],
)
async def test_a_long_conversation_loses_its_first_turns(respond, engine, tokenizer, sizes, kept):
    messages = turns(*[chr(97 + i) * size for i, size in enumerate(sizes)])

    response = await respond(messages, truncation="auto", instructions="s", max_output_tokens=8)

    reply = response.json()
    assert response.status_code == 200, response.text
    text = tokenizer.decode(engine.requests[0].prompt_token_ids)
    expected = "".join(f"<{m['role']}>{m['content']}" for m in messages[-kept:])
    assert text == "<system>s" + expected
    assert reply["truncation"] == "auto"
    assert len(messages) == kept or f"first {len(messages) - kept} messages" in reply["warnings"][0]


async def test_a_last_turn_that_does_not_fit_is_refused(respond):
    response = await respond(turns("a" * 20, "b" * 20, "c" * 200), truncation="auto")

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "resp_1"), ("DELETE", "resp_1"), ("POST", "resp_1/cancel"),
        ("GET", "resp_1/input_items"), ("POST", "input_tokens"), ("POST", "compact"),
    ],
)  # fmt: skip
async def test_no_response_is_stored(client, method, path):
    response = await client.request(method, f"/v1/responses/{path}")

    assert response.status_code == 404
    error = response.json()["error"]
    assert error["type"] == "NotFoundError"
    assert "nothing is stored" in error["message"]
