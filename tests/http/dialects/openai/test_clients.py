"""The `openai` client reads the replies and streams of chat and responses."""

import openai
import pytest

from server.engine.core.request import FinishReason
from tests.http.dialects.openai.events import failing
from tests.http.fakes import EOS_ID, say
from tests.http.serving import Server

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def openai_client(make_app, templates):
    async with Server(make_app(), "httptools") as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client


async def test_chat(openai_client, engine, tokenizer):
    engine.script = say([*tokenizer.encode("Hi"), EOS_ID], FinishReason.EOS, top=((1, -1.0),))

    reply = await openai_client.chat.completions.create(
        model="fake/model", messages=MESSAGES, logprobs=True, top_logprobs=1
    )

    assert reply.choices[0].message.content == "Hi"
    assert [entry.token for entry in reply.choices[0].logprobs.content] == ["H", "i", "</s>"]


async def test_a_stream_of_chat(openai_client, engine, tokenizer):
    engine.script = say([*tokenizer.encode("Hi"), EOS_ID], FinishReason.EOS)

    stream = await openai_client.chat.completions.create(
        model="fake/model", messages=MESSAGES, stream=True
    )
    chunks = [chunk async for chunk in stream]

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "Hi"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_responses(openai_client, engine, tokenizer):
    engine.script = say([*tokenizer.encode("Hi"), EOS_ID], FinishReason.EOS)

    reply = await openai_client.responses.create(model="fake/model", input="hi")

    assert reply.output_text == "Hi"
    assert reply.usage.output_tokens == 3


async def test_a_stream_of_responses(openai_client, engine, tokenizer):
    engine.script = say([*tokenizer.encode("Hi"), EOS_ID], FinishReason.EOS)

    async with openai_client.responses.stream(model="fake/model", input="hi") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()

    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Hi"


async def test_an_error_during_a_stream_becomes_an_exception(openai_client, engine):
    engine.script = failing(1)

    stream = await openai_client.chat.completions.create(
        model="fake/model", messages=MESSAGES, stream=True
    )
    with pytest.raises(openai.APIError, match="engine restarted"):
        async for _ in stream:
            pass


async def test_an_invalid_conversation_becomes_an_exception(openai_client):
    with pytest.raises(openai.BadRequestError) as error:
        await openai_client.chat.completions.create(model="fake/model", messages=[])

    assert error.value.param == "messages"
