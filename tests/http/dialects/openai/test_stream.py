"""Streams of /v1/completions: the exact bytes, several choices, usage, errors."""

import asyncio
import re

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.engine.core.request import FinishReason
from server.http.dialects.openai.replies import CompletionReply
from tests.http.dialects.openai.events import chunks, failing
from tests.http.fakes import EOS_ID, event, put, say

pytestmark = pytest.mark.anyio


async def test_golden_transcript(complete, engine, tokenizer):
    engine.script = say([*tokenizer.encode('H"'), EOS_ID], FinishReason.EOS)

    response = await complete(stream=True)

    assert response.headers["content-type"] == "text/event-stream"
    head = rb'data: {"id":"cmpl-[0-9a-f]{32}","object":"text_completion","created":\d{10},"model":"fake/model",'
    head += rb'"system_fingerprint":"tessera-[^"]+",'
    middle = rb'"choices":\[{"index":0,"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":null}\]}\n\n'
    parts = ((rb'"H"', b"null"), (rb'"\\""', b"null"), (rb'""', b'"stop"'))
    expected = b"".join(head + middle % part for part in parts) + rb"data: \[DONE\]\n\n"
    assert re.fullmatch(expected, response.content)


async def test_usage_is_an_event_of_its_own_on_request(complete, engine, tokenizer):
    engine.script = say(tokenizer.encode("Hi"), FinishReason.LENGTH)

    *tokens, last = chunks(await complete(stream=True, stream_options={"include_usage": True}))

    assert [chunk["usage"] for chunk in tokens] == [None, None]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 7


async def test_usage_so_far_is_in_every_event_on_request(complete, engine, tokenizer):
    engine.script = say(tokenizer.encode("Hi"), FinishReason.LENGTH)
    options = {"continuous_usage_stats": True}

    events = chunks(await complete(stream=True, stream_options=options))

    assert [chunk["usage"]["completion_tokens"] for chunk in events] == [1, 2]


@pytest.mark.parametrize("continuous", [True, False, None])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_no_event_has_usage_that_is_switched_off(client, templates, path, continuous):
    options = {"include_usage": False, "continuous_usage_stats": continuous}
    body = (
        {"prompt": "a"}
        if path == "completions"
        else {"messages": [{"role": "user", "content": "a"}]}
    )

    response = await client.post(
        f"/v1/{path}", json=body | {"stream": True, "stream_options": options}
    )

    assert all("usage" not in chunk for chunk in chunks(response))


async def test_choices_of_a_stream_are_told_apart_by_their_index(complete, engine, tokenizer):
    async def script(engine, request, stream):
        text = f"{request.prompt_token_ids[0]}."
        await say(tokenizer.encode(text), FinishReason.LENGTH)(engine, request, stream)

    engine.script = script

    events = chunks(await complete([[5], [6]], n=2, stream=True))

    texts = ["", "", "", ""]
    for chunk in events:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["5.", "5.", "6.", "6."]
    assert sum(chunk["choices"][0]["finish_reason"] == "length" for chunk in events) == 4


async def test_logprobs_and_token_ids_of_a_stream(complete, engine, tokenizer):
    h, i = tokenizer.encode("Hi")
    engine.script = say([h, i], FinishReason.LENGTH, top=((h, -0.25),))

    events = chunks(await complete("ab", stream=True, echo=True, logprobs=1, return_token_ids=True))

    choices = [chunk["choices"][0] for chunk in events]
    assert [choice["text"] for choice in choices] == ["ab", "H", "i"]
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0, 1], [2], [3]]
    assert choices[0]["logprobs"]["token_logprobs"] == [None, -1.0]
    assert choices[0]["prompt_token_ids"] == tokenizer.encode("ab")
    assert [choice["token_ids"] for choice in choices] == [[], [h], [i]]
    for chunk in events:
        msgspec.convert(chunk, CompletionReply)


async def test_warnings_are_in_the_last_event(complete, engine, tokenizer):
    engine.script = say(tokenizer.encode("Hi"), FinishReason.LENGTH)

    for options in (None, {"include_usage": True}):
        *events, last = chunks(await complete(stream=True, stream_options=options, colour=1))

        assert last["warnings"] == ["`colour` is unknown and has no effect"]
        assert all("warnings" not in chunk for chunk in events)


async def test_an_error_during_a_stream_is_an_event_before_the_end(complete, engine):
    engine.script = failing(1)

    response = await complete(stream=True)

    assert response.status_code == 200
    assert chunks(response)[-1] == {
        "error": {
            "message": "Request failed during generation: engine restarted",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
    }


async def test_an_invalid_stream_is_refused_with_a_plain_response(complete):
    response = await complete(stream=True, temperature=-1)

    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ids=st.lists(st.integers(0, 259), min_size=1, max_size=30),
    stop=st.lists(st.text("ab\u00e9 ", min_size=1, max_size=2), max_size=2),
    special=st.booleans(),
)
def test_a_stream_joins_to_the_text_of_the_plain_reply(make_app, engine, ids, stop, special):
    import httpx

    async def script(_engine, _request, stream):
        last = len(ids) - 1
        put(
            stream,
            *(event(t, FinishReason.LENGTH if i == last else None) for i, t in enumerate(ids)),
        )

    async def ask():
        transport = httpx.ASGITransport(make_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            engine.script = script
            body = {"prompt": "a", "stop": stop, "skip_special_tokens": special}
            plain = await client.post("/v1/completions", json=body)
            return plain.json(), [
                chunks(await client.post("/v1/completions", json={**body, "stream": True}))
                for _ in range(2)  # the second is sent from the cache
            ]

    plain, streams = asyncio.run(ask())
    for events in streams:
        assert "".join(e["choices"][0]["text"] for e in events) == plain["choices"][0]["text"]
