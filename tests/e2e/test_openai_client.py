"""The `openai` client works with `tessera serve` and the bundled model unchanged."""

import asyncio

import openai
import pytest

pytestmark = pytest.mark.e2e

PROMPT = "def fibonacci(n):"


@pytest.fixture(scope="module")
def client(bundled_service):
    return openai.OpenAI(base_url=f"{bundled_service.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(client):
    return client.models.list().data[0].id


def test_models_are_listed_and_found(client, model):
    assert model == "bundled"
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_a_stream_is_the_plain_completion(client, model):
    fields = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(**fields)
    chunks = list(
        client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )

    assert plain.choices[0].text == "".join(c.choices[0].text for c in chunks[:-1])
    assert plain.choices[0].finish_reason == chunks[-2].choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == plain.usage.prompt_tokens


def test_the_same_seed_gives_the_same_completions(client, model):
    def texts(seed):
        reply = client.completions.create(
            model=model, prompt=[PROMPT, "import "], max_tokens=12, n=2, seed=seed
        )
        return [choice.text for choice in reply.choices]

    assert texts(-7) == texts(-7)
    assert len(set(texts(-7))) == 4


def test_a_stop_string_is_cut_off(client, model):
    reply = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=64, temperature=0, stop=["\n\n", "return"]
    )

    choice = reply.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason in ("\n\n", "return")
    assert not choice.text.endswith(choice.stop_reason)


def test_an_echoed_prompt_is_scored_as_its_greedy_continuation(client, model):
    first = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=1, echo=True
    ).choices[0]
    scored = client.completions.create(
        model=model, prompt=first.text, max_tokens=0, logprobs=1, echo=True
    ).choices[0]

    logprobs = scored.logprobs
    assert scored.text == first.text
    assert logprobs.tokens == first.logprobs.tokens
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(first.logprobs.token_logprobs[1:], abs=1e-3)
    for token, likeliest in list(zip(logprobs.tokens, logprobs.top_logprobs, strict=True))[-8:]:
        assert max(likeliest, key=likeliest.get) == token


def test_the_async_client_streams_many_completions_at_once(bundled_service, client, model):
    fields = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    expected = client.completions.create(**fields).choices[0].text

    async def one(client):
        stream = await client.completions.create(**fields, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run():
        url = f"{bundled_service.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            return await asyncio.gather(*(one(client) for _ in range(8)))

    assert asyncio.run(run()) == [expected] * 8


def test_errors_become_the_clients_exceptions(client, model):
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=model, prompt="a", temperature=3)
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="a", stream=True)

    assert bad.value.param == "temperature"
    assert bad.value.status_code == 400
    assert "must be <= 2" in bad.value.message
    assert missing.value.param == "model"


def test_fields_without_effect_are_reported(client, model):
    reply = client.completions.with_raw_response.create(
        model=model, prompt="a", max_tokens=1, user="me", extra_body={"colour": "red"}
    )

    assert "`colour` is unknown" in reply.headers["x-tessera-warnings"]
    assert reply.parse().warnings[0] == "`user` has no effect"
