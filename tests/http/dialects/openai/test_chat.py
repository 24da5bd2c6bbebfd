"""POST /v1/chat/completions: messages, replies, streams, and what is refused."""

import msgspec
import pytest

from server.engine.core.request import FinishReason
from server.http.dialects.openai import options, tools
from server.http.dialects.openai.replies import ChatChunk, ChatReply
from server.http.text.grammar_compiler import Constraint
from server.http.text.structured_output import CompiledConstraint
from tests.http.dialects.openai.events import chunks, failing
from tests.http.fakes import EOS_ID, say

pytestmark = pytest.mark.anyio


async def test_a_reply_has_the_message_and_the_usage(chat, engine, tokenizer):
    engine.script = say([*tokenizer.encode("Hi"), EOS_ID], FinishReason.EOS)

    reply = (await chat("yo")).json()

    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert reply["usage"]["total_tokens"] == len("<user>yo") + 3
    msgspec.convert(reply, ChatReply)


async def test_without_a_limit_the_reply_fills_the_context(chat, engine):
    await chat("yo")
    await chat("yo", max_tokens=5)
    await chat("yo", max_tokens=5, max_completion_tokens=6)

    limits = [request.sampling.max_new_tokens for request in engine.requests]
    assert limits == [128 - len("<user>yo"), 5, 6]


async def test_text_parts_of_a_message_are_joined(chat, templates):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [{"id": "1", "type": "function"}]
    await chat(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": parts, "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "assistant", "content": None},
        ]
    )

    (messages, _) = templates[0]
    assert messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "content": ""},
    ]


async def test_options_of_the_template_are_passed_on(chat, templates):
    await chat()
    await chat(continue_final_message=True, chat_template_kwargs={"x": 1})
    await chat(add_generation_prompt=False)

    options = [options for _, options in templates]
    assert options[0]["add_generation_prompt"] is True
    assert options[1] == {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "variables": {"x": 1},
        "most": 127,
    }
    assert options[2]["add_generation_prompt"] is False


async def test_logprobs_have_the_bytes_of_tokens(chat, engine, tokenizer):
    first, second = tokenizer.encode("é")
    engine.script = say([first, second], FinishReason.LENGTH, top=((first, -0.25), (EOS_ID, -2.0)))

    choice = (await chat(logprobs=True, top_logprobs=2)).json()["choices"][0]

    content = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
    assert content[0]["logprob"] == -0.5
    assert content[0]["top_logprobs"] == [
        {"token": "bytes:\\xc3", "logprob": -0.25, "bytes": [0xC3]},
        {"token": "</s>", "logprob": -2.0, "bytes": list(b"</s>")},
    ]


async def test_a_stream_begins_with_the_role(chat, engine, tokenizer):
    engine.script = say(tokenizer.encode("Hi"), FinishReason.LENGTH)

    events = chunks(await chat(stream=True, stream_options={"include_usage": True}))

    assert [chunk["object"] for chunk in events] == ["chat.completion.chunk"] * 4
    assert [choice["delta"] for chunk in events for choice in chunk["choices"]] == [
        {"role": "assistant", "content": ""},
        {"content": "H"},
        {"content": "i"},
    ]
    assert events[2]["choices"][0]["finish_reason"] == "length"
    assert (events[0]["usage"], events[3]["usage"]["completion_tokens"]) == (None, 2)
    for chunk in events:
        msgspec.convert(chunk, ChatChunk)


