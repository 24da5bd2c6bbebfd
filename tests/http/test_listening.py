"""Accepted connections send small writes immediately, with every event loop."""

import asyncio
import socket

import pytest

from server.cli.listening import listen, local_hosts
from tests.waiting import GIVE_UP


@pytest.mark.parametrize("count", [1, 2])
def test_a_listener_reports_tcp_as_its_protocol(count):
    for listener in listen("127.0.0.1", 0, count):
        assert listener.proto == socket.IPPROTO_TCP
        listener.close()


def test_accepted_connections_have_no_delay_set():
    async def accept():
        seen = asyncio.get_running_loop().create_future()

        async def serve(_, writer):
            accepted = writer.get_extra_info("socket")
            seen.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        (listener,) = listen("127.0.0.1", 0)
        server = await asyncio.start_server(serve, sock=listener)
        _, writer = await asyncio.open_connection(*listener.getsockname())
        no_delay = await asyncio.wait_for(seen, GIVE_UP)
        writer.close()
        server.close()
        return no_delay

    assert asyncio.run(accept()) != 0


@pytest.mark.parametrize(
    ("host", "hosts"),
    [
        ("127.0.0.1", ("localhost", "127.0.0.1", "[::1]")),
        ("localhost", ("localhost", "127.0.0.1", "[::1]")),
        ("127.0.0.2", ("localhost", "127.0.0.1", "[::1]", "127.0.0.2")),
        ("0.0.0.0", ()),  # noqa: S104 - the case
    ],
)
def test_a_service_on_a_loopback_address_is_reached_by_the_names_of_this_machine(host, hosts):
    (listener,) = listen(host, 0)

    assert local_hosts(host, listener) == hosts
    listener.close()
