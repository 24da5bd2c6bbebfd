"""Services behind the proxy of deploy/proxy are restarted one after the other, under load."""

import asyncio
import json
import random

import httpx
import pytest

from tests.deploy.nginx import needs_nginx, run_nginx
from tests.reliability.managed_service import ManagedService

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
CLIENTS, ROUNDS = 8, 2
OPTIONS = ["--device=cpu", "--cpu-threads=1", "--max-model-len=512", "--kv-cache-tokens=16384"]


class Load:
    """Clients that send one request after the other, with and without streams, until `stop`.

    Attributes:
        failures: what was wrong with each request that was not answered in full.
        num_complete: requests answered in full.
    """

    def __init__(self, url):
        self._url = url
        self._stop = asyncio.Event()
        self.failures = []
        self.num_complete = 0

    async def run(self):
        await asyncio.gather(*(self._client(random.Random(seed)) for seed in range(CLIENTS)))

    def stop(self):
        self._stop.set()

    async def _client(self, choices):
        async with httpx.AsyncClient(base_url=self._url, verify=False, timeout=60) as client:  # noqa: S501
            while not self._stop.is_set():
                tokens = choices.randint(1, 200)
                parameters = {"max_new_tokens": tokens, "ignore_eos": True}
                body = {"inputs": f"def f{tokens}(", "parameters": parameters}
                send = choices.choice((self._whole, self._streamed))
                try:
                    problem = await send(client, body, tokens)
                except httpx.HTTPError as error:
                    problem = repr(error)
                if problem is None:
                    self.num_complete += 1
                else:
                    self.failures.append(problem)

    async def _whole(self, client, body, tokens):
        body["parameters"]["details"] = True
        reply = await client.post("/generate", json=body)
        if reply.status_code != 200:
            return f"{reply.status_code} {reply.text}"
        generated = reply.json()["details"]["generated_tokens"]
        return None if generated == tokens else f"{generated} of {tokens} tokens"

    async def _streamed(self, client, body, tokens):
        events = []
        async with client.stream("POST", "/generate_stream", json=body) as reply:
            if reply.status_code != 200:
                return f"{reply.status_code} {await reply.aread()}"
            async for line in reply.aiter_lines():
                events += [json.loads(line[5:])] if line.startswith("data:") else []
        complete = len(events) == tokens and "generated_text" in events[-1]
        return None if complete else f"{len(events)} events of {tokens}: {events[-1:]}"


async def restart_each(services, load):
    """Restart each service when the other one is ready; then end the load."""
    for service in services * ROUNDS:
        before = load.num_complete
        while load.num_complete < before + 5 * CLIENTS:  # noqa: ASYNC110 - many tasks count
            await asyncio.sleep(0.05)
        assert await asyncio.to_thread(service.stop) == 0
        await asyncio.to_thread(service.start)
        await asyncio.to_thread(service.wait_until_ready)
    load.stop()


@needs_nginx
def test_no_request_fails_while_services_are_restarted_one_after_the_other(tmp_path):
    services = []
    try:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            services.append(ManagedService(OPTIONS, folder=tmp_path / name))
            services[-1].start()
        for service in services:
            service.wait_until_ready()
        with run_nginx(tmp_path, [service.port for service in services]) as url:

            async def run():
                load = Load(url)
                await asyncio.gather(load.run(), restart_each(services, load))
                return load

            load = asyncio.run(run())
    finally:
        for service in services:
            service.close()

    assert load.num_complete > CLIENTS * ROUNDS * len(services)
    assert load.failures == []