async def test_choices_of_a_stream_each_begin_with_the_role(chat, engine, tokenizer):
    engine.script = say(tokenizer.encode("Hi"), FinishReason.LENGTH)

    events = chunks(await chat(n=2, stream=True, logprobs=True, top_logprobs=1))

    roles = [c["choices"][0]["index"] for c in events if "role" in c["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1]
    tokens = [c["choices"][0]["logprobs"]["content"] for c in events if c["choices"][0]["logprobs"]]
    assert [[entry["token"] for entry in content] for content in tokens].count(["H"]) == 2


async def test_token_ids_are_reported_on_request(chat, engine, tokenizer):
    engine.script = say([7, 8], FinishReason.LENGTH)

    reply = (await chat("a", return_token_ids=True)).json()
    first, *events = chunks(await chat("a", return_token_ids=True, stream=True))

    assert reply["prompt_token_ids"] == first["prompt_token_ids"] == tokenizer.encode("<user>a")
    assert reply["choices"][0]["token_ids"] == [7, 8]
    assert [event["choices"][0]["token_ids"] for event in events] == [[7], [8]]


async def test_an_error_during_a_stream_is_an_event(chat, engine):
    engine.script = failing(1)

    assert chunks(await chat(stream=True))[-1]["error"]["code"] == 500


async def test_a_model_without_a_template_refuses_conversations(client):
    body = {"messages": [{"role": "user", "content": "a"}]}

    response = await client.post("/v1/chat/completions", json=body)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


def user(content):
    return [{"role": "user", "content": content}]


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("messages", "fields", "param", "message"),
    [
        ([], {}, "messages", "cannot be empty"),
        ([{"content": "a"}], {}, "messages.0.role", "is required"),
        ([{"role": "x", "content": "a"}], {}, "messages.0.role", "one of system"),
        ([{"role": 1, "content": "a"}], {}, "messages.0.role", "Given: 1"),
        ([{"role": "user"}], {}, "messages.0.content", "is required"),
        (user(1), {}, "messages.0.content", "a string or a list of parts"),
        (user([IMAGE]), {}, "messages.0.content.0.type", "text only. Given: `image_url`"),
        (user([{"type": "text"}]), {}, "messages.0.content.0.text", "must be a string"),
        (user([7]), {}, "messages.0.content.0", "must be an object"),
        (user("x" * 200), {}, "messages", "at most 127 tokens"),
        ("a", {"max_tokens": 500}, "messages", "`max_tokens` must be <= 128"),
        ("a", {"max_completion_tokens": 0}, "max_completion_tokens", "must be >= 1"),
        ("a", {"top_logprobs": 1}, "top_logprobs", "requires `logprobs`"),
        ("a", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
        ("a", {"tools": [{"type": "function"}]}, "tools.0.function", "must be an object"),
        ("a", {"tool_choice": "required"}, "tool_choice", "without `tools`"),
        ("a", {"functions": []}, "functions", "cannot be empty"),
        ("a", {"function_call": {"name": "f"}}, "tool_choice", "without `tools`"),
        ("a", {"audio": {}}, "audio", "is not supported"),
        ("a", {"modalities": ["audio"]}, "modalities.0", "must be 'text'"),
        ("a", {"chat_template": "x"}, "chat_template", "is not supported"),
        ("a", {"n": 129}, "n", "must be <= 128"),
        (
            "a",
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "exclude each other",
        ),
    ],
)
async def test_bad_values_are_refused_by_name(chat, engine, messages, fields, param, message):
    response = await chat(messages, **fields)

    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert message in error["message"]
    assert engine.requests == []


async def test_tools_that_ask_for_nothing_are_accepted(chat):
    assert (await chat(tools=[], tool_choice="none")).status_code == 200


PREFILL = {"role": "assistant", "content": "An apple"}
LAST = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("messages", "fields", "begin"),
    [
        ([*user("a"), PREFILL], LAST, "An apple"),
        ([*user("a"), PREFILL], {"continue_final_message": True}, "An apple"),
        ([*user("a"), PREFILL], {}, "An apple"),
        ([*user("a"), PREFILL | {"content": [{"type": "text", "text": "An"}]}], LAST, "An"),
        ([*user("a"), PREFILL], LAST | {"echo": False}, ""),
        (user("a"), {}, ""),
        ([PREFILL, *user("a")], {}, ""),
        ([*user("a"), PREFILL], LAST | {"n": 2}, "An apple"),
        (
            [*user("a"), PREFILL],
            LAST | {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "An apple",
        ),
    ],
)
async def test_the_last_message_is_echoed_if_it_is_the_assistants(
    chat, engine, tokenizer, monkeypatch, messages, fields, begin
):
    async def compile_grammar(_context, _wanted):
        return CompiledConstraint("grammar", Constraint("lark", ""))

    monkeypatch.setattr(options, "compile_grammar", compile_grammar)
    monkeypatch.setattr(tools, "compile_grammar", compile_grammar)
    engine.script = say([*tokenizer.encode(" a day"), EOS_ID], FinishReason.EOS)

    fields = {"echo": True} | fields
    reply = (await chat(messages, **fields)).json()
    events = chunks(await chat(messages, stream=True, **fields))

    assert [c["message"]["content"] for c in reply["choices"]] == [f"{begin} a day"] * fields.get(
        "n", 1
    )
    for index in range(fields.get("n", 1)):
        choices = [c for chunk in events for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["delta"].get("content") or "" for c in choices) == f"{begin} a day"
    assert reply["usage"]["completion_tokens"] == 7 * fields.get("n", 1)


async def test_replies_and_events_have_a_stable_fingerprint(chat, complete, tokenizer):
    replies = [
        (await chat()).json(),
        (await chat("yo", temperature=0)).json(),
        (await complete()).json(),
    ]
    events = chunks(await chat(stream=True, stream_options={"include_usage": True}))
    events += chunks(await complete(stream=True, stream_options={"include_usage": True}))

    fingerprints = {record["system_fingerprint"] for record in [*replies, *events]}

    assert len(fingerprints) == 1
    assert fingerprints.pop().startswith("tessera-")


PARTS = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]


@pytest.mark.parametrize("content", ["hello", PARTS])
async def test_a_predicted_answer_is_passed_on_and_counted(chat, engine, tokenizer, content):
    engine.script = say(tokenizer.encode("four"), FinishReason.LENGTH)

    prediction = {"type": "content", "content": content}
    reply = (await chat(prediction=prediction, deterministic=True)).json()

    (request,) = engine.requests
    assert request.prediction == tokenizer.encode("hello")
    assert "warnings" not in reply
    assert reply["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 1,
    }


@pytest.mark.parametrize("prediction", [None, {"type": "content", "content": ""}])
async def test_without_a_prediction_none_is_counted(chat, engine, prediction):
    reply = (await chat(prediction=prediction)).json()

    assert engine.requests[0].prediction == []
    assert "completion_tokens_details" not in reply["usage"]


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "content", "content": "a" * 70_000}, "prediction.content"),
        ("a", "prediction"),
    ],
)
async def test_a_wrong_prediction_is_refused(chat, engine, prediction, said):
    reply = await chat(prediction=prediction)

    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]
    assert not engine.requests
