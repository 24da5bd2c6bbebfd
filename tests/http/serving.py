"""Serves an application on a real socket; minimal HTTP helpers to send requests and read replies as bytes."""

import asyncio
import json
import socket

import uvicorn

from server.http.config import HTTPConfig
from server.http.serving import with_middleware
from server.http.transport import HTTP11Protocol, protocol_factory


class Server:
    """uvicorn on a loopback port, in the test's own event loop.

    `limits` are fields of `HTTPConfig` for `HTTP11Protocol`.
    """

    def __init__(self, app, implementation=HTTP11Protocol, send_buffer=None, **limits):
        if implementation is HTTP11Protocol:
            implementation = protocol_factory(HTTPConfig(model_id="test", **limits))
        config = uvicorn.Config(
            with_middleware(app),
            http=implementation,
            lifespan="off",
            log_config=None,
            access_log=False,
        )
        self._server = uvicorn.Server(config)
        self._writers = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        if send_buffer:  # connections inherit it
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.port = self._socket.getsockname()[1]

    async def __aenter__(self):
        # The same as `uvicorn.Server.serve`, but without replacing the test run's signal handlers.
        self._server.config.load()
        self._server.lifespan = self._server.config.lifespan_class(self._server.config)
        await self._server.startup(sockets=[self._socket])
        return self

    async def __aexit__(self, *exception):
        for writer in self._writers:
            writer.transport.abort()
        self._server.force_exit = True
        await self._server.shutdown(sockets=[self._socket])

    @property
    def connections(self):
        return self._server.server_state.connections

    async def connect(self, receive_buffer=None, address=None):
        sock = socket.socket()
        if address is not None:
            sock.bind((address, 0))
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
        self._writers.append(writer)
        return reader, writer

    async def post(self, path, body=None, **options):
        reader, writer = await self.connect(**options)
        content = json.dumps(body or {"inputs": "hello"}).encode()
        writer.write(head(path, len(content)) + content)
        await writer.drain()
        return reader, writer


def head(path, length):
    return (
        f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


async def read_reply(reader):
    text = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(text.split("content-length: ")[1].split("\r\n")[0])
    return (await reader.readexactly(length)).decode()
