"""Requests while the engine is being started again: they wait for it, within limits."""

import asyncio
import contextlib

import httpx
import pytest

from server.engine.core.messages import StepMessage
from server.engine.core.request import FinishReason, GenerateRequest
from server.engine.link.front_end.client import EngineHandle
from server.engine.link.protocol import EngineReport, EngineState
from server.http.app import create_app
from server.http.lifecycle import Stage
from tests.http.conftest import CONFIG, frames, replace
from tests.http.fakes import INFO
from tests.http.serving import Server
from tests.waiting import GIVE_UP, reached

pytestmark = pytest.mark.anyio

TOKEN, TEXT = 72, '"i"'  # as JSON
BODIES = {
    "/generate": {"inputs": "hello"},
    "/generate_stream": {"inputs": "hello"},
    "/v1/completions": {"prompt": "hello"},
    "stream": {"prompt": "hello", "stream": True},
}


class Engine(EngineHandle):
    """Records requests; the test answers them, loses the engine and starts it again."""

    def __init__(self):
        super().__init__()
        self.reports = [EngineReport(state=EngineState.READY, phase="ready", info=INFO)]
        self.requests = []

    def _send(self, message):
        if isinstance(message, GenerateRequest):
            self.requests.append(message)

    def lose(self):
        self.reports[0].state, self.reports[0].phase = EngineState.RESTARTING, "starting again"
        self._fail("the engine is lost")

    def become_ready(self):
        self.reports[0].state, self.reports[0].phase = EngineState.READY, "ready"
        self._serve_restart_queue()

    def answer(self, finish=FinishReason.LENGTH):
        request_id = self.requests[-1].request_id
        step = StepMessage(
            request_ids=[request_id], token_ids=[TOKEN], finish_reasons=[finish], logprobs={}
        )
        self._deliver([step])


@pytest.fixture
async def engine(anyio_backend):
    return Engine()


@pytest.fixture
def make(engine, tokenizer):
    return lambda **limits: create_app(engine, tokenizer, replace(CONFIG, **limits))


@pytest.fixture
async def open_client(make):
    async with contextlib.AsyncExitStack() as stack:

        async def open_one(**limits):
            transport = httpx.ASGITransport(make(**limits))
            client = httpx.AsyncClient(transport=transport, base_url="http://test")
            return await stack.enter_async_context(client)

        yield open_one


def posted(client, kind, **fields):
    path = "/v1/completions" if kind == "stream" else kind
    return asyncio.create_task(client.post(path, json=BODIES[kind] | fields))


@pytest.mark.parametrize("kind", BODIES)
async def test_a_request_that_arrives_during_a_restart_is_answered_afterwards(
    open_client, engine, kind
):
    client = await open_client()
    engine.lose()
    request = posted(client, kind)
    await reached(lambda: engine.restart_queue.streams)
    assert (await client.get("/health")).status_code == 503
    engine.become_ready()
    engine.answer()

    assert (await request).status_code == 200
    assert TEXT in (await request).text


@pytest.mark.parametrize("kind", BODIES)
async def test_a_request_that_waits_too_long_gets_503_with_retry_after(open_client, engine, kind):
    client = await open_client(restart_wait=0.05)
    engine.lose()
    reply = await posted(client, kind)

    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) > 0
    assert "restarting" in reply.text
    metrics = (await client.get("/metrics")).text
    assert "tessera_requests_in_flight 0.0" in metrics


@pytest.mark.parametrize("kind", BODIES)
async def test_a_request_that_is_lost_before_its_first_token_is_generated_again(
    open_client, engine, kind
):
    client = await open_client()
    request = posted(client, kind)
    await reached(lambda: engine.requests)
    engine.lose()
    engine.become_ready()
    engine.answer()

    assert (await request).status_code == 200
    assert TEXT in (await request).text
    assert len(engine.requests) == 2


async def test_a_stream_that_is_lost_after_its_first_token_ends_with_an_error(open_client, engine):
    client = await open_client()
    request = posted(client, "/generate_stream")
    await reached(lambda: engine.requests)
    engine.answer(finish=None)
    engine.lose()
    engine.become_ready()

    token, error = frames(await request)
    assert token["token"]["id"] == TOKEN
    assert error["error_type"] == "generation"
    assert len(engine.requests) == 1


async def test_the_deadline_of_a_request_ends_its_wait(open_client, engine):
    client = await open_client()
    engine.lose()
    reply = await asyncio.wait_for(posted(client, "/v1/completions", timeout_ms=50), GIVE_UP)

    assert reply.status_code == 504


async def test_the_limit_of_requests_in_flight_counts_those_that_wait(open_client, engine):
    client = await open_client(max_concurrent_requests=2)
    engine.lose()
    requests = [posted(client, "/generate") for _ in range(2)]
    await reached(lambda: len(engine.restart_queue.streams) == 2)
    assert (await posted(client, "/generate")).status_code == 429
    engine.restart_queue.fail("over")

    assert [(await request).status_code for request in requests] == [503, 503]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_client_that_leaves_while_it_waits_is_dropped(make, engine, path):
    async with Server(make()) as server:
        engine.lose()
        _, writer = await server.post(path)
        await reached(lambda: engine.restart_queue.streams)
        writer.close()
        await reached(lambda: not engine.restart_queue.streams)
        engine.become_ready()

    assert engine.requests == []


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_request_that_waits_when_the_service_ends_gets_503(make, engine, path):
    app = make()
    lifecycle = app.state.lifecycle
    async with Server(app) as server:
        engine.lose()
        reader, writer = await server.post(path)
        await reached(lambda: engine.restart_queue.streams)
        lifecycle.stage = Stage.ENDING
        lifecycle.cancel_requests()
        reply = await asyncio.wait_for(reader.read(), GIVE_UP)
        writer.close()

    assert reply.startswith(b"HTTP/1.1 503")
    assert b"connection: close" in reply
    assert engine.restart_queue.streams == []


@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.STOPPED])
async def test_requests_do_not_wait_for_the_first_start(open_client, engine, state):
    client = await open_client()
    engine.reports[0].state, engine.reports[0].phase = state, "loading"
    reply = await asyncio.wait_for(posted(client, "/generate"), GIVE_UP)

    assert reply.status_code == 503


async def test_facts_of_the_model_are_reported_during_a_restart(open_client, engine):
    client = await open_client()
    engine.lose()

    for path in ("/info", "/v1/models", "/plan"):
        assert (await client.get(path)).status_code == 200
