"""The engine is killed: no request is lost that has received nothing."""

import asyncio
import os
import signal

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.anyio]

PROMPTS = [f"The {i}th time" for i in range(8)]


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def generate(client, prompt, path="/generate"):
    parameters = {"max_new_tokens": 8, "do_sample": True, "seed": 3, "ignore_eos": True}
    body = {"inputs": prompt, "parameters": parameters}
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    last = reply.text.removesuffix("\n\n").split("data:")[-1]
    return httpx.Response(200, text=last).json()["generated_text"]


@pytest.mark.parametrize("front_ends", [1, 2])
async def test_requests_that_have_received_nothing_survive_the_death_of_the_engine(
    start_service, front_ends
):
    service = start_service("--device=cpu", f"--frontends={front_ends}", "--restart-wait=60")
    service.wait_until_healthy()
    async with httpx.AsyncClient(base_url=service.url, timeout=90) as client:
        expected = [await generate(client, prompt) for prompt in PROMPTS]
        engine = service.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        paths = ["/generate", "/generate_stream"] * 4
        lost = [
            asyncio.create_task(generate(client, prompt, path))
            for prompt, path in zip(PROMPTS, paths, strict=True)
        ]
        await asyncio.sleep(1)
        os.kill(engine, signal.SIGKILL)
        while (await client.get("/health")).status_code == 200:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
        late = [asyncio.create_task(generate(client, prompt)) for prompt in PROMPTS]

        assert await asyncio.gather(*lost) == expected
        assert await asyncio.gather(*late) == expected
        assert (await client.get("/health")).status_code == 200
        metrics = (await client.get("/metrics")).text
    assert "tessera_requests_in_flight 0" in metrics
    assert "tessera_engine_restarts_total 1" in metrics
