"""Requests that arrive together start one after the other, and the event loop runs other callbacks in between."""

import asyncio
import contextlib
import itertools
import socket

import pytest

from server.http.edge.fair_start import FairStart
from server.http.edge.probes import HEALTH_PATHS
from tests.http.serving import Server, head
from tests.waiting import GIVE_UP

pytestmark = pytest.mark.anyio

HTTP = {"type": "http", "path": "/generate"}


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request):
    return "asyncio", {"use_uvloop": request.param}


class App:
    """Records which requests have started; they end when `may_end` is set."""

    def __init__(self):
        self.begun = []
        self.may_end = asyncio.Event()
        self.fair_start = FairStart(self, lambda scope: scope.get("from", ""))

    async def __call__(self, scope, receive, send):
        self.begun.append(receive)
        await self.may_end.wait()

    def arrive(self, *names, scope=HTTP):
        """Start requests in the same pass of the loop."""
        return [asyncio.ensure_future(self.fair_start(scope, name, None)) for name in names]


async def passes(count):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_simultaneous_requests_start_one_by_one_in_order_of_arrival():
    app = App()
    requests = app.arrive(*"abcde")
    seen = []
    while len(app.begun) < 5:
        await passes(1)
        seen.append(len(app.begun))

    assert app.begun == list("abcde")
    # Never two in one pass, and between two starts there are passes without one.
    assert max(after - before for before, after in itertools.pairwise(seen)) == 1
    assert all(seen.count(n) >= 5 for n in range(1, 5))
    app.may_end.set()
    await asyncio.gather(*requests)


async def test_single_requests_start_immediately():
    app = App()
    for name in "ab":
        app.arrive(name)
        await passes(1)

        assert app.begun[-1] == name
        await passes(5)
    app.may_end.set()


async def test_other_callbacks_run_between_the_starts_of_two_requests():
    app = App()
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    loop.add_reader(ours, lambda: (ours.recv(100), app.begun.append("tokens")))
    requests = app.arrive(*"abcdef")
    await passes(1)
    theirs.send(b"a step's tokens")
    while len(app.begun) < 7:
        await passes(1)

    assert app.begun.index("tokens") <= 3
    loop.remove_reader(ours)
    ours.close()
    theirs.close()
    app.may_end.set()
    await asyncio.gather(*requests)


@pytest.mark.parametrize("after", range(9))
async def test_a_cancelled_request_does_not_delay_or_block_others(after):
    app = App()
    first, second, third = app.arrive(*"abc")
    await passes(after)
    second.cancel()
    await passes(20)

    assert app.begun[0] == "a"
    assert app.begun[-1] == "c"
    app.may_end.set()
    await asyncio.gather(first, third)
    (last,) = app.arrive("d")
    await asyncio.wait_for(last, GIVE_UP)


async def test_a_cancelled_request_that_waits_does_not_bring_the_next_start_forward():
    app = App()
    requests = app.arrive(*"abc")
    await passes(1)
    requests[1].cancel()
    await passes(3)

    assert app.begun == ["a"]
    app.may_end.set()
    await asyncio.gather(*requests, return_exceptions=True)


@pytest.mark.parametrize(
    "scope",
    [{"type": "lifespan"}, *({"type": "http", "path": path} for path in sorted(HEALTH_PATHS))],
    ids=lambda scope: scope.get("path", scope["type"]),
)
async def test_health_checks_and_other_kinds_of_connection_do_not_wait(scope):
    app = App()
    app.arrive("a", "b")
    app.arrive("check", scope=scope)
    await passes(1)

    assert app.begun == ["a", "check"]
    app.may_end.set()


async def test_a_health_check_behind_a_burst_of_connections_does_not_wait_for_all_of_them():
    begun, is_done = [], asyncio.Event()
    burst = 200

    async def app(scope, receive, send):
        begun.append(scope["path"])
        if len(begun) > burst:
            is_done.set()
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
        )
        await send({"type": "http.response.body"})

    async with Server(app) as server:
        with contextlib.ExitStack() as clients:
            for path in ["/generate"] * burst + ["/health"]:
                # Blocks the loop: all of them are in the queue of the listening socket before one is accepted.
                client = socket.create_connection(("127.0.0.1", server.port))
                clients.enter_context(client).sendall(head(path, 0))
            await asyncio.wait_for(is_done.wait(), GIVE_UP)

    assert begun.index("/health") < burst / 2


async def test_requests_of_different_clients_start_by_turns():
    app = App()
    app.arrive(*"abcd", scope=HTTP | {"from": "flood"})
    app.arrive("other", scope=HTTP | {"from": "other"})
    await passes(40)

    assert app.begun == ["a", "b", "other", "c", "d"]
    app.may_end.set()
