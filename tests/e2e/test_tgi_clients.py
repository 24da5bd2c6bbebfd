"""Clients of Text Generation Inference work with the bundled model unchanged."""

import asyncio
import json

import httpx
import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient

pytestmark = pytest.mark.e2e

PROMPT = "def fibonacci(n):\n"


@pytest.fixture
def client(bundled_service):
    return InferenceClient(bundled_service.url)


def test_a_stream_s_tokens_and_its_last_event_have_the_text_of_the_plain_reply(client):
    text = client.text_generation(PROMPT, max_new_tokens=12, return_full_text=False)
    events = list(
        client.text_generation(
            PROMPT, max_new_tokens=12, return_full_text=False, stream=True, details=True
        )
    )

    assert text.startswith("    ")
    assert "".join(event.token.text for event in events) == text
    assert events[-1].generated_text == text
    assert events[-1].details.generated_tokens == 12
    assert events[-1].details.finish_reason == "length"


def test_details_name_the_stop_string_and_every_token(client):
    reply = client.text_generation(
        PROMPT, max_new_tokens=40, stop=["return"], details=True, decoder_input_details=True,
        do_sample=True, temperature=0.7, seed=11, top_n_tokens=2, return_full_text=True,
    )  # fmt: skip

    details = reply.details
    generated = "".join(token.text for token in details.tokens if not token.special)
    assert reply.generated_text == PROMPT + generated
    assert details.finish_reason in ("stop_sequence", "length", "eos_token")
    assert details.seed == 11
    assert "".join(token.text for token in details.prefill[1:]) == PROMPT  # after the BOS token
    assert all(len(top) == 2 for top in details.top_tokens)


def test_the_async_client_streams_several_prompts_at_the_same_time(bundled_service):
    async def read(client, seed):
        stream = await client.text_generation(
            PROMPT, max_new_tokens=10, do_sample=True, seed=seed, stream=True, watermark=True
        )
        return "".join([text async for text in stream])

    async def read_all():
        async with AsyncInferenceClient(bundled_service.url) as client:
            return await asyncio.gather(*(read(client, seed % 2) for seed in range(4)))

    texts = asyncio.run(read_all())

    assert texts[0] == texts[2]
    assert texts[1] == texts[3]


def test_the_requests_of_clients_that_nobody_can_change_are_served(bundled_service):
    huggingface_js = {
        "inputs": PROMPT,
        "parameters": {"max_new_tokens": 30, "stop_sequences": ["Return a"]},
        "options": {"use_cache": False, "wait_for_model": True},
    }
    semantic_kernel = {
        "inputs": PROMPT,
        "stream": False,
        "parameters": {
            "top_k": None, "temperature": 1, "max_new_tokens": 4, "max_time": None,
            "return_full_text": True, "num_return_sequences": 1, "do_sample": True, "Details": True,
        },
        "options": {"use_cache": True, "wait_for_model": False},
    }  # fmt: skip

    stopped = httpx.post(bundled_service.url, json=huggingface_js, timeout=60)
    detailed = httpx.post(bundled_service.url, json=semantic_kernel, timeout=60)

    assert stopped.json()[0]["generated_text"].endswith("Return a")
    assert detailed.json()[0]["details"]["generated_tokens"] == 4
    for reply in (stopped, detailed):
        assert reply.json()[0]["warnings"] == ["`options` has no effect"]
        assert json.loads(reply.headers["x-tessera-warnings"]) == ["`options` has no effect"]


def test_a_client_of_sagemaker_s_containers_finds_both_routes(bundled_service):
    ping = httpx.get(f"{bundled_service.url}/ping")
    reply = httpx.post(
        f"{bundled_service.url}/invocations",
        json={"inputs": PROMPT, "parameters": {"max_new_tokens": 4}},
        timeout=60,
    )

    assert ping.status_code == 200
    assert reply.json()[0]["generated_text"].startswith(PROMPT)


def test_info_has_a_version_and_limits_that_clients_of_tgi_parse(bundled_service):
    info = httpx.get(f"{bundled_service.url}/info").json()

    major, minor, _ = map(int, info["version"].split("."))
    assert (major, minor) >= (2, 1)  # llama-index reads `max_input_tokens` from here on
    assert info["max_input_tokens"] == info["max_total_tokens"] - 1
    assert info["tessera_version"]
