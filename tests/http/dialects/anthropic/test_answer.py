"""Messages: the reply, and what is submitted."""

import json

import msgspec
import pytest

from server.engine.core.request import FinishReason
from server.http.dialects.anthropic.replies import MessageReply
from tests.http.dialects.anthropic.conftest import USER
from tests.http.dialects.anthropic.events import events, replayed
from tests.http.fakes import EOS_ID, event, put, say

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
ASSISTANT = {"role": "assistant", "content": "The sum is "}


async def test_a_message_has_its_text_and_usage(ask, answer, engine):
    answer("Hi")

    response = await ask()

    reply = response.json()
    msgspec.convert(reply, MessageReply)
    assert reply.pop("id").startswith("msg_")
    assert reply["usage"].pop("tessera")["steps"] == 3
    assert reply == {
        "type": "message",
        "role": "assistant",
        "model": "fake/model",
        "content": [{"type": "text", "text": "Hi"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(engine.requests[0].prompt_token_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
        },
    }
    assert response.headers["request-id"] == response.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_from_the_prefix_cache_are_counted_apart(ask, engine, stream):
    async def script(_engine, _request, stream):
        stream.num_cached_tokens = 4
        put(stream, event(72), event(EOS_ID, FinishReason.EOS))

    engine.script = script

    response = await ask(stream=stream)

    total = len(engine.requests[0].prompt_token_ids)
    first = events(response)[0]["message"] if stream else response.json()
    assert first["usage"]["cache_read_input_tokens"] == 4
    assert first["usage"]["input_tokens"] == total - 4


@pytest.mark.parametrize(
    ("text", "end", "fields", "reason"),
    [
        ("Hi", FinishReason.EOS, {}, "end_turn"),
        ("Hi", FinishReason.LENGTH, {"max_tokens": 2}, "max_tokens"),
        ("Hi", FinishReason.LENGTH, {"max_tokens": 9000}, "model_context_window_exceeded"),
        ("Hi", FinishReason.STOP, {"stop_token_ids": [5]}, "end_turn"),
        ("Hi", FinishReason.TIMEOUT, {}, "max_tokens"),
        ("", FinishReason.EOS, {}, "end_turn"),
    ],
)
async def test_the_stop_reason_says_why_the_message_ended(ask, answer, text, end, fields, reason):
    answer(text, end)

    reply = (await ask(**fields)).json()
    streamed = replayed(events(await ask(**fields, stream=True)))

    assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, None)
    assert all(block["text"] for block in reply["content"])  # no empty text
    for one in (reply, streamed):
        del one["id"]
    assert streamed == reply


async def test_a_stop_sequence_ends_the_message_and_is_named(ask, answer):
    answer("One END two")

    reply = (await ask(stop_sequences=["END", "two"])).json()
    streamed = replayed(events(await ask(stop_sequences=["END"], stream=True)))

    assert reply["content"] == streamed["content"] == [{"type": "text", "text": "One "}]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "END")
    assert (streamed["stop_reason"], streamed["stop_sequence"]) == ("stop_sequence", "END")


async def test_the_options_reach_the_engine(ask, engine):
    await ask(max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, seed=5)

    sampling = engine.requests[0].sampling
    assert (sampling.max_new_tokens, sampling.temperature) == (7, 0.5)
    assert (sampling.top_p, sampling.top_k, sampling.seed) == (0.9, 3, 5)


