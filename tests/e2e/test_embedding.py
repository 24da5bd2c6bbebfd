"""Another program runs the service: the engine as its child, the HTTP interface as its ASGI application."""

import asyncio
import contextlib
import json
import socket
import tempfile
import threading
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from server.cli.settings import Settings
from server.embedding import embedded_service
from server.engine.core.start_checks import StartupError
from server.http.metrics.specs import Outcome
from tests.waiting import GIVE_UP, reached, until

pytestmark = pytest.mark.e2e

SMALL = Settings(device="cpu", kv_cache_tokens=2048, access_log="off")
LONG = {"prompt": "def f(x):", "max_tokens": 1500, "ignore_eos": True}
HALF = LONG | {"max_tokens": 900}


def children():
    files = Path("/proc/self/task").glob("*/children")
    pids = {int(pid) for file in files for pid in file.read_text().split()}
    return {pid for pid in pids if b"zombie" not in Path(f"/proc/{pid}/status").read_bytes()}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Keep the temporary files of this test's services apart from those of others."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def files():
    return set(Path(tempfile.gettempdir()).iterdir())


@contextlib.asynccontextmanager
async def client_of(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://any.host") as client:
        yield client


async def metric(client, name):
    text = (await client.get("/metrics")).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def test_it_answers_and_leaves_no_process_thread_or_folder():
    before = children(), files(), set(threading.enumerate())

    async def use():
        async with embedded_service(SMALL) as service, client_of(service.app) as client:
            early = await client.post("/generate", json={"inputs": "a"})
            await service.wait_until_ready()
            reply = await client.post(
                "/generate", json={"inputs": "def", "parameters": {"max_new_tokens": 3}}
            )
            constrained = await client.post(
                "/v1/completions",
                json={"prompt": "x", "max_tokens": 8, "structured_outputs": {"choice": ["yes"]}},
            )
            assert not files(), "nothing that could be removed while the service runs"
            assert len(children() - before[0]) >= 2, "an engine and a compiler of grammars"
            return early, reply, constrained

    early, reply, constrained = asyncio.run(use())

    assert early.status_code == 503
    assert reply.status_code == 200
    assert reply.json()["generated_text"]
    assert constrained.json()["choices"][0]["text"] == "yes"
    until(lambda: not children() - before[0])
    assert files() == before[1]
    for thread in set(threading.enumerate()) - before[2]:
        thread.join(timeout=GIVE_UP)
        assert not thread.is_alive(), thread


def test_a_wrong_setting_is_an_exception_and_leaves_nothing():
    before = children(), files()

    async def use():
        async with embedded_service(SMALL.model_copy(update={"max_model_len": 10**6})):
            pass

    with pytest.raises(StartupError, match="--max-model-len 1000000 is more than"):
        asyncio.run(use())
    until(lambda: not children() - before[0])
    assert files() == before[1]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_its_server_cancels_counts_as_aborted_by_the_client(stream):
    async def use():
        async with embedded_service(SMALL) as service, client_of(service.app) as client:
            await service.wait_until_ready()
            request = asyncio.create_task(
                client.post("/v1/completions", json=LONG | {"stream": stream})
            )
            await reached(lambda: service.engine.stats.kv_usage)
            request.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await request
            await reached(lambda: not service.engine.stats.kv_usage)
            return [
                await metric(
                    client, f'tessera_requests_total{{endpoint="completions",outcome="{it}"}}'
                )
                for it in (Outcome.ABORT.value, Outcome.ERROR.value)
            ]

    aborted, failed = asyncio.run(use())

    assert (aborted, failed) == (1, 0)


@pytest.mark.slow
def test_requests_that_still_run_when_the_service_is_left_end_with_an_error():
    async def use():
        async with contextlib.AsyncExitStack() as stack:
            service = await stack.enter_async_context(embedded_service(SMALL))
            client = await stack.enter_async_context(client_of(service.app))
            await service.wait_until_ready()
            plain, stream = (
                asyncio.create_task(client.post("/v1/completions", json=HALF | {"stream": it}))
                for it in (False, True)
            )
            await reached(lambda: service.engine.stats.kv_usage > 0.1)
            service_exit = stack.pop_all()
            await service_exit.aclose()
            return await asyncio.gather(plain, stream, return_exceptions=True)

    plain, stream = asyncio.run(use())

    assert plain.status_code == 503
    *_, last, done = stream.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data:"))["error"]
    assert done == "data: [DONE]"


@pytest.mark.slow
def test_another_server_runs_it_under_a_path_of_another_application():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/llm"

        async def use():
            async with embedded_service(SMALL) as service:
                await service.wait_until_ready()
                app = Starlette(routes=[Mount("/llm", service.app)])
                server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                async with httpx.AsyncClient() as client:
                    body = {"inputs": "def", "parameters": {"max_new_tokens": 20}}
                    replies = [
                        await client.post(f"{url}{path}", json=body)
                        for path in ("/generate", "/generate_stream")
                    ]
                    replies.append(await client.get(f"{url}/health"))
                server.should_exit = True
                await serving
                return replies

        plain, stream, health = asyncio.run(use())

    assert [reply.status_code for reply in (plain, stream, health)] == [200] * 3
    events = [json.loads(e.removeprefix("data:")) for e in stream.text.strip().split("\n\n")]
    assert events[-1]["generated_text"] == plain.json()["generated_text"]
