"""The limit of connections: who is closed for whom, and what a refused client gets."""

import asyncio
import gc
import resource
import weakref

import pytest

from server.http.transport import connections as module
from server.http.transport.connections import connection_capacity
from tests.http.fakes import event, put, silent
from tests.http.serving import Server, head
from tests.waiting import GIVE_UP, reached

pytestmark = pytest.mark.anyio

GET = b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n"
BODY = b'{"inputs": "x"}'


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def server(make_app):
    async with Server(make_app(), max_connections=4) as server:
        yield server


async def one_token_and_silence(engine, request, stream):
    put(stream, event(5))
    await silent(engine, request, stream)


async def ask(reader, writer):
    writer.write(GET)
    return await asyncio.wait_for(reader.readuntil(b"}"), GIVE_UP)


async def is_closed(reader):
    try:
        return await asyncio.wait_for(reader.read(), 0.2) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


async def test_a_new_connection_takes_the_place_of_the_one_that_has_waited_longest(server):
    connections = [await server.connect() for _ in range(4)]
    for connection in connections:
        await ask(*connection)
    await ask(*connections[0])  # now the second has waited longest

    new = await server.connect()

    assert b"200" in await ask(*new)
    assert [await is_closed(reader) for reader, _ in connections] == [False, True, False, False]


async def test_silent_connections_and_unfinished_heads_give_way(server):
    for part in [b"", b"G", b"GET / HTTP/1.1\r\nX: ", b""]:
        _, writer = await server.connect()
        writer.write(part)
    await asyncio.sleep(0.02)

    for _ in range(8):
        assert b"200" in await ask(*await server.connect())


async def test_no_running_request_is_ended_for_a_new_connection(server, engine):
    engine.script = silent
    running = []
    for _ in range(4):
        reader, writer = await server.connect()
        writer.write(head("/generate", len(BODY)) + BODY)
        running.append((reader, writer))
    async with asyncio.timeout(GIVE_UP):
        while len(engine.running) < 4:  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0.005)

    reader, writer = await server.connect()
    writer.write(GET)
    try:
        answer = (await asyncio.wait_for(reader.read(), GIVE_UP)).decode().lower()
    except ConnectionError:  # it was closed before the request was read
        answer = None

    if answer is not None:
        assert answer.startswith("http/1.1 503")
        assert "retry-after: 1\r\n" in answer
        assert "connection: close\r\n" in answer
    assert len(engine.running) == 4
    running[0][1].close()
    await asyncio.wait_for(engine.abort_seen.wait(), GIVE_UP)
    assert b"200" in await ask(*await server.connect())
    for _, writer in running:
        writer.close()


async def test_an_address_above_its_share_loses_its_own_connections(server):
    many = [await server.connect(address="127.0.0.2") for _ in range(4)]
    for connection in many:
        await ask(*connection)

    others = [await server.connect(address="127.0.0.3") for _ in range(2)]
    for connection in others:
        assert b"200" in await ask(*connection)
    assert [await is_closed(reader) for reader, _ in many] == [True, True, False, False]

    more = [await server.connect(address="127.0.0.2") for _ in range(3)]
    assert b"200" in await ask(*more[-1])
    for connection in others:
        assert b"200" in await ask(*connection)


async def test_requests_that_one_address_never_completes_keep_no_other_one_out(server):
    slow = []
    for _ in range(4):
        reader, writer = await server.connect(address="127.0.0.2")
        writer.write(head("/generate", len(BODY)) + BODY[:1])
        slow.append(reader)
    await reached(lambda: len(server.connections) == 4)
    assert b"200" in await ask(*await server.connect(address="127.0.0.3"))
    assert [await is_closed(reader) for reader in slow].count(True) == 1

    reader, _ = await server.connect(address="127.0.0.2")  # which has more than its share
    assert b"503" in await asyncio.wait_for(reader.read(), GIVE_UP)


async def test_no_response_that_has_begun_is_cut_for_another_address(server, engine):
    engine.script = one_token_and_silence
    streams = []
    for _ in range(4):
        reader, writer = await server.connect(address="127.0.0.2")
        writer.write(head("/generate_stream", len(BODY)) + BODY)
        await asyncio.wait_for(reader.readuntil(b"data:"), GIVE_UP)
        streams.append((reader, writer))

    reader, _ = await server.connect(address="127.0.0.3")
    assert b"503" in await asyncio.wait_for(reader.read(), GIVE_UP)
    assert len(engine.running) == 4


async def test_among_more_addresses_than_connections_the_one_that_has_waited_longest_gives_way(
    server,
):
    connections = [await server.connect(address=f"127.0.0.{number}") for number in range(2, 6)]
    for connection in connections:
        await ask(*connection)
    await ask(*connections[0])

    assert b"200" in await ask(*await server.connect(address="127.0.0.9"))
    assert [await is_closed(reader) for reader, _ in connections] == [False, True, False, False]


@pytest.mark.parametrize("is_complete", [True, False])
async def test_a_closed_connection_is_freed_without_a_garbage_collection(
    server, engine, is_complete
):
    engine.script = silent
    reader, writer = await server.connect()
    writer.write(GET if is_complete else head("/generate", len(BODY)) + BODY)
    if is_complete:
        await asyncio.wait_for(reader.readuntil(b"}"), GIVE_UP)
    else:
        await reached(lambda: engine.running)
    (protocol,) = server.connections
    freed = weakref.ref(protocol)
    del protocol
    gc.collect()
    gc.disable()
    try:
        writer.close()
        await reached(lambda: freed() is None)
    finally:
        gc.enable()


async def test_a_refused_client_gets_503(server, engine):
    engine.script = silent
    for _ in range(4):
        _, writer = await server.connect()
        writer.write(head("/generate", len(BODY)) + BODY)
    async with asyncio.timeout(GIVE_UP):
        while len(engine.running) < 4:  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0.005)

    reader, _ = await server.connect()
    answer = (await asyncio.wait_for(reader.read(), GIVE_UP)).decode()

    assert answer.startswith("HTTP/1.1 503 Service Unavailable\r\n")
    assert "Retry-After: 1\r\n" in answer
    assert answer.endswith("\r\n\r\nToo many connections.\n")


@pytest.mark.parametrize(
    ("descriptors", "wanted", "capacity"),
    [
        (1024, None, 1024 - module.RESERVED_DESCRIPTORS),
        (1024, 100, 100),
        (1024, 5000, 1024 - module.RESERVED_DESCRIPTORS),
        (64, None, 32),
        (1 << 20, None, module.MAX_CONNECTIONS),
        (1 << 20, 20_000, 20_000),
        (resource.RLIM_INFINITY, None, module.MAX_CONNECTIONS),
    ],
)
def test_the_limit_leaves_a_reserve_of_descriptors(monkeypatch, descriptors, wanted, capacity):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))

    assert connection_capacity(wanted) == capacity
