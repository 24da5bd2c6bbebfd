"""Connections deliver every message in order, independent of the timing of the two sides."""

import asyncio
import contextlib
import errno
import math
import socket
import threading
import time

import pytest

from server.engine.link.sockets import Connection
from tests.waiting import GIVE_UP

LARGE = b"large" * 10**6
"""More than the system takes at once."""


@contextlib.contextmanager
def connected(**limits):
    ours, theirs = socket.socketpair()
    with (
        contextlib.closing(Connection(ours.detach(), **limits)) as parent,
        contextlib.closing(Connection(theirs.detach())) as child,
    ):
        yield parent, child


@pytest.fixture
def sides():
    with connected() as (parent, child):
        yield parent, child


def received(connection, count):
    found = []
    while len(found) < count:
        batch = list(connection.receive(wait=60))
        assert batch, "nothing came for a minute"
        found += batch
    return found


def numbers(count):
    return [str(i).encode() for i in range(count)]


def test_messages_from_before_and_after_attaching_arrive_in_order_and_in_small_batches(sides):
    parent, child = sides
    batches = []

    async def scenario():
        for data in numbers(300)[:200]:
            child.send(data)
        await asyncio.sleep(0.1)
        parent.attach(asyncio.get_running_loop(), batches.append)
        for data in numbers(300)[200:]:
            child.send(data)
        async with asyncio.timeout(GIVE_UP):
            while sum(map(len, batches)) < 300:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.01)

    asyncio.run(scenario())

    assert [data for batch in batches for data in batch] == numbers(300)
    assert max(map(len, batches)) <= 64


def test_a_handler_that_raises_does_not_stop_later_messages(sides):
    parent, child = sides
    batches, errors = [], []

    def handle(batch):
        batches.append(batch)
        if len(batches) == 1:
            raise ValueError("the first batch")

    async def scenario():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        for data in numbers(200):
            child.send(data)
        await asyncio.sleep(0.1)
        parent.attach(asyncio.get_running_loop(), handle)
        async with asyncio.timeout(GIVE_UP):
            while sum(map(len, batches)) < 200:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.01)

    asyncio.run(scenario())

    assert len(errors) == 1


def test_a_child_that_flushes_and_closes_has_sent_all_its_messages(sides):
    parent, child = sides
    messages = [*numbers(100), LARGE, b"last"]
    for data in messages:
        child.send(data)
    found = []
    reader = threading.Thread(target=lambda: found.extend(received(parent, 102)))
    reader.start()
    child.flush(math.inf)
    child.close()
    reader.join()

    assert found == messages


def test_receiving_without_messages_returns_after_the_wait(sides):
    parent, _ = sides

    assert list(parent.receive(wait=0)) == []
    assert list(parent.receive(wait=0.01)) == []


def test_messages_of_all_sizes_arrive_whole_and_in_order_while_the_sender_goes_on(sides):
    parent, child = sides
    messages = [b"", LARGE, b"x", *numbers(300), LARGE[:70_000], b""]

    for data in messages:
        child.send(data)  # returns although nobody reads

    assert received(parent, len(messages)) == messages
    parent.send(LARGE)
    assert received(child, 1) == [LARGE]


def test_several_threads_may_send(sides):
    parent, child = sides
    parts = [[bytes([i]) * 50_000] * 40 for i in range(4)]
    threads = [threading.Thread(target=lambda p=p: [child.send(m) for m in p]) for p in parts]
    for thread in threads:
        thread.start()

    found = received(parent, 160)

    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(data for part in parts for data in part)


def test_a_message_beyond_the_limit_is_dropped_and_later_ones_arrive(caplog):
    with connected(max_bytes=1000) as (parent, child):
        for size in (1000, 1001, 10**7, 1000):
            child.send(b"x" * size)

        assert [len(data) for data in received(parent, 2)] == [1000, 1000]
        assert list(parent.receive(wait=0)) == []
        assert len(parent._partial) < 1000
    assert "a message of 10000000 bytes; the limit is 1000" in caplog.text


def test_a_thread_that_cannot_be_started_delays_messages_only_until_the_next(sides, monkeypatch):
    parent, child = sides

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        child.send(LARGE)
    child.send(b"next")

    assert received(parent, 2) == [LARGE, b"next"]


def test_a_system_without_memory_for_a_message_delays_it(sides, monkeypatch):
    parent, child = sides
    refusals = iter(range(3))

    class Refusing:
        def __init__(self, found):
            self.found = found

        def __getattr__(self, name):
            return getattr(self.found, name)

        def sendmsg(self, *arguments):
            if next(refusals, None) is not None:
                raise OSError(errno.ENOBUFS, "no buffer space")
            return self.found.sendmsg(*arguments)

    monkeypatch.setattr(child, "_socket", Refusing(child._socket))
    child.send(b"late")
    child.send(b"later")

    assert received(parent, 2) == [b"late", b"later"]


def test_sending_to_a_peer_that_has_gone_or_on_a_closed_connection_does_nothing():
    with connected() as (parent, child):
        child.close()
        parent.send(b"x")
        parent.send(LARGE)
        parent.close()
        parent.send(b"x")
        parent.flush(math.inf)
        parent.close()


def test_what_a_peer_sent_before_it_ended_arrives_though_it_did_not_read_everything(sides):
    parent, child = sides
    parent.send(b"never read")
    child.send(b"last words")
    child.close()

    assert list(parent.receive(wait=60)) == [b"last words"]
    assert list(parent.receive(wait=0.01)) == []


def test_an_event_loop_is_not_kept_busy_by_a_peer_that_has_gone(sides):
    parent, child = sides
    batches = []

    async def scenario():
        parent.attach(asyncio.get_running_loop(), batches.append)
        child.send(b"x")
        child.close()
        began = time.process_time()
        await asyncio.sleep(0.3)
        return time.process_time() - began

    assert asyncio.run(scenario()) < 0.1
    assert batches == [[b"x"]]


def test_closing_ends_the_thread_that_writes(sides):
    parent, child = sides
    child.send(LARGE)
    (writer,) = (it for it in threading.enumerate() if it.name == "link-writer")

    child.close()
    writer.join(60)

    assert not writer.is_alive()
    assert parent is not None
