"""What the two clients of a service get while one of them retries at once."""

import asyncio

import pytest

from server.http.load import paced_refusals as module
from server.http.load.paced_refusals import AT_ONCE
from server.http.transport import HTTP11Protocol
from tests.http.fakes import silent
from tests.http.serving import Server, head
from tests.waiting import GIVE_UP, reached

pytestmark = pytest.mark.anyio

BODY = b'{"inputs": "x"}'


@pytest.fixture
async def server(make_app, monkeypatch):
    monkeypatch.setattr(module, "MOST_SECONDS", 10 * GIVE_UP)  # never, for this test
    monkeypatch.setattr(module, "_INTERVAL", 10 * GIVE_UP)
    async with Server(make_app(max_concurrent_requests=2), HTTP11Protocol) as server:
        yield server


async def send(server, address, path="/generate"):
    reader, writer = await server.connect(address=address)
    writer.write(head(path, len(BODY)) + BODY)
    return reader, writer


async def status(reader):
    return int((await asyncio.wait_for(reader.readuntil(b"\r\n"), GIVE_UP)).split()[1])


async def flood(server, engine, address, count):
    """Fill the places, and send requests that are refused."""
    engine.script = silent
    for _ in range(2):
        await send(server, address)
    await reached(lambda: len(engine.running) == 2)
    return [await send(server, address) for _ in range(count)]


async def test_a_client_alone_gets_every_refusal_at_once(server, engine):
    refused = await flood(server, engine, "127.0.0.2", AT_ONCE + 8)
    assert [await status(reader) for reader, _ in refused] == [429] * (AT_ONCE + 8)


async def test_another_client_is_answered_while_refusals_are_held_and_held_requests_have_no_place(
    server, engine
):
    engine.script = silent
    _, writer = await send(server, "127.0.0.3")
    await reached(lambda: engine.running)
    writer.close()
    await reached(lambda: not engine.running)

    refused = await flood(server, engine, "127.0.0.2", AT_ONCE + 8)
    assert [await status(reader) for reader, _ in refused[:AT_ONCE]] == [429] * AT_ONCE
    await send(server, "127.0.0.3")  # above the limit, within its share
    await reached(lambda: len(engine.running) == 3)
    late, _ = refused[-1]
    assert late.at_eof() is False
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(late.read(1), 0.1)
