"""Connections deliver every message in order, independent of the timing of the two sides."""

import asyncio
import contextlib

import pytest

from server.engine.link.sockets import Connection
from tests.waiting import GIVE_UP


@pytest.fixture
def sides(tmp_path):
    address = str(tmp_path / "1")
    with (
        contextlib.closing(Connection(address, parent=True)) as parent,
        contextlib.closing(Connection(address, parent=False)) as child,
    ):
        yield parent, child


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


def test_a_child_that_closes_has_sent_all_its_messages(sides):
    parent, child = sides
    for data in numbers(100):
        child.send(data)
    child.close(linger_ms=-1)

    received = []
    while len(received) < 100:
        received += parent.receive(wait=10)
    assert received == numbers(100)


def test_receiving_without_messages_returns_after_the_wait(sides):
    parent, _ = sides

    assert list(parent.receive(wait=0)) == []
    assert list(parent.receive(wait=0.01)) == []


def test_no_message_is_lost_that_is_sent_before_the_peer_has_connected(tmp_path):
    for i in range(20):
        address = str(tmp_path / str(i))
        with contextlib.closing(Connection(address, parent=True)) as parent:
            parent.send(b"early")
            with contextlib.closing(Connection(address, parent=False)) as child:
                child.send(b"ready")
                assert list(parent.receive(wait=30)) == [b"ready"]
                parent.send(b"at once")
                received = []
                while len(received) < 2:
                    received += child.receive(wait=30)
                assert received == [b"early", b"at once"]


def test_sending_without_a_peer_or_on_a_closed_connection_does_nothing(tmp_path):
    connection = Connection(str(tmp_path / "1"), parent=True)
    connection.send(b"x")
    connection.close()
    connection.send(b"x")
    connection.close()


def test_a_path_that_is_too_long_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="longer than"):
        Connection(str(tmp_path / ("x" * 120)), parent=True)
