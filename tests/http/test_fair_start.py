"""Requests that come together begin one after the other, and what else the event loop has to do comes in between."""

import asyncio
import itertools
import socket

import pytest

from server.http.fair_start import FairStart

pytestmark = pytest.mark.anyio

HTTP = {"type": "http"}


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request):
    return "asyncio", {"use_uvloop": request.param}


class App:
    """Notes which requests begin; they end when they are told."""

    def __init__(self):
        self.begun = []
        self.may_end = asyncio.Event()
        self.fair_start = FairStart(self)

    async def __call__(self, scope, receive, send):
        self.begun.append(receive)
        await self.may_end.wait()

    def arrive(self, *names, scope=HTTP):
        """Start requests in the same pass of the loop."""
        return [asyncio.ensure_future(self.fair_start(scope, name, None)) for name in names]


async def passes(count):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_of_a_crowd_one_begins_at_a_time_in_the_order_of_arrival():
    app = App()
    requests = app.arrive(*"abcde")
    seen = []
    while len(app.begun) < 5:
        await passes(1)
        seen.append(len(app.begun))

    assert app.begun == list("abcde")
    # Never two in a pass, and there is a pass between that begins none.
    assert max(after - before for before, after in itertools.pairwise(seen)) == 1
    assert all(seen.count(n) >= 2 for n in range(1, 5))
    app.may_end.set()
    await asyncio.gather(*requests)


async def test_a_lone_request_begins_at_once_and_so_does_the_next():
    app = App()
    for name in "ab":
        app.arrive(name)
        await passes(1)

        assert app.begun[-1] == name
        await passes(2)
    app.may_end.set()


async def test_what_is_ready_meanwhile_comes_between_two_requests():
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


@pytest.mark.parametrize("after", [0, 1, 2, 3])
async def test_a_request_that_is_given_up_takes_nobody_s_turn(after):
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
    await asyncio.wait_for(last, 5)


async def test_other_kinds_of_connection_do_not_wait():
    app = App()
    app.arrive("a", "b")
    app.arrive("lifespan", scope={"type": "lifespan"})
    await passes(1)

    assert app.begun == ["a", "lifespan"]
    app.may_end.set()
