"""Delivery of the events of a request to its reader."""

import asyncio

import pytest

from server.engine.core.messages import StepMessage
from server.engine.core.request import FinishReason, SequenceUsage, TokenEvent
from server.engine.link.front_end.client import EngineHandle
from server.engine.link.front_end.request_stream import RequestStream
from tests.waiting import GIVE_UP

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def aborted():
    return []


@pytest.fixture
def stopped():
    return []


@pytest.fixture
def stream(aborted, stopped):
    return RequestStream(7, aborted.append, stopped.append)


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


async def test_a_reader_gets_events_that_arrive_together_in_one_call(stream):
    calls = []
    task = await follow(stream, lambda events: calls.append(ids(events)) or True)

    put(stream, 1)
    assert calls == [[1]]
    put(stream, 2, 3)
    assert calls == [[1], [2, 3]]
    put(stream, 4, finish=FinishReason.LENGTH)

    await asyncio.wait_for(task, GIVE_UP)
    assert calls == [[1], [2, 3], [4]]


async def test_a_new_reader_gets_earlier_events_first(stream):
    calls = []
    put(stream, 1)
    put(stream, 2, finish=FinishReason.LENGTH)

    await asyncio.wait_for(stream.follow(lambda events: calls.append(ids(events)) or True), GIVE_UP)

    assert calls == [[1, 2]]


async def test_a_reader_that_stops_leaves_the_remaining_events_to_the_next(stream):
    calls = []
    task = await follow(stream, lambda events: calls.append(ids(events)))

    put(stream, 1)
    put(stream, 2)
    put(stream, 3, finish=FinishReason.LENGTH)

    await asyncio.wait_for(task, GIVE_UP)
    assert calls == [[1]]
    await asyncio.wait_for(stream.follow(lambda events: calls.append(ids(events)) or True), GIVE_UP)
    assert calls == [[1], [2, 3]]


async def test_follow_raises_the_exception_of_the_reader(stream):
    task = await follow(stream, lambda events: 1 / 0)

    put(stream, 1)

    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(task, GIVE_UP)


async def test_a_reader_that_aborts_its_stream_gets_the_last_event(stream, aborted):
    calls = []

    def take(events):
        calls.append(ids(events))
        stream.abort()
        return True

    task = await follow(stream, take)
    put(stream, 1)

    await asyncio.wait_for(task, GIVE_UP)
    assert calls == [[1], [None]]
    assert aborted == [7]


async def test_a_cancelled_reader_loses_no_events(stream):
    calls = []
    task = await follow(stream, lambda events: calls.append(ids(events)) or True)

    task.cancel()
    put(stream, 1)
    with pytest.raises(asyncio.CancelledError):
        await task

    assert calls == []
    assert ids(await anext(stream)) == [1]


async def test_settling_a_stream_stops_the_request_and_waits_for_its_usage(
    stream, aborted, stopped
):
    usage = SequenceUsage(num_steps=5)
    put(stream, 1)
    task = asyncio.ensure_future(stream.settle())
    await asyncio.sleep(0)

    stream.abort()  # does nothing: the text is complete
    put(stream, 2)
    assert not task.done()
    stream.push(TokenEvent(token_id=None, finish_reason=FinishReason.STOP, usage=usage))
    stream.deliver()

    await asyncio.wait_for(task, GIVE_UP)
    assert stream.usage is usage
    assert (stopped, aborted) == ([7], [])


async def test_a_finished_stream_is_settled_at_once(stream, stopped):
    put(stream, 1, finish=FinishReason.LENGTH)

    await asyncio.wait_for(stream.settle(), GIVE_UP)

    assert stopped == []


async def test_streams_that_get_events_of_the_same_steps_have_the_same_time_of_delivery():
    engine, times = EngineHandle(), {}
    for request_id in (1, 2, 3):
        stream = RequestStream(request_id, engine.abort, engine.stop_request)
        engine._streams[request_id] = stream
        tasks = [await follow(stream, lambda _, s=stream: times.setdefault(s, s.delivered))]

    steps = [
        StepMessage(request_ids=[1, 2], token_ids=[7, 8], finish_reasons=[0, 0]),
        StepMessage(request_ids=[2, 3], token_ids=[7, 8], finish_reasons=[0, 3]),
    ]
    engine._deliver(steps)

    assert len(times) == 3
    assert len(set(times.values())) == 1
    await asyncio.wait_for(tasks[-1], GIVE_UP)
