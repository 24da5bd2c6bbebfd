"""POST /invocations serves the bodies of TGI and of the OpenAI API, and answers as the one that the body is for."""

import json

import pytest

from server.engine.core.request import FinishReason
from server.engine.link.protocol import EngineState
from server.http.context import AppContext
from tests.http.conftest import frames
from tests.http.fakes import say

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def answer(engine, tokenizer):
    engine.script = say(tokenizer.encode("Hi"), FinishReason.LENGTH)


@pytest.fixture(autouse=True)
def conversations(monkeypatch):
    async def encode_chat(self, messages, **options):
        return await self.encode(messages[-1]["content"], "messages")

    monkeypatch.setattr(AppContext, "encode_chat", encode_chat)


async def test_a_prompt_of_tgi_gets_the_reply_of_its_compatible_route(client):
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 5}}

    response = await client.post("/invocations", json=body)

    assert response.json() == (await client.post("/", json=body)).json()
    assert response.json() == [{"generated_text": "helloHi"}]
    assert response.headers["x-prompt-tokens"] == "5"


async def test_a_prompt_of_tgi_may_be_streamed(client):
    response = await client.post("/invocations", json={"inputs": "hello", "stream": True})

    assert frames(response)[-1]["generated_text"] == "helloHi"


async def test_a_completion_gets_the_reply_of_the_openai_api(client):
    response = await client.post("/invocations", json={"prompt": "hello", "max_tokens": 5})

    reply = response.json()
    assert reply["object"] == "text_completion"
    assert reply["choices"][0]["text"] == "Hi"


async def test_a_conversation_gets_the_reply_of_the_openai_api(client):
    body = {"messages": [{"role": "user", "content": "hello"}]}

    response = await client.post("/invocations", json=body)
    stream = await client.post("/invocations", json=body | {"stream": True})

    assert response.json()["choices"][0]["message"]["content"] == "Hi"
    chunks = stream.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    deltas = [json.loads(chunk.removeprefix("data: "))["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hi"


async def test_a_response_gets_the_reply_of_the_openai_api(client):
    response = await client.post("/invocations", json={"input": "hello"})

    assert response.json()["object"] == "response"
    assert response.json()["output"][0]["content"][0]["text"] == "Hi"


async def test_errors_have_the_format_of_the_body_s_api(client):
    tgi = await client.post("/invocations", json={"inputs": "x", "parameters": {"top_k": 0}})
    openai = await client.post("/invocations", json={"prompt": "x", "top_k": -2})
    missing = await client.post("/invocations", json={"prompt": "x", "model": "other"})

    assert (tgi.status_code, tgi.json()["error_type"]) == (422, "validation")
    assert (openai.status_code, openai.json()["error"]["param"]) == (400, "top_k")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")


async def test_a_field_that_is_null_does_not_choose_the_api(client):
    body = {"inputs": None, "messages": None, "prompt": "hello"}

    reply = (await client.post("/invocations", json=body)).json()

    assert reply["object"] == "text_completion"


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        ("{}", 422, "the body must have one of the fields `inputs`, `messages`, `prompt`, `input`"),
        ("[]", 422, "the body must be a JSON object"),
        ("{", 400, "the request body is not valid JSON"),
    ],
)
async def test_a_body_of_no_api_is_an_error_in_the_format_of_tgi(client, content, status, message):
    response = await client.post("/invocations", content=content)

    assert response.status_code == status
    assert message in response.json()["error"]


async def test_an_engine_that_is_not_ready_is_unavailable(client, engine):
    engine.state = EngineState.STARTING

    response = await client.post("/invocations", json={"prompt": "x"})

    assert response.status_code == 503
    assert response.json()["error_type"] == "unavailable"
    assert response.headers["retry-after"]


async def test_requests_are_counted_under_their_own_endpoint(client):
    await client.post("/invocations", json={"prompt": "x"})

    metrics = (await client.get("/metrics")).text
    assert 'tessera_requests_total{endpoint="invocations",outcome="length"} 1.0' in metrics
