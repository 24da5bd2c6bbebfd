"""One request's events between the engine client and whoever follows them."""

import asyncio

import pytest

from server.engine.core.request import FinishReason, TokenEvent
from server.engine.link.request_stream import RequestStream

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def aborted():
    return []


@pytest.fixture
def stream(aborted):
    return RequestStream(7, aborted.append)


def put(stream, *token_ids, finish=None):
    for i, token_id in enumerate(token_ids):
        last = i == len(token_ids) - 1
        stream.push(TokenEvent(token_id=token_id, finish_reason=finish if last else None))
    stream.deliver()


def ids(events):
    return [event.token_id for event in events]


async def follow(stream, take):
    task = asyncio.ensure_future(stream.follow(take))
    await asyncio.sleep(0)
    return task


async def test_a_reader_is_called_at_once_with_all_that_came_together(stream):
    calls = []
    task = await follow(stream, lambda events: calls.append(ids(events)) or True)

    put(stream, 1)
    assert calls == [[1]]
    put(stream, 2, 3)
    assert calls == [[1], [2, 3]]
    put(stream, 4, finish=FinishReason.LENGTH)

    await asyncio.wait_for(task, 1)
    assert calls == [[1], [2, 3], [4]]


async def test_what_came_before_the_reader_is_the_first_it_gets(stream):
    calls = []
    put(stream, 1)
    put(stream, 2, finish=FinishReason.LENGTH)

    await asyncio.wait_for(stream.follow(lambda events: calls.append(ids(events)) or True), 1)

    assert calls == [[1, 2]]


async def test_a_reader_that_has_enough_leaves_the_rest_to_the_next(stream):
    calls = []
    task = await follow(stream, lambda events: calls.append(ids(events)))

    put(stream, 1)
    put(stream, 2)
    put(stream, 3, finish=FinishReason.LENGTH)

    await asyncio.wait_for(task, 1)
    assert calls == [[1]]
    await asyncio.wait_for(stream.follow(lambda events: calls.append(ids(events)) or True), 1)
    assert calls == [[1], [2, 3]]


async def test_what_a_reader_raises_is_raised_where_it_is_waited_for(stream):
    task = await follow(stream, lambda events: 1 / 0)

    put(stream, 1)

    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(task, 1)


async def test_a_reader_that_aborts_its_stream_gets_the_end_of_it(stream, aborted):
    calls = []

    def take(events):
        calls.append(ids(events))
        stream.abort()
        return True

    task = await follow(stream, take)
    put(stream, 1)

    await asyncio.wait_for(task, 1)
    assert calls == [[1], [None]]
    assert aborted == [7]


async def test_a_cancelled_reader_takes_nothing_with_it(stream):
    calls = []
    task = await follow(stream, lambda events: calls.append(ids(events)) or True)

    task.cancel()
    put(stream, 1)
    with pytest.raises(asyncio.CancelledError):
        await task

    assert calls == []
    assert ids(await anext(stream)) == [1]
