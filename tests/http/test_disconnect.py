"""A client that disconnects ends its request, in every phase, on a real socket.

Each test asserts that within a second the engine has aborted the request and the request holds nothing any more.
"""

import asyncio
import contextlib
import json

import pytest

from server.engine.core.request import FinishReason
from server.http.transport import HTTP11Protocol, connection
from tests.http.fakes import event, put, say
from tests.http.serving import Server, head, read_reply
from tests.waiting import GIVE_UP

pytestmark = pytest.mark.anyio

PATHS = ("/generate", "/generate_stream")


@pytest.fixture(params=[True, False], ids=["uvloop-httptools", "asyncio-h11"])
def fast(request):
    """Both combinations of event loop and HTTP parser that uvicorn is used with."""
    return request.param


@pytest.fixture
def anyio_backend(fast):
    return "asyncio", {"use_uvloop": fast}


@pytest.fixture
async def server(fast, make_app):
    async with Server(make_app(), HTTP11Protocol if fast else "h11") as server:
        yield server


async def within_a_second(condition):
    async with asyncio.timeout(GIVE_UP):
        while not condition():  # noqa: ASYNC110 - no event signals that the server's state has changed
            await asyncio.sleep(0.005)


async def assert_nothing_is_held(server, engine, outcome, path):
    await within_a_second(lambda: not engine.running)
    reader, writer = await server.connect()
    wanted = (
        f'tessera_requests_total{{endpoint="{path[1:]}",outcome="{outcome}"}} 1.0',
        "tessera_requests_in_flight 0.0",
    )
    async with asyncio.timeout(GIVE_UP):
        while True:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n")
            text = await read_reply(reader)
            if all(line in text for line in wanted):
                break
            await asyncio.sleep(0.01)
    writer.close()


def hang(engine):
    """Make requests wait for ever in the engine; return an event that is set when one does."""
    hangs = asyncio.Event()

    async def script(_engine, _request, _stream):
        hangs.set()
        await asyncio.Event().wait()

    engine.script = script
    return hangs


@pytest.mark.parametrize("path", PATHS)
async def test_a_disconnect_in_the_queue_aborts_the_request(server, engine, path):
    submitted = hang(engine)
    _, writer = await server.post(path)
    await submitted.wait()

    writer.close()

    await asyncio.wait_for(engine.abort_seen.wait(), GIVE_UP)
    await assert_nothing_is_held(server, engine, "abort", path)


@pytest.mark.parametrize("path", PATHS)
async def test_a_disconnect_during_prefill_aborts_the_request(server, engine, path):
    started = asyncio.Event()

    async def script(_engine, _request, stream):
        stream.queue_seconds = 0.01
        started.set()
        await asyncio.Event().wait()

    engine.script = script
    _, writer = await server.post(path)
    await started.wait()

    writer.transport.abort()  # a reset, not an orderly close

    await asyncio.wait_for(engine.abort_seen.wait(), GIVE_UP)
    await assert_nothing_is_held(server, engine, "abort", path)


@pytest.mark.parametrize("path", PATHS)
async def test_a_disconnect_during_decode_aborts_the_request(server, engine, path):
    generated = asyncio.Event()

    async def script(_engine, request, stream):
        for n in range(1000):
            put(stream, event(n % 200))
            if n == 5:
                generated.set()
            await asyncio.sleep(0.005)

    engine.script = script
    _, writer = await server.post(path)
    await generated.wait()

    writer.close()

    await asyncio.wait_for(engine.abort_seen.wait(), GIVE_UP)
    await assert_nothing_is_held(server, engine, "abort", path)


async def test_a_disconnect_frees_a_finished_stream_that_was_not_read(server, engine):
    finished = asyncio.Event()

    async def script(_engine, _request, stream):
        for _ in range(200):
            put(stream, *[event(1)] * 500)
            await asyncio.sleep(0)
        put(stream, event(1, FinishReason.LENGTH))
        finished.set()

    engine.script = script
    _, writer = await server.post("/generate_stream", receive_buffer=4096)
    await finished.wait()
    await asyncio.sleep(0.05)

    writer.transport.abort()

    await assert_nothing_is_held(server, engine, "abort", "/generate_stream")


