"""Limits of one connection: sizes of heads, times, and what is kept of requests that nobody reads, on real sockets."""

import asyncio
import contextlib
import json

import pytest

from server.engine.core.request import FinishReason
from server.http.transport import connection as connection_module
from tests.http.fakes import event, put, say, silent
from tests.http.serving import Server, head, read_reply
from tests.waiting import GIVE_UP

pytestmark = pytest.mark.anyio

GET = b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n"
START = b"GET /health HTTP/1.1\r\nHost: t\r\n"
CHUNKED = (
    b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
BODY = b'{"inputs": "x"}'


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def open_server(make_app):
    """Opens servers with the given limits."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_one(**limits):
            return await stack.enter_async_context(Server(make_app(**limits), **limits))

        yield open_one


async def exchange(server, *parts):
    """Send parts of bytes, a moment apart, and return everything that comes until the end of the connection."""
    reader, writer = await server.connect()
    reading = asyncio.ensure_future(read_all(reader))
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.002)
    data = await asyncio.wait_for(reading, GIVE_UP)
    writer.close()
    return data


async def read_all(reader):
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(65536):
            data += part
    return data


def statuses(data):
    return [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize(
    ("status", "parts"),
    {
        "url": (414, [b"GET /" + b"x" * 2000 + b" HTTP/1.1\r\nHost: t\r\n\r\n"]),
        "url in parts": (414, [b"GET /", *[b"x" * 900] * 20]),
        "query": (414, [b"GET /health?" + b"x" * 2000 + b" HTTP/1.1\r\nHost: t\r\n\r\n"]),
        "one header": (431, [START + b"X: " + b"x" * 5000 + b"\r\n\r\n"]),
        "one header in parts": (431, [START + b"X: ", *[b"x" * 900] * 20]),
        "name of a header in parts": (431, [START, *[b"x" * 900] * 20]),
        "many headers": (431, [START + b"".join(b"X%d: x\r\n" % n for n in range(20)) + b"\r\n"]),
        "trailer in parts": (431, [CHUNKED + b"0\r\nX: ", *[b"x" * 900] * 20]),
        "trailers": (431, [CHUNKED + b"0\r\n", *[b"X: " + b"x" * 900 + b"\r\n"] * 20]),
        "extension of a chunk": (431, [CHUNKED + b"1;x=", *[b"x" * 900] * 20]),
        "second request": (431, [GET, START + b"X: ", *[b"x" * 900] * 20]),
        "offer to upgrade": (
            431,
            [START + b"Connection: Upgrade\r\nUpgrade: h2c\r\nX: ", *[b"x" * 900] * 20],
        ),
    }.values(),
    ids=lambda value: None if isinstance(value, int) else "",
)
async def test_heads_and_framing_are_limited(open_server, status, parts):
    server = await open_server(max_header_bytes=4096, max_header_count=16, max_url_bytes=1024)

    data = await exchange(server, *parts)

    assert statuses(data)[-1] == status
    assert b"connection: close" in data.lower()


async def test_a_head_below_the_limits_is_served(open_server):
    server = await open_server(max_header_bytes=4096, max_header_count=16, max_url_bytes=1024)
    fields = b"".join(b"X%d: %b\r\n" % (n, b"x" * 240) for n in range(14))
    url = b"/health?" + b"x" * 1000

    data = await exchange(
        server, b"GET %b HTTP/1.1\r\nHost: t\r\nConnection: close\r\n%b\r\n" % (url, fields)
    )

    assert statuses(data) == [200]


async def test_trailers_do_not_become_headers(open_server, engine):
    server = await open_server(api_key=("key",))
    chunks = b"%x\r\n%b\r\n0\r\nX-API-Key: key\r\n\r\n" % (len(BODY), BODY)

    reader, writer = await server.connect()
    writer.write(CHUNKED + chunks)

    assert "unauthorized" in await read_reply(reader)
    writer.close()


async def test_a_body_in_chunks_of_one_byte_is_read(open_server, engine):
    server = await open_server(max_header_bytes=1024, max_url_bytes=64)
    body = b'{"inputs":' + b" " * 2000 + b'"' + b"x" * 100 + b'"}'  # more than a head may have
    engine.script = say([72], FinishReason.LENGTH)

    reader, writer = await server.connect()
    writer.write(CHUNKED)
    for byte in body:
        writer.write(b"1\r\n%c\r\n" % byte)
        if byte == ord("x"):
            await asyncio.sleep(0)
    writer.write(b"0\r\n\r\n")

    assert "generated_text" in await read_reply(reader)
    [request] = engine.requests
    assert len(request.prompt_token_ids) == 100
    writer.close()


@pytest.mark.parametrize(
    ("sent", "answer"), [(b"", []), (b"\r\n\r\n", []), (b"G", [408]), (START, [408])]
)
async def test_a_head_that_does_not_come_is_not_waited_for(open_server, sent, answer):
    server = await open_server(header_timeout=0.1)
    loop = asyncio.get_running_loop()
    start = loop.time()

    data = await exchange(server, sent)

    assert statuses(data) == answer
    assert loop.time() - start > 0.08


async def test_a_head_that_comes_byte_by_byte_is_not_waited_for(open_server):
    server = await open_server(header_timeout=0.1)

    data = await exchange(server, *[b"%c" % byte for byte in START + b"X: " + b"x" * 150])

    assert statuses(data) == [408]


async def test_a_connection_without_requests_is_closed(open_server):
    server = await open_server(keep_alive_timeout=0.1)
    loop = asyncio.get_running_loop()
    start = loop.time()

    data = await exchange(server, GET)

    assert statuses(data) == [200]
    assert b"connection: close" not in data.lower()
    assert loop.time() - start > 0.08


async def test_a_request_that_runs_longer_than_the_timeouts_is_answered(open_server, engine):
    server = await open_server(header_timeout=0.05, keep_alive_timeout=0.05)
    engine.script = say([72] * 4, FinishReason.LENGTH, wait=0.06)
    reader, writer = await server.post("/generate")

    assert "generated_text" in await asyncio.wait_for(read_reply(reader), GIVE_UP)
    writer.close()


@pytest.mark.parametrize("path", ["/generate_stream", "/generate"])
async def test_a_client_that_accepts_no_bytes_is_disconnected(make_app, engine, tokenizer, path):
    async def script(_engine, _request, stream):
        for n in range(400):
            put(stream, *[event(n % 200)] * 100)
            await asyncio.sleep(0)
        put(stream, event(1, FinishReason.LENGTH))
        if path == "/generate_stream":
            await asyncio.Event().wait()

    engine.script = script
    body = {"inputs": "x", "parameters": {"details": True}}
    limits = {"send_timeout_seconds": 0.2}
    async with Server(make_app(), send_buffer=8192, **limits) as server:
        _, writer = await server.connect(receive_buffer=4096)
        content = json.dumps(body).encode()
        writer.write(head(path, len(content)) + content)
        await asyncio.sleep(0.01)
        writer.transport.pause_reading()

        async with asyncio.timeout(GIVE_UP):
            while server.connections:  # noqa: ASYNC110 - no event signals it
                await asyncio.sleep(0.02)
        writer.transport.abort()


async def test_a_slow_client_that_accepts_bytes_is_not_disconnected(make_app, engine):
    tokens = 3000

    async def script(_engine, _request, stream):
        put(stream, *[event(72)] * (tokens - 1))
        put(stream, event(72, FinishReason.LENGTH))

    engine.script = script
    async with Server(make_app(), send_buffer=8192, send_timeout_seconds=0.2) as server:
        reader, writer = await server.post("/generate_stream", receive_buffer=4096)
        data = b""
        while b"0\r\n\r\n" not in data[-10:]:
            data += await reader.read(4000)
            await asyncio.sleep(0.005)
        writer.close()

    assert data.count(b"data:") == tokens


async def test_an_unread_body_is_kept_up_to_a_bound(anyio_backend):
    arrived, may_end = asyncio.Event(), asyncio.Event()
    kept = []

    async def app(scope, receive, send):
        arrived.set()
        await may_end.wait()
        kept.append(receive.__self__.buffered)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with Server(app) as server:
        _, writer = await server.connect()
        writer.write(head("/", 50_000_000) + b"x" * 10_000_000)
        await arrived.wait()
        await asyncio.sleep(0.1)
        may_end.set()
        await asyncio.sleep(0.02)
        writer.transport.abort()

    assert 0 < kept[0] <= connection_module.MAX_BUFFERED_BODY + 256_000


@pytest.mark.parametrize("size", [1000, 10_000_000])
async def test_an_unread_body_is_skipped_or_ends_the_connection(anyio_backend, monkeypatch, size):
    monkeypatch.setattr(connection_module, "_LINGER_SECONDS", 0.2)

    async def app(scope, _receive, send):
        status = 200 if scope["method"] == "GET" else 429
        fields = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": b"ok"})

    async with Server(app, header_timeout=1) as server:
        reader, writer = await server.connect()
        writer.write(head("/", size))
        answer = await reader.readuntil(b"\r\n\r\nok")
        with contextlib.suppress(ConnectionError):
            writer.write(b"x" * size + GET)
            await asyncio.wait_for(writer.drain(), GIVE_UP)
        rest = await asyncio.wait_for(read_some(reader), GIVE_UP)
        writer.close()

    assert statuses(answer) == [429]
    assert (b"connection: close" in answer) is (size > 1000)
    assert statuses(rest) == ([200] if size == 1000 else [])


async def read_some(reader):
    with contextlib.suppress(ConnectionError):
        return await reader.read(1000)
    return b""


async def test_a_request_behind_a_running_one_does_not_hide_a_disconnect(open_server, engine):
    server = await open_server()
    engine.script = silent
    _, writer = await server.post("/generate")
    writer.write(head("/generate", len(BODY)) + BODY)
    writer.write(head("/generate", len(BODY)) + BODY[:5])
    async with asyncio.timeout(GIVE_UP):
        while not engine.running:  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.02)

    writer.close()

    await asyncio.wait_for(engine.abort_seen.wait(), GIVE_UP)
    await asyncio.sleep(0.02)
    assert len(engine.requests) == 1
    assert not engine.running


@pytest.mark.parametrize("body", [BODY, b'{"inputs": "' + b"x" * 100_000 + b'"}'])
async def test_too_many_requests_behind_a_running_one_are_dropped(open_server, engine, body):
    server = await open_server()
    may_end = asyncio.Event()

    async def script(_engine, _request, stream):
        await may_end.wait()
        put(stream, event(72, FinishReason.LENGTH))

    engine.script = script
    reader, writer = await server.connect()
    writer.write((head("/generate", len(BODY)) + BODY) * 2)
    writer.write((head("/generate", len(body)) + body) * 20)
    await asyncio.sleep(0.1)
    may_end.set()
    data = await asyncio.wait_for(read_all(reader), GIVE_UP)
    writer.close()

    expected = 2 if len(body) > 100_000 else 1 + connection_module.MAX_PIPELINED
    assert statuses(data) == [200] * expected
    assert data.lower().count(b"connection: close") == 1
    assert len(engine.requests) == expected


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"NONSENSE /health HTTP/1.1\r\nHost: t\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: t\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: -3\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        CHUNKED[:-2] + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /generate HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/0.9\r\n\r\n",
        b"GET /health HTTP/2.0\r\nHost: t\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : t\r\n\r\n",
        CHUNKED + b"zz\r\n",
    ],
)
async def test_malformed_requests_are_refused_and_the_connection_is_closed(open_server, request_):
    server = await open_server()

    data = await exchange(server, request_)

    assert statuses(data) == [400]


async def test_white_space_around_a_field_is_not_part_of_it(open_server, engine):
    server = await open_server(api_key=("key",))
    body = b"%b: %d \t\r\nX-API-Key: \t key \r\nX-Request-Id: a\t\r\n\r\n%b"
    start = b"POST /generate HTTP/1.1\r\nHost: t \r\nConnection: close\r\n"

    data = await exchange(server, start + body % (b"Content-Length", len(BODY), BODY))

    assert statuses(data) == [200]
    assert b"x-request-id: a\r\n" in data


async def test_malformed_requests_are_logged_together(open_server, caplog):
    server = await open_server(header_timeout=0.2)

    for _ in range(20):
        await exchange(server, b"NONSENSE\r\n\r\n")
    await asyncio.sleep(0.1)

    lines = [r.getMessage() for r in caplog.records if "malformed requests" in r.getMessage()]
    assert 1 <= len(lines) <= 2
    assert all(line.startswith("malformed requests: ") for line in lines)


async def test_a_body_is_asked_for_when_it_is_read(open_server, engine):
    server = await open_server()
    reader, writer = await server.connect()
    request = head("/generate", len(BODY))[:-2] + b"Expect: 100-continue\r\n\r\n"
    writer.write(request)

    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(BODY)

    assert "generated_text" in await read_reply(reader)
    writer.close()


async def test_a_body_that_has_arrived_is_not_asked_for(open_server, engine):
    server = await open_server()
    more = b"Expect: 100-continue\r\nConnection: close\r\n\r\n"
    request = head("/generate", len(BODY))[:-2] + more + BODY

    assert statuses(await exchange(server, request)) == [200]


@pytest.mark.parametrize(
    ("authority", "header", "status"),
    [
        (b"localhost:8000", b"evil.example", 200),
        (b"[::1]", b"evil.example", 200),
        (b"evil.example", b"localhost", 403),
    ],
)
async def test_the_host_of_an_absolute_target_takes_the_place_of_the_header(
    open_server, authority, header, status
):
    server = await open_server(allowed_hosts=("localhost", "[::1]"))

    request = b"GET http://%b/info HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n"

    assert statuses(await exchange(server, request % (authority, header))) == [status]


async def test_a_body_that_is_refused_is_not_asked_for(open_server):
    server = await open_server()
    request = head("/generate", 50_000_000)[:-2] + b"Expect: 100-continue\r\n\r\n"

    data = await exchange(server, request)

    assert statuses(data) == [413]
    assert b"connection: close" in data.lower()


async def test_http_1_0_gets_no_chunks(open_server, engine):
    server = await open_server()
    engine.script = say([72] * 3, FinishReason.LENGTH)
    request = b"POST /generate_stream HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)

    data = await exchange(server, request)

    top, _, frames = data.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in top.lower()
    assert frames.startswith(b"data:")
    assert frames.count(b"data:") == 3


async def test_a_head_request_gets_no_body(open_server):
    server = await open_server()

    data = await exchange(
        server, GET.replace(b"GET", b"HEAD") + GET[:-2] + b"Connection: close\r\n\r\n"
    )

    assert statuses(data) == [200, 200]
    first = data[: data.index(b"\r\n\r\n") + 4]
    assert data[len(first) :].startswith(b"HTTP/1.1 ")


async def test_a_response_header_cannot_contain_a_line_break(anyio_backend, caplog):
    async def app(_scope, _receive, send):
        fields = [(b"x", b"a\r\nInjected: b")]
        await send({"type": "http.response.start", "status": 200, "headers": fields})

    async with Server(app) as server:
        data = await exchange(server, GET)

    assert b"Injected" not in data
    assert "control character" in caplog.text
