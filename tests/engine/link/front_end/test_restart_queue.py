"""Requests that wait while the engine is being started again, with an engine that only records what it is sent."""

import asyncio
import time

import pytest

from model.sampling.parameters import SamplingParams
from server.engine.core.messages import AbortRequests, StepMessage
from server.engine.core.request import FinishReason, GenerateRequest
from server.engine.link.front_end.client import EngineHandle, EngineUnavailableError
from server.engine.link.protocol import AbortTarget, EngineState
from tests.waiting import GIVE_UP

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Handle(EngineHandle):
    """An engine that the test loses and starts again."""

    def __init__(self, seconds=5.0):
        super().__init__()
        self.become(EngineState.READY)
        self.restart_queue.seconds = seconds
        self.sent = []

    def _send(self, message):
        self.sent.append(message)

    def request(self, deadline=None):
        sampling = SamplingParams(max_new_tokens=4, seed=7)
        return self.submit(
            GenerateRequest(
                request_id=self.next_request_id(),
                prompt_token_ids=[1, 2],
                sampling=sampling,
                external_id="job",
                deadline=deadline,
            )
        )

    def lose(self):
        self.become(EngineState.RESTARTING)
        self._fail("lost")

    def become(self, state):
        self.reports[0].state, self.reports[0].phase = state, state.value
        self._serve_restart_queue()

    def answer(self, request_id, token_id, finish_reason=None):
        self._deliver(
            [
                StepMessage(
                    request_ids=[request_id],
                    token_ids=[token_id],
                    finish_reasons=[finish_reason],
                    logprobs={},
                )
            ]
        )


@pytest.fixture
async def engine(anyio_backend):
    return Handle()


async def collect(stream):
    return [event async for batch in stream for event in batch]


async def test_a_request_without_output_is_sent_to_the_next_engine_once(engine):
    stream = engine.request()
    engine.lose()
    engine.become(EngineState.READY)

    first, again = engine.sent
    assert again.request_id != first.request_id
    assert (again.prompt_token_ids, again.sampling) == (first.prompt_token_ids, first.sampling)
    engine.answer(first.request_id, 98)  # a late message of the engine that was lost
    engine.answer(again.request_id, 99, FinishReason.LENGTH)
    assert [event.token_id for event in await collect(stream)] == [99]


async def test_a_request_that_ends_two_engines_is_not_sent_to_a_third(engine):
    stream = engine.request()
    for _ in range(2):
        engine.lose()
        engine.become(EngineState.READY)

    assert len(engine.sent) == 2
    assert (await collect(stream))[-1].error == "lost"


@pytest.mark.parametrize("read", [False, True])
async def test_a_request_with_output_ends_with_an_error(engine, read):
    stream = engine.request()
    engine.answer(stream.request_id, 99)
    if read:
        await anext(stream)
    engine.lose()

    assert (await collect(stream))[-1].finish_reason is FinishReason.ERROR
    assert engine.restart_queue.streams == []


async def test_a_request_that_arrives_during_a_restart_waits_and_may_still_be_lost_once(engine):
    engine.lose()
    stream = engine.request()
    accepted = asyncio.create_task(stream.accepted())
    await asyncio.sleep(0)
    assert not accepted.done()
    engine.become(EngineState.READY)
    assert await accepted
    engine.lose()
    engine.become(EngineState.READY)

    assert len(engine.sent) == 2
    engine.answer(stream.request_id, 99, FinishReason.LENGTH)
    assert [event.token_id for event in await collect(stream)] == [99]


async def test_a_request_waits_for_a_limited_time():
    engine = Handle(seconds=0.05)
    lost = engine.request()
    engine.lose()
    late = engine.request()

    assert await asyncio.wait_for(late.accepted(), GIVE_UP) is False
    for stream in (lost, late):
        assert (await collect(stream))[-1].finish_reason is FinishReason.ERROR
    engine.become(EngineState.READY)
    assert len(engine.sent) == 1


async def test_a_request_does_not_wait_past_its_deadline(engine):
    engine.lose()
    stream = engine.request(deadline=time.monotonic() + 0.05)

    assert await asyncio.wait_for(stream.accepted(), GIVE_UP)
    assert (await collect(stream))[-1].finish_reason is FinishReason.TIMEOUT


async def test_a_waiting_request_can_be_aborted(engine):
    lost = engine.request()
    engine.lose()
    late = engine.request()
    lost.abort()
    assert await engine.abort_external(AbortTarget(frozenset({"job"}))) == {"job"}

    assert await late.accepted()
    assert (await collect(late))[-1].finish_reason is FinishReason.ABORT
    engine.become(EngineState.READY)
    assert not any(isinstance(message, AbortRequests) for message in engine.sent)
    assert len(engine.sent) == 1


async def test_waiting_requests_end_when_the_engine_will_not_come_back(engine):
    engine.lose()
    stream = engine.request()
    engine.become(EngineState.STOPPED)

    assert await stream.accepted() is False


@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.STOPPED])
async def test_requests_wait_only_for_a_restart(engine, state):
    engine.become(state)
    with pytest.raises(EngineUnavailableError):
        engine.request()


async def test_without_a_wait_a_restart_ends_and_refuses_requests():
    engine = Handle(seconds=0)
    stream = engine.request()
    engine.lose()

    assert (await collect(stream))[-1].error == "lost"
    with pytest.raises(EngineUnavailableError):
        engine.request()


async def test_an_inconsistent_step_keeps_no_events_from_their_readers(engine):
    stream = engine.request()
    reading = asyncio.create_task(collect(stream))
    await asyncio.sleep(0)
    step = StepMessage(
        request_ids=[stream.request_id, stream.request_id],
        token_ids=[98],
        finish_reasons=[0, 0],
        logprobs={},
    )

    with pytest.raises(ValueError, match="shorter"):
        engine._deliver([step])
    engine.answer(stream.request_id, 99, FinishReason.LENGTH)

    assert [event.token_id for event in await asyncio.wait_for(reading, 60)] == [98, 99]