async def test_a_finished_reply_that_was_not_read_holds_nothing(server, engine, tokenizer):
    tokens = tokenizer.encode("x" * 60_000)
    engine.script = say(tokens, FinishReason.LENGTH, together=True)
    body = {"inputs": "x", "parameters": {"details": True}}
    reader, writer = await server.post("/generate", body, receive_buffer=4096)
    await reader.readexactly(100)

    await within_a_second(lambda: not engine.running)

    writer.transport.abort()
    await assert_nothing_is_held(server, engine, "length", "/generate")


@pytest.mark.parametrize("path", PATHS)
async def test_a_disconnect_while_the_body_is_sent_submits_nothing(server, engine, path):
    _, writer = await server.connect()
    writer.write(head(path, 1000) + b'{"inputs": ')
    await writer.drain()
    await asyncio.sleep(0.02)

    writer.close()

    await assert_nothing_is_held(server, engine, "abort", path)
    assert engine.requests == []


@pytest.mark.parametrize("path", PATHS)
async def test_a_disconnect_during_tokenization_aborts_the_request(
    server, engine, tokenizer, monkeypatch, path
):
    import threading

    tokenizing, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(text):
        loop.call_soon_threadsafe(tokenizing.set)
        may_end.wait(GIVE_UP)
        return [1, 2, 3]

    monkeypatch.setattr(type(tokenizer), "encode", lambda _self, text, _special: slow(text))
    engine.script = say([1] * 50, FinishReason.LENGTH, wait=0.02)
    body = {"inputs": "x" * 5000, "parameters": {"truncate": 100}}
    _, writer = await server.post(path, body)
    await asyncio.wait_for(tokenizing.wait(), GIVE_UP)

    writer.close()
    await asyncio.sleep(0.02)
    may_end.set()

    await assert_nothing_is_held(server, engine, "abort", path)


async def test_every_sequence_of_a_request_is_aborted(server, engine):
    submitted = asyncio.Event()

    async def script(_engine, request, _stream):
        if request.request_id == 2:
            submitted.set()
        await asyncio.Event().wait()

    engine.script = script
    body = {"inputs": "x", "parameters": {"best_of": 2, "do_sample": True}}
    _, writer = await server.post("/generate", body)
    await submitted.wait()

    writer.close()

    await assert_nothing_is_held(server, engine, "abort", "/generate")
    assert sorted(engine.aborted) == [1, 2]


async def test_disconnects_at_random_times_leave_nothing_in_flight(server, engine):
    import random

    engine.script = say([1] * 30, FinishReason.LENGTH, wait=0.001)
    rng = random.Random(5)

    async def client():
        _, writer = await server.post(rng.choice(PATHS))
        await asyncio.sleep(rng.random() * 0.04)
        writer.transport.abort()

    for _ in range(10):
        await asyncio.gather(*(client() for _ in range(20)))

    await within_a_second(lambda: not engine.running)
    reader, writer = await server.connect()
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n")
    assert "tessera_requests_in_flight 0.0" in await read_reply(reader)
    writer.close()


async def test_a_body_over_the_limit_is_refused_before_it_is_sent(server, engine):
    reader, writer = await server.connect()
    writer.write(head("/generate", 50_000_000))
    await writer.drain()

    reply = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), GIVE_UP)).decode().lower()

    assert reply.startswith("http/1.1 413")
    assert "connection: close" in reply
    body = json.loads(await reader.read())
    assert body == {
        "error": "the request body must have at most 2000000 bytes. Given: 50000000",
        "error_type": "body_too_large",
    }
    writer.close()


