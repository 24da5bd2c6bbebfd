"""A stop string that the last allowed token completes cuts the text in every dialect, streaming and not.

The finish reason is that of the dialect: TGI checks its limit before its stop strings and reports `length`; vLLM checks
stop strings after the engine's limit and reports `stop`.
"""

import json

import pytest

from server.engine.core.request import FinishReason
from server.http.context import AppContext
from tests.http.conftest import frames
from tests.http.fakes import say

pytestmark = pytest.mark.anyio

STOP = "D.mo"
CUT, KEPT = "x EN", "x END.mo"


@pytest.fixture(autouse=True)
def tokens(engine, tokenizer):
    """The last token that the limit allows completes the stop string, and has more text after it."""
    tokens = [*tokenizer.encode("x "), *tokenizer.encode("END.more")]
    engine.script = say(tokens, FinishReason.LENGTH)
    return tokens


@pytest.fixture(autouse=True)
def conversations(monkeypatch):
    async def encode_chat(self, messages, **options):
        return await self.encode(messages[-1]["content"], "messages")

    monkeypatch.setattr(AppContext, "encode_chat", encode_chat)


@pytest.mark.parametrize("path", ["/generate", "/", "/invocations"])
async def test_tgi_keeps_the_stop_string_and_reports_the_limit(client, tokens, path):
    parameters = {"stop": [STOP], "max_new_tokens": len(tokens), "details": True}
    parameters["return_full_text"] = False

    response = await client.post(path, json={"inputs": "hi", "parameters": parameters})

    reply = response.json()
    reply = reply[0] if isinstance(reply, list) else reply
    assert reply["generated_text"] == KEPT
    assert reply["details"]["finish_reason"] == "length"
    assert reply["details"]["generated_tokens"] == len(tokens)


@pytest.mark.parametrize("path", ["/generate_stream", "/", "/invocations"])
async def test_a_stream_of_tgi_keeps_the_stop_string_and_reports_the_limit(client, tokens, path):
    parameters = {"stop": [STOP], "max_new_tokens": len(tokens), "details": True}
    parameters["return_full_text"] = False
    body = {"inputs": "hi", "parameters": parameters, "stream": True}

    events = frames(await client.post(path, json=body))

    assert "".join(event["token"]["text"] for event in events) == KEPT
    assert events[-1]["generated_text"] == KEPT
    assert events[-1]["details"]["finish_reason"] == "length"


OPENAI = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 9},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 9,
    },
}


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("by_invocations", [False, True])
@pytest.mark.parametrize("path", OPENAI)
async def test_the_openai_api_cuts_the_stop_string_and_reports_it(
    client, path, by_invocations, included
):
    body = OPENAI[path] | {"stop": STOP, "include_stop_str_in_output": included}

    reply = (await client.post("/invocations" if by_invocations else path, json=body)).json()

    (choice,) = reply["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert text == (KEPT if included else CUT)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", STOP)


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("path", OPENAI)
async def test_a_stream_of_the_openai_api_cuts_the_stop_string_and_reports_it(
    client, path, included
):
    body = OPENAI[path] | {"stop": STOP, "include_stop_str_in_output": included, "stream": True}

    response = await client.post(path, json=body)

    events = response.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    parts = [c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices]
    assert "".join(parts) == (KEPT if included else CUT)
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == STOP


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_response_with_a_stop_string_at_the_limit_is_complete(client, streaming):
    body = {"input": "hi", "stop": STOP, "max_output_tokens": 16, "stream": streaming}

    response = await client.post("/v1/responses", json=body)

    reply = response.json() if not streaming else None
    if reply is None:
        last = response.text.split("\n\n")[-2].split("\n")[1]
        reply = json.loads(last.removeprefix("data: "))["response"]
    assert reply["output"][0]["content"][0]["text"] == CUT
    assert (reply["status"], reply["incomplete_details"]) == ("completed", None)
