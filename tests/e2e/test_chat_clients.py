"""Chat, responses and tokens of the bundled model, through the `openai` and `huggingface_hub` clients unchanged."""

import asyncio
import json

import httpx
import openai
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient

pytestmark = pytest.mark.e2e

MESSAGES = [{"role": "user", "content": "Return the sum of two numbers."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(bundled_service):
    return openai.OpenAI(base_url=f"{bundled_service.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def hub_client(bundled_service):
    return InferenceClient(base_url=bundled_service.url)


def test_a_chat_streams_the_text_of_the_plain_reply(client):
    fields = {"model": "bundled", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    plain = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
    *chunks, last = client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )

    (choice,) = plain.choices
    assert choice.message.role == chunks[0].choices[0].delta.role == "assistant"
    assert choice.message.content
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == choice.message.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    assert last.usage.total_tokens == plain.usage.total_tokens
    assert len(choice.logprobs.content) == plain.usage.completion_tokens
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_the_stream_helper_accumulates_the_reply(client):
    with client.chat.completions.stream(
        model="bundled", messages=MESSAGES, max_tokens=64, temperature=0, stop="\n"
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()

    assert "".join(deltas) == final.choices[0].message.content


def test_a_chat_with_a_schema_returns_json_of_it(client):
    schema = {"name": "person", "schema": SCHEMA, "strict": True}
    reply = client.chat.completions.create(
        model="bundled", messages=MESSAGES, max_tokens=80, temperature=0,
        response_format={"type": "json_schema", "json_schema": schema},
    )  # fmt: skip

    assert json.loads(reply.choices[0].message.content).keys() == {"name", "age"}


def test_responses_stream_the_text_of_the_plain_reply(client):
    fields = {"model": "bundled", "input": "Sort a list.", "max_output_tokens": 16}
    plain = client.responses.create(**fields, temperature=0)
    events = list(client.responses.create(**fields, temperature=0, stream=True))
    with client.responses.stream(
        model="bundled", input="Sort a list.", temperature=0, extra_body={"stop": ["\n"]}
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        helped = stream.get_final_response()

    streamed = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert streamed == plain.output_text
    assert streamed
    assert "".join(deltas) == helped.output_text == streamed.split("\n")[0]
    assert events[-1].response.usage.output_tokens == plain.usage.output_tokens


def test_the_async_client_streams_chats_at_the_same_time(bundled_service):
    async def one(client):
        stream = await client.chat.completions.create(
            model="bundled", messages=MESSAGES, max_tokens=10, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run():
        url = f"{bundled_service.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            return await asyncio.gather(*(one(client) for _ in range(4)))

    texts = asyncio.run(run())
    assert texts[0]
    assert len(set(texts)) == 1


def test_tokens_of_a_chat_are_those_that_it_computes(bundled_service, client):
    counted = httpx.post(f"{bundled_service.url}/tokenize", json={"messages": MESSAGES}).json()
    prompt = httpx.post(
        f"{bundled_service.url}/detokenize", json={"tokens": counted["tokens"]}
    ).json()
    reply = client.chat.completions.create(model="bundled", messages=MESSAGES, max_tokens=1)

    assert counted["count"] == len(counted["tokens"]) == reply.usage.prompt_tokens
    assert MESSAGES[0]["content"] in prompt["prompt"]


def test_chat_completion_of_huggingface_hub_streams_the_plain_reply(hub_client):
    fields = {"max_tokens": 16, "temperature": 0.0, "seed": 3}
    plain = hub_client.chat_completion(MESSAGES, **fields)
    chunks = list(hub_client.chat_completion(MESSAGES, stream=True, **fields))

    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == plain.choices[0].message.content
    assert streamed
    assert plain.usage.completion_tokens <= 16


def test_the_async_client_of_huggingface_hub_streams_a_chat(bundled_service):
    async def run():
        async with AsyncInferenceClient(base_url=bundled_service.url) as client:
            stream = await client.chat_completion(MESSAGES, max_tokens=8, stream=True)
            return [chunk async for chunk in stream]

    assert asyncio.run(run())[-1].choices[0].finish_reason in ("stop", "length")


def test_chat_completion_of_huggingface_hub_follows_a_schema(hub_client):
    reply = hub_client.chat_completion(
        MESSAGES, max_tokens=80, temperature=0.0,
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
    )  # fmt: skip

    assert json.loads(reply.choices[0].message.content).keys() == {"name", "age"}
