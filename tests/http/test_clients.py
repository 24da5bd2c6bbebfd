"""A client for Text Generation Inference works with this service unchanged."""

import asyncio
import logging

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import OverloadedError, ValidationError

from server.engine.core.request import FinishReason
from server.http.transport import HTTP11Protocol
from tests.http.fakes import EOS_ID, event, put, say, silent
from tests.http.serving import Server
from tests.waiting import reached

pytestmark = pytest.mark.anyio


@pytest.fixture
async def ask(make_app):
    """Calls the client's `text_generation` in a thread, because it blocks."""
    async with Server(make_app(max_concurrent_requests=1), HTTP11Protocol) as server:
        client = InferenceClient(f"http://127.0.0.1:{server.port}")

        def call(**parameters):
            reply = client.text_generation("say: ", **parameters)
            return list(reply) if parameters.get("stream") else reply

        async def ask(**parameters):
            return await asyncio.to_thread(call, **parameters)

        yield ask


async def test_a_client_gets_the_generated_text(ask, engine, tokenizer):
    engine.script = say(tokenizer.encode("Hi"), FinishReason.LENGTH)

    assert await ask(return_full_text=False) == "Hi"


async def test_a_client_gets_the_details(ask, engine, tokenizer):
    engine.script = say([*tokenizer.encode("Hi"), EOS_ID], FinishReason.EOS, top=((1, -2.0),))

    reply = await ask(
        details=True, decoder_input_details=True, do_sample=True, top_n_tokens=1, seed=5,
        return_full_text=False,
    )  # fmt: skip

    assert reply.generated_text == "Hi"
    assert reply.details.finish_reason == "eos_token"
    assert reply.details.seed == 5
    assert [t.text for t in reply.details.tokens] == ["H", "i", "</s>"]
    assert [t.text for t in reply.details.prefill] == list("say: ")
    assert reply.details.top_tokens[0][0]["logprob"] == -2.0


async def test_a_client_gets_a_stream(ask, engine, tokenizer):
    engine.script = say(tokenizer.encode("Hi"), FinishReason.LENGTH)

    events = await ask(stream=True, details=True, return_full_text=False)

    assert [e.token.text for e in events] == ["H", "i"]
    assert events[-1].generated_text == "Hi"
    assert events[-1].details.input_length == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_become_the_clients_exceptions(ask, stream):
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)

    with pytest.raises(ValidationError, match="`top_k` must be >= 1"):
        await ask(top_k=0, stream=stream)


async def test_too_many_requests_become_the_clients_overload_exception(ask, engine):
    engine.script = silent
    first = asyncio.ensure_future(ask())
    await reached(lambda: engine.running)

    with pytest.raises(OverloadedError, match="Model is overloaded"):
        await ask()

    put(engine.streams[0], event(1, FinishReason.LENGTH))
    await first
