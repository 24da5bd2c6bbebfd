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
        ({"store": True}, "store"),
        ({"previous_response_id": "a"}, "previous_response_id"),
        ({"conversation": "a"}, "conversation"),
        ({"background": True}, "background"),
        ({"background": 0}, "background"),
        ({"truncation": "auto"}, "truncation"),
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
