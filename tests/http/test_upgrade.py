"""A request that offers to upgrade the connection is served as HTTP/1.1, on a real socket."""

import json

import pytest

from server.http.transport import HTTP11Protocol
from tests.http.serving import Server, read_reply

pytestmark = pytest.mark.anyio

BODY = json.dumps({"inputs": "hello"}).encode()
H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
OFFERS = {
    "h2c": H2C,
    "websocket": "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n",
    "two offers": H2C + "Upgrade: websocket\r\n",
}


def request(fields, body=BODY):
    head = f"POST /generate HTTP/1.1\r\nHost: test\r\n{fields}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.fixture
async def connection(make_app):
    async with Server(make_app(), HTTP11Protocol) as server:
        reader, writer = await server.connect()
        yield reader, writer
        writer.close()


@pytest.mark.parametrize("fields", OFFERS.values(), ids=OFFERS)
@pytest.mark.parametrize("size", [10**6, 40, 1], ids=["at once", "in parts", "in bytes"])
async def test_the_body_is_read_and_the_connection_is_reused(connection, fields, size):
    reader, writer = connection
    data = 2 * request(fields) + request("")
    for first in range(0, len(data), size):
        writer.write(data[first : first + size])
        await writer.drain()

    for _ in range(3):
        assert "generated_text" in json.loads(await read_reply(reader))


async def test_a_chunked_body_is_read(connection):
    reader, writer = connection
    head = f"POST /generate HTTP/1.1\r\nHost: test\r\n{H2C}Transfer-Encoding: chunked\r\n\r\n"
    writer.write(head.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))

    assert "generated_text" in json.loads(await read_reply(reader))


@pytest.mark.parametrize(
    "data",
    [b"CONNECT test:80 HTTP/1.1\r\nHost: test\r\n\r\n", request(H2C)[:-1] + b"x\0" + request(H2C)],
    ids=["CONNECT", "after a request"],
)
async def test_what_is_no_request_is_rejected(connection, data):
    reader, writer = connection
    writer.write(data)

    assert b"HTTP/1.1 400 Bad Request" in await reader.read()
