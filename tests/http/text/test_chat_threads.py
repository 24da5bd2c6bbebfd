"""Conversations are rendered in threads that clients share."""

import asyncio
import threading

import pytest

from model.text.rendering.renderer import MOST_PROCESSES
from server.http.text.chat_threads import ChatThreads
from tests.waiting import reached

pytestmark = pytest.mark.anyio

ENOUGH = 60.0


@pytest.fixture
def threads():
    threads = ChatThreads()
    yield threads
    threads.close()


@pytest.fixture
def hold():
    """A function that runs until it is let go."""
    may_end, started = threading.Event(), []

    def work():
        started.append(None)
        assert may_end.wait(ENOUGH)

    work.started, work.may_end = started, may_end
    yield work
    may_end.set()


async def test_one_client_never_has_all_threads(threads, hold):
    slow = [asyncio.ensure_future(threads.run("slow", hold)) for _ in range(50)]
    await reached(lambda: len(hold.started) == MOST_PROCESSES // 2)

    async with asyncio.timeout(ENOUGH):
        assert await threads.run("other", lambda: "done") == "done"
    assert len(hold.started) == MOST_PROCESSES // 2

    hold.may_end.set()
    await asyncio.gather(*slow)
    assert len(hold.started) == 50


async def test_clients_take_turns_where_all_threads_are_in_use(threads, hold):
    order = []
    held = [asyncio.ensure_future(threads.run(f"held {i}", hold)) for i in range(MOST_PROCESSES)]
    await reached(lambda: len(hold.started) == MOST_PROCESSES)
    waiting = [
        asyncio.ensure_future(threads.run(client, lambda client=client: order.append(client)))
        for client in ["many"] * 20 + ["few"]
    ]
    await asyncio.sleep(0)
    hold.may_end.set()
    await asyncio.gather(*held, *waiting)

    assert order.index("few") <= MOST_PROCESSES


async def test_a_caller_that_is_cancelled_leaves_its_place(threads, hold):
    held = [asyncio.ensure_future(threads.run("a", hold)) for _ in range(10)]
    await reached(lambda: len(hold.started) == MOST_PROCESSES // 2)
    for task in held[MOST_PROCESSES // 2 :]:
        task.cancel()
    await asyncio.gather(*held[MOST_PROCESSES // 2 :], return_exceptions=True)
    held[0].cancel()  # its function goes on, and so does its place
    hold.may_end.set()
    await asyncio.gather(*held, return_exceptions=True)

    for _ in range(2 * MOST_PROCESSES):
        async with asyncio.timeout(ENOUGH):
            assert await threads.run("a", lambda: "done") == "done"
    await reached(lambda: not threads._clients)


async def test_an_error_of_the_function_is_the_caller_s(threads):
    def fail():
        raise KeyError("x")

    for _ in range(2 * MOST_PROCESSES):
        with pytest.raises(KeyError):
            await threads.run("a", fail)
    await reached(lambda: not threads._clients)
