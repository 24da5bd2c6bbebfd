"""Streams on a real socket, with the direct writer and with ASGI's `send`: when tokens are sent, and which together."""

import asyncio
import json

import pytest

from server.engine.core.request import FinishReason
from server.http.transport import DirectWriter, HTTP11Protocol, direct_writer
from tests.http.fakes import event, put
from tests.http.serving import Server
from tests.waiting import GIVE_UP

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[True, False], ids=["uvloop-httptools", "asyncio-h11"])
def fast(request):
    return request.param


@pytest.fixture
def anyio_backend(fast):
    return "asyncio", {"use_uvloop": fast}


@pytest.fixture
async def server(fast, make_app):
    implementation = HTTP11Protocol if fast else "h11"
    async with Server(make_app(), implementation, send_buffer=8192) as server:
        yield server


async def chunks(reader):
    """Read the parts of a chunked response, one for each write of the application."""
    parts = []
    while True:
        size = int(await reader.readline(), 16)
        data = await reader.readexactly(size + 2)
        if not size:
            return parts
        parts.append(data[:-2])


def events(parts):
    texts = b"".join(parts).decode().split("\n\n")[:-1]
    return [json.loads(text.removeprefix("data:")) for text in texts]


async def test_a_client_receives_each_token_before_the_next_is_generated(server, engine):
    may_go_on = asyncio.Event()

    async def script(_engine, _request, stream):
        for n in range(20):
            put(stream, event(n))
            await may_go_on.wait()
            may_go_on.clear()
        put(stream, event(20, FinishReason.LENGTH))

    engine.script = script
    reader, writer = await server.post("/generate_stream")
    await reader.readuntil(b"\r\n\r\n")

    async with asyncio.timeout(GIVE_UP):
        for n in range(1, 21):
            await reader.readline()  # the size of a chunk
            assert json.loads((await reader.readline()).removeprefix(b"data:"))["index"] == n
            await reader.readline()
            await reader.readline()
            may_go_on.set()
        (last,) = events(await chunks(reader))

    assert last["generated_text"] is not None
    writer.close()


async def test_a_slow_client_gets_every_token_once_and_many_together(server, engine):
    count = 20_000
    made = asyncio.Event()

    async def script(_engine, _request, stream):
        for n in range(1, count + 1):
            put(stream, event(n % 200, FinishReason.LENGTH if n == count else None))
            if n % 100 == 0:
                await asyncio.sleep(0)
        made.set()

    engine.script = script
    reader, writer = await server.post("/generate_stream", receive_buffer=4096)
    async with asyncio.timeout(GIVE_UP):
        await made.wait()
        await reader.readuntil(b"\r\n\r\n")
        parts = await chunks(reader)

    assert [e["index"] for e in events(parts)] == list(range(1, count + 1))
    assert len(parts) < count
    assert max(part.count(b"data:") for part in parts) > 100
    writer.close()


async def test_a_slow_client_does_not_delay_another(server, engine):
    finished = []

    async def script(_engine, request, stream):
        count = 20_000 if request.request_id == 1 else 50
        for n in range(1, count + 1):
            put(stream, event(n % 200, FinishReason.LENGTH if n == count else None))
            if n % 10 == 0:
                await asyncio.sleep(0)
        finished.append(request.request_id)

    engine.script = script
    _, lagging = await server.post("/generate_stream", receive_buffer=4096)
    await asyncio.sleep(0.02)
    reader, writer = await server.post("/generate_stream")
    async with asyncio.timeout(GIVE_UP):
        await reader.readuntil(b"\r\n\r\n")
        assert len(events(await chunks(reader))) == 50

    lagging.close()
    writer.close()


@pytest.mark.parametrize("together", [True, False])
async def test_a_stop_string_of_several_tokens_ends_the_stream(server, engine, tokenizer, together):
    tokens = tokenizer.encode("one END.mor two END.more three")

    async def script(_engine, _request, stream):
        if together:
            put(stream, *map(event, tokens))
        for token in [] if together else tokens:
            put(stream, event(token))
            await asyncio.sleep(0.001)

    engine.script = script
    body = {"inputs": "x", "parameters": {"stop": ["D.more t"], "details": True}}
    reader, writer = await server.post("/generate_stream", body)
    async with asyncio.timeout(GIVE_UP):
        await reader.readuntil(b"\r\n\r\n")
        found = events(await chunks(reader))

    assert found[-1]["generated_text"] == "one END.mor two END.more t"
    assert found[-1]["details"]["finish_reason"] == "stop_sequence"
    assert "".join(e["token"]["text"] for e in found) == "one END.mor two END.more t"
    assert engine.aborted == [1]
    writer.close()


async def test_only_our_protocol_has_a_direct_writer(fast):
    found = []

    async def app(scope, _receive, send):
        found.append(direct_writer(scope))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with Server(app, HTTP11Protocol if fast else "h11") as server:
        reader, writer = await server.post("/")
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    assert isinstance(found[0], DirectWriter) is fast