async def test_a_chunked_body_is_refused_at_the_limit(server, engine):
    reader, writer = await server.connect()
    writer.write(
        b"POST /generate HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    sent = 0
    with contextlib.suppress(ConnectionError):
        for _ in range(500):
            writer.write(b"186a0\r\n" + b"x" * 100_000 + b"\r\n")
            await writer.drain()
            sent += 100_000

    assert sent < 50_000_000
    with contextlib.suppress(ConnectionError):
        reply = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), GIVE_UP)).decode()
        assert reply.startswith("HTTP/1.1 413")
    writer.close()


async def test_several_requests_share_a_connection(server, engine, tokenizer):
    engine.script = say(tokenizer.encode("Hi"), FinishReason.LENGTH)
    reader, writer = await server.connect()
    content = b'{"inputs": "x"}'

    for body in (content, b"{", content):
        writer.write(head("/generate", len(body)) + body)
        reply = json.loads(await read_reply(reader))
        assert ("error" in reply) == (body == b"{")
    writer.close()


async def answer(_engine, _request, stream):
    await asyncio.sleep(0.2)
    put(stream, event(1))
    put(stream, event(2, FinishReason.LENGTH))


@pytest.fixture
async def ours(fast, make_app):
    """A server with our protocol on both event loops."""
    async with Server(make_app(), HTTP11Protocol) as server:
        yield server


async def half_closed(server, path, version="1.1", times=1, fields=""):
    """Send a request, close the side of the connection that sends, and return all that comes."""
    body = json.dumps({"inputs": "w1 w2", "parameters": {"max_new_tokens": 2}})
    request = (
        f"POST {path} HTTP/{version}\r\nHost: test\r\nContent-Type: application/json\r\n{fields}"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )
    reader, writer = await server.connect()
    writer.write(request.encode() * times)
    writer.write_eof()
    try:
        return (await asyncio.wait_for(reader.read(), 60)).decode()
    finally:
        writer.close()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_closed_its_sending_side_is_answered(ours, engine, path, version):
    engine.script = answer

    text = await half_closed(ours, path, version)

    text = text.removeprefix("HTTP/1.1 100 Continue\r\n\r\n")
    assert text.startswith("HTTP/1.1 200 OK\r\n")
    assert "generated_text" in text
    assert not engine.abort_seen.is_set()


async def test_all_pipelined_requests_of_such_a_client_are_answered(ours, engine):
    engine.script = answer

    text = await half_closed(ours, "/generate", times=3)

    assert text.count("HTTP/1.1 200 OK\r\n") == 3
    assert text.count("generated_text") == 3


async def test_a_refusal_reaches_a_client_that_closed_its_sending_side(ours):
    assert "HTTP/1.1 404" in await half_closed(ours, "/nothing")


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_closes_its_sending_side_and_leaves_is_noticed(
    ours, engine, path, monkeypatch
):
    monkeypatch.setattr(connection, "_ASK_SECONDS", 0.1)
    started = hang(engine)
    _, writer = await ours.post(path)
    await started.wait()
    writer.write_eof()
    await asyncio.sleep(0.05)

    writer.transport.abort()

    await asyncio.wait_for(engine.abort_seen.wait(), GIVE_UP)
    await assert_nothing_is_held(ours, engine, "abort", path)


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_is_noticed_on_each_event_loop(ours, engine, path):
    started = hang(engine)
    _, writer = await ours.post(path)
    await started.wait()

    writer.close()

    await asyncio.wait_for(engine.abort_seen.wait(), GIVE_UP)
    await assert_nothing_is_held(ours, engine, "abort", path)


async def test_an_unfinished_request_whose_client_sends_no_more_is_closed(ours, engine):
    reader, writer = await ours.connect()
    writer.write(b"POST /generate HTTP/1.1\r\nHost: test\r\nContent-Length: 100\r\n\r\n{")
    writer.write_eof()

    assert await asyncio.wait_for(reader.read(), 60) == b""
    assert not engine.running
    writer.close()
