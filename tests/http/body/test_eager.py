"""Coroutines that run until they wait, without a task."""

import asyncio

import pytest

from server.http.body.eager import Begun

pytestmark = pytest.mark.anyio


async def test_a_coroutine_that_does_not_wait_has_its_result_at_once():
    async def work():
        return 7

    begun = Begun(work())

    assert begun.rest is None
    assert begun.result == 7


async def test_a_coroutine_that_waits_continues_when_its_rest_is_awaited():
    first, second, log = asyncio.Event(), asyncio.Event(), []

    async def work():
        log.append("begun")
        await first.wait()
        await asyncio.sleep(0)
        log.append("continued")
        await second.wait()
        return 7

    begun = Begun(work())
    assert log == ["begun"]
    first.set()
    asyncio.get_running_loop().call_later(0.01, second.set)

    assert begun.rest is not None
    assert await begun.rest == 7
    assert log == ["begun", "continued"]


async def test_errors_before_and_after_waiting_are_raised():
    async def fail(wait):
        if wait:
            await asyncio.sleep(0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Begun(fail(wait=False))
    begun = Begun(fail(wait=True))
    assert begun.rest is not None
    with pytest.raises(ZeroDivisionError):
        await begun.rest


async def test_the_coroutine_is_cancelled_with_the_task_that_awaits_its_rest():
    cancelled = []

    async def work():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(None)
            raise

    begun = Begun(work())
    assert begun.rest is not None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await begun.rest

    assert cancelled == [None]