async def test_at_most_what_fits_is_generated(ask, engine):
    await ask(max_tokens=1_000_000)

    (request,) = engine.requests
    assert request.sampling.max_new_tokens == 4096 - len(request.prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_fill_the_prefix_cache_only(ask, answer, stream):
    answer("x", FinishReason.LENGTH)

    response = await ask(max_tokens=0, stream=stream)

    reply = replayed(events(response)) if stream else response.json()
    assert (reply["content"], reply["stop_reason"]) == ([], "max_tokens")
    assert reply["usage"]["output_tokens"] == 0


async def test_a_last_message_of_the_assistant_is_continued(ask, prompt):
    await ask([USER, ASSISTANT])

    assert prompt() == "user:hi\nassistant:The sum is "


@pytest.mark.parametrize("content", ["", [], [{"type": "thinking", "thinking": "Hm."}]])
async def test_an_empty_last_message_of_the_assistant_is_no_message(ask, prompt, content):
    await ask([USER, {"role": "assistant", "content": content}])

    assert prompt() == "user:hi\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": FORMAT}},
        {"output_format": FORMAT},
        {"structured_outputs": {"regex": "a+"}},
    ],
)
async def test_a_schema_constrains_the_text(ask, engine, fields):
    await ask(**fields)

    assert engine.requests[0].sampling.grammar is not None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"output_config": {"format": FORMAT}, "messages": [USER, ASSISTANT]},
            "`output_config.format.schema` and a last message of the assistant exclude each other",
        ),
        (
            {"output_config": {"format": FORMAT}, "output_format": FORMAT | {"schema": {}}},
            "`output_config.format.schema` and `output_format.schema` exclude each other",
        ),
        ({"output_format": {"type": "json_schema"}}, "`output_format.schema` is required"),
        ({"max_tokens": None}, "`max_tokens` must be an integer. Given: null"),
        ({"max_tokens": -1}, "`max_tokens` must be >= 0. Given: -1"),
        ({"temperature": 1.5}, "`temperature` must be <= 1. Given: 1.5"),
        (
            {"stop_sequences": ["a"] * 9},
            "`stop_sequences` supports up to 4 stop sequences. Given: 9",
        ),
        ({"stop_sequences": [""]}, "`stop_sequences.0` cannot be empty"),
        (
            {"thinking": {"type": "maybe"}},
            "`thinking.type` must be 'enabled', 'disabled', 'adaptive' or 'between_tools'. Given: a string",
        ),
    ],
)
async def test_bad_fields_are_refused_by_name(ask, engine, fields, message):
    response = await ask(**{"messages": [USER], **fields})

    assert response.status_code == 400
    assert response.json()["error"] == {"type": "invalid_request_error", "message": message}
    assert engine.requests == []


async def test_equal_formats_under_both_names_are_one(ask):
    response = await ask(output_config={"format": FORMAT}, output_format=FORMAT)

    assert response.status_code == 200


@pytest.mark.parametrize(
    ("fields", "warnings"),
    [
        ({"metadata": {"user_id": "u"}}, ["`metadata` has no effect"]),
        ({"service_tier": "auto", "mcp_servers": [], "cache_control": {"type": "ephemeral"}}, []),
        ({"service_tier": "priority"}, ["`service_tier` has no effect"]),
        (
            {"container": "c", "mcp_servers": [{}]},
            ["`container` has no effect", "`mcp_servers` has no effect"],
        ),
        ({"thinking": {"type": "disabled"}}, []),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, ["`thinking` has no effect"]),
        ({"output_config": {"effort": "high"}}, ["`output_config.effort` has no effect"]),
        ({"other": 1}, ["`other` is unknown and has no effect"]),
        ({"model": "claude-opus-4-8"}, ["`model` has no effect: the model is `fake/model`"]),
    ],
)
async def test_what_has_no_effect_is_in_the_warnings(ask, fields, warnings):
    response = await ask(**fields)
    streamed = await ask(**fields, stream=True)

    assert response.json().get("warnings", []) == warnings
    assert events(streamed)[-2].get("warnings", []) == warnings
    for one in (response, streamed):
        assert json.loads(one.headers.get("x-tessera-warnings", "[]")) == warnings


async def test_every_model_of_claude_is_the_served_one(ask):
    reply = (await ask(model="claude-opus-4-8")).json()

    assert reply["model"] == "fake/model"


async def test_another_model_is_not_found(ask):
    response = await ask(model="gpt-5")

    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, {"type": "adaptive"}])
async def test_a_template_that_can_keep_the_model_from_reasoning_does(ask, prompt, thinking):
    await ask(template="{{ enable_thinking }}", thinking=thinking)

    assert prompt() == "False"


async def test_a_stream_is_the_message_in_events(ask, answer):
    answer("Höre!")

    found = events(await ask(stream=True))
    reply = (await ask()).json()

    kinds = [one["type"] for one in found]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds.count("content_block_delta") == 5
    message = replayed(found)
    assert message.pop("id") != reply.pop("id")
    assert message == reply


async def test_an_error_during_a_stream_is_its_last_event(ask, engine):
    async def script(_engine, _request, stream):
        put(stream, event(72), event(None, FinishReason.ERROR, error="engine restarted"))

    engine.script = script

    response = await ask(stream=True)

    last = events(response)[-1]
    assert last == {
        "type": "error",
        "error": {
            "type": "api_error",
            "message": "Request failed during generation: engine restarted",
        },
        "request_id": response.headers["request-id"],
    }


async def test_the_texts_of_tokens_are_the_same_in_every_stream(ask, engine, tokenizer):
    ids = [*tokenizer.encode("aaß€ aaß€"), EOS_ID]
    engine.script = say(ids, FinishReason.EOS)

    first, second = [replayed(events(await ask(stream=True))) for _ in range(2)]

    assert first["content"] == second["content"] == [{"type": "text", "text": "aaß€ aaß€"}]
