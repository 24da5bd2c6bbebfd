"""The end of a service: which requests are served, refused and ended, on real sockets."""

import asyncio
import json
import os
import signal
import socket

import pytest

from server.engine.core.request import FinishReason
from server.engine.link.protocol import EngineState
from server.http import serving
from server.http.serving import HTTPServer
from tests.http.conftest import CONFIG
from tests.http.fakes import event, put
from tests.http.serving import head
from tests.waiting import GIVE_UP

pytestmark = pytest.mark.anyio


class Service:
    """An `HTTPServer` with the signal SIGUSR1, which the test sends to itself."""

    def __init__(self, app):
        self._server = HTTPServer(app, CONFIG, [signal.SIGUSR1])
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._writers = []

    async def __aenter__(self):
        self.running = asyncio.create_task(self._server.run_until_stopped(self._socket))
        await self.status("/health")
        return self

    async def __aexit__(self, *exception):
        for writer in self._writers:
            writer.close()
        self._server.stop()
        await asyncio.wait_for(self.running, GIVE_UP)

    async def signal(self):
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.05)

    async def open(self, path, body=b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        method = b"POST" if body else b"GET"
        writer.write(head(path, len(body)).replace(b"POST", method) + body)
        return reader, writer

    async def read(self, path):
        reader, _ = await self.open(path)
        top = await reader.readuntil(b"\r\n\r\n")
        length = int(top.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return await reader.readexactly(length)

    async def status(self, path, body=b""):
        reader, writer = await self.open(path, body)
        top = await reader.readuntil(b"\r\n\r\n")
        length = int(top.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        content = await reader.readexactly(length)
        writer.close()
        return int(top.split()[1]), top.decode().lower(), json.loads(content)


@pytest.fixture
async def open_service(make_app):
    running = []

    async def start(**limits):
        running.append(Service(make_app(**limits)))
        return await running[-1].__aenter__()

    yield start
    for service in running:
        await service.__aexit__()


@pytest.fixture
def held(engine):
    """Requests generate one token, and the rest when the event is set."""
    goes_on = asyncio.Event()

    async def script(_engine, _request, stream):
        put(stream, event(1))
        await goes_on.wait()
        put(stream, event(2, FinishReason.LENGTH))

    engine.script = script
    return goes_on


PROMPT = json.dumps({"inputs": "hello"}).encode()
CHAT = json.dumps({"prompt": "hello", "stream": True}).encode()


async def test_requests_are_served_during_the_delay_while_health_checks_fail(open_service):
    service = await open_service(drain_delay=30)
    await service.signal()

    for path in ("/health", "/health/ready", "/ping"):
        status, top, reply = await service.status(path)
        assert (status, reply["state"]) == (503, "draining")
        assert "retry-after: " in top
    assert (await service.status("/health/live"))[0] == 200
    status, top, _ = await service.status("/generate", PROMPT)
    assert status == 200
    assert "connection: close" in top


async def test_new_requests_are_refused_while_those_in_progress_are_completed(open_service, held):
    service = await open_service()
    reader, _ = await service.open("/generate_stream", PROMPT)
    await reader.readuntil(b"\n\n")
    await service.signal()

    status, top, reply = await service.status("/generate", PROMPT)
    assert (status, reply["error_type"]) == (503, "unavailable")
    assert "connection: close" in top
    assert "retry-after: " in top
    status, _, reply = await service.status("/v1/completions", CHAT)
    assert (status, reply["error"]["code"]) == (503, 503)
    assert (await service.status("/health"))[0] == 503

    held.set()
    assert b"generated_text" in await reader.read()
    await asyncio.wait_for(service.running, GIVE_UP)


async def test_requests_in_progress_can_be_aborted_while_new_ones_are_refused(open_service, held):
    service = await open_service()
    reader, _ = await service.open("/generate_stream", PROMPT)
    await reader.readuntil(b"\n\n")
    await service.signal()

    status, _, reply = await service.status("/abort", b'{"all": true}')
    assert status == 200
    assert len(reply["aborted"]) == 1
    assert b'"error_type":"aborted"' in await reader.read()
    await asyncio.wait_for(service.running, GIVE_UP)
    held.set()


@pytest.mark.parametrize("ending", ["timeout", "second signal"])
async def test_requests_that_are_left_get_an_error(open_service, held, caplog, ending):
    timeout = 0.3 if ending == "timeout" else 30
    service = await open_service(drain_timeout=timeout)
    requests = {
        path: await service.open(path, body)
        for path, body in (
            ("/generate", PROMPT),
            ("/generate_stream", PROMPT),
            ("/v1/completions", CHAT),
        )
    }
    await requests["/generate_stream"][0].readuntil(b"\n\n")
    slow = await service.open("/generate", PROMPT)
    slow[1].write(head("/generate", 10) + b"{")  # a second request, without its body
    await service.signal()
    if ending == "second signal":
        await service.signal()

    replies = {path: await asyncio.wait_for(r.read(), GIVE_UP) for path, (r, _) in requests.items()}

    assert replies["/generate"].startswith(b"HTTP/1.1 503")
    assert b'"the server is stopping"' in replies["/generate"]
    assert b'"error_type":"incomplete_generation_stream"' in replies["/generate_stream"]
    assert replies["/v1/completions"].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b'"error":' in replies["/v1/completions"]
    await asyncio.wait_for(service.running, GIVE_UP)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_body_that_has_not_arrived_is_answered_at_the_end(open_service):
    service = await open_service(drain_timeout=0.1)
    reader, writer = await service.open("/generate", PROMPT[:-1])
    idle, _ = await service.open("/health")
    await idle.readuntil(b"\r\n\r\n")
    writer.write(head("/generate", 100) + b"{")
    await asyncio.sleep(0.05)
    await service.signal()

    assert b"HTTP/1.1 503" in await asyncio.wait_for(reader.read(), GIVE_UP)
    await asyncio.wait_for(idle.read(), GIVE_UP)
    await asyncio.wait_for(service.running, GIVE_UP)


async def test_a_stopped_server_does_not_wait_for_requests_in_progress(open_service):
    service = await open_service()
    reader, writer = await service.open("/generate")
    writer.write(head("/generate", 10) + b"{")  # the rest of the body does not come
    await asyncio.sleep(0.05)

    service._server.stop()

    await asyncio.wait_for(service.running, GIVE_UP)
    assert b"HTTP/1.1 503" in await reader.read()


async def test_there_is_no_delay_before_the_engine_is_ready(open_service, engine):
    service = await open_service(drain_delay=30)
    engine.state = EngineState.STARTING
    await service.signal()

    await asyncio.wait_for(service.running, GIVE_UP)


async def test_a_response_that_begins_while_draining_ends_its_connection(open_service, held):
    service = await open_service()
    reader, _ = await service.open("/generate", PROMPT)
    await asyncio.sleep(0.1)
    await service.signal()
    held.set()

    reply = await asyncio.wait_for(reader.read(), GIVE_UP)
    assert reply.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in reply.lower()


async def test_a_request_of_a_connection_that_was_accepted_at_the_end_is_refused(
    open_service, monkeypatch
):
    monkeypatch.setattr(serving, "_LAST_REQUESTS_SECONDS", 1.0)
    service = await open_service()
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    await service.signal()  # nothing is in progress
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(head("/generate", len(PROMPT)) + PROMPT)

    assert b"HTTP/1.1 503" in await asyncio.wait_for(reader.read(), GIVE_UP)
    writer.close()


async def test_a_metric_says_that_the_service_is_draining(open_service):
    service = await open_service(drain_delay=30)
    assert b"\ntessera_draining 0" in await service.read("/metrics")
    await service.signal()
    assert b"\ntessera_draining 1" in await service.read("/metrics")
