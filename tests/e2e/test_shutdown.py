"""SIGTERM during load: every request gets a final status, and nothing is left of the service."""

import asyncio
import os
import re
import shutil
import signal
import time
from pathlib import Path

import httpx
import openai
import pytest

from model.hub.resolve import BUNDLED, resolve
from tests.control import Control
from tests.reliability.processes import process_tree
from tests.waiting import GIVE_UP, is_running, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.anyio]

TOKENS = 100


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Load:
    """Clients that send one request after the other and note how each ends.

    Attributes:
        ends: how requests ended: a status, "done", "error event", "refused" or, if one was lost, "lost".
    """

    def __init__(self, url):
        self._url = url
        self.ends = []
        self._http = httpx.AsyncClient(base_url=url, timeout=60)
        self._openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)

    async def run(self, send):
        """Repeat a request until the service refuses connections."""
        while True:
            try:
                self.ends.append(await send(self))
            except openai.APIStatusError as error:
                self.ends.append(error.status_code)
            except openai.APIConnectionError as error:
                return self.ends.append(self._end(error.__cause__))
            except openai.APIError:
                self.ends.append("error event")
            except httpx.TransportError as error:
                return self.ends.append(self._end(error))
            await asyncio.sleep(0.01)

    def _end(self, error):
        """Return how a request without a response ended.

        When the service has refused requests and ends, connections that it has not accepted yet are reset.
        """
        kind = type(error).__name__  # the openai client may bring its own httpx
        if kind == "ConnectError":
            return "refused"
        return "refused" if kind == "ReadError" and 503 in self.ends else f"lost: {error!r}"

    async def plain(self):
        body = {"inputs": "x", "parameters": {"max_new_tokens": TOKENS, "ignore_eos": True}}
        return (await self._http.post("/generate", json=body)).status_code

    async def stream(self):
        body = {"inputs": "x", "parameters": {"max_new_tokens": TOKENS, "ignore_eos": True}}
        last = ""
        async with self._http.stream("POST", "/generate_stream", json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                return reply.status_code
            async for line in reply.aiter_lines():
                last = line or last
        if '"error"' in last:
            return "error event"
        return "done" if '"generated_text":"' in last else "lost"

    async def completion(self):
        stream = await self._openai.completions.create(
            model="bundled", prompt="x", max_tokens=TOKENS, stream=True
        )
        reason = None
        async for chunk in stream:
            reason = chunk.choices[0].finish_reason if chunk.choices else reason
        return "done" if reason else "lost"

    async def health(self):
        return (await self._http.get("/health")).status_code


def descendants(pid):
    return [process.pid for process in process_tree(pid)[1:]]


@pytest.mark.parametrize("front_ends", [1, 2])
@pytest.mark.parametrize("sending", ["to the service", "to all its processes", "twice"])
async def test_no_request_is_lost(start_service, front_ends, sending):
    service = start_service(
        "--device=cpu", f"--frontends={front_ends}", "--drain-delay=0.5", "--drain-timeout=20"
    )
    service.wait_until_healthy()
    processes = descendants(service.process.pid)
    load = Load(service.url)
    kinds = [Load.plain] * 4 + [Load.stream] * 4 + [Load.completion] * 2 + [Load.health]
    clients = [asyncio.create_task(load.run(kind)) for kind in kinds]
    await asyncio.sleep(1.5)

    with Control() as control:
        signalled = time.monotonic()
        targets = processes if sending == "to all its processes" else []
        for pid in [service.process.pid, *targets]:
            os.kill(pid, signal.SIGTERM)
        if sending == "twice":
            await asyncio.sleep(0.2)
            service.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(GIVE_UP):
            await asyncio.gather(*clients)
            code = await asyncio.to_thread(service.process.wait, GIVE_UP)
        seconds = time.monotonic() - signalled

    assert code == 0
    assert not [end for end in load.ends if str(end).startswith("lost")], load.ends
    assert load.ends.count("refused") == len(kinds)
    assert 503 in load.ends
    if sending == "twice":
        assert seconds < control.allowed(4)
    else:
        assert set(load.ends) <= {200, 503, "done", "refused"}, load.ends
    assert "Traceback" not in service.log(), service.log()
    assert_ended(processes)


@pytest.mark.parametrize("front_ends", [1, 2])
@pytest.mark.parametrize("moment", ["importing", "starting processes", "listening"])
async def test_a_signal_during_the_start_ends_the_service(start_service, front_ends, moment):
    service = start_service("--device=cpu", f"--frontends={front_ends}")
    for _ in range(600):
        if moment == "importing" and descendants(service.process.pid):
            break
        if moment == "starting processes" and len(descendants(service.process.pid)) >= front_ends:
            await asyncio.sleep(1)  # front ends import their modules
            break
        if "listening" in service.log():
            break
        await asyncio.sleep(0.05)
    processes = descendants(service.process.pid)
    with Control() as control:
        signalled = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(service.process.wait, GIVE_UP)
        seconds = time.monotonic() - signalled

    assert code == 0
    assert seconds < control.allowed(8)
    assert "Traceback" not in service.log()
    assert_ended(processes)


async def test_a_signal_while_the_tokenizer_is_read_ends_the_service(start_service, tmp_path):
    folder = shutil.copytree(resolve(BUNDLED), tmp_path / "model")
    service = start_service("--device=cpu", f"--model={folder}")
    readers = []
    while not readers:
        await asyncio.sleep(0.005)
        assert service.process.poll() is None, service.log()
        readers = [
            pid
            for pid in descendants(service.process.pid)
            if b"model.text.bounded.program" in command_line(pid) and has_limits(pid)
        ]
    os.kill(readers[0], signal.SIGSTOP)  # as if it read for ever
    processes = descendants(service.process.pid)

    service.process.send_signal(signal.SIGTERM)

    assert await asyncio.to_thread(service.process.wait, 60) == 0
    assert "Traceback" not in service.log()
    assert_ended(processes)


def test_a_signal_at_any_moment_of_the_imports_ends_the_service_without_an_error(start_service):
    for moment in range(12):
        service = start_service("--device=cpu")
        while not (processes := descendants(service.process.pid)):
            time.sleep(0.002)
        time.sleep(0.05 * moment)
        service.process.send_signal(signal.SIGTERM)
        if moment % 2:
            service.process.send_signal(signal.SIGINT)

        assert service.process.wait(GIVE_UP) == 0, service.log()
        assert "Traceback" not in service.log()
        assert_ended(processes)


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def has_limits(pid):
    """Whether a helper process has set itself up, so that it notices the end of its parent also if it is stopped."""
    try:
        limits = Path(f"/proc/{pid}/limits").read_text()
    except OSError:  # it has ended
        return False
    return re.search(r"Max file size +0 ", limits) is not None


def assert_ended(processes):
    """Require that processes end; those that are killed as the service ends may need a moment more."""
    until(lambda: not any(map(is_running, processes)))
