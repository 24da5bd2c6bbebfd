"""Refusals of a client that retries at once are held; no other client's are."""

import asyncio

import pytest

from server.http.load import paced_refusals as module
from server.http.load.paced_refusals import AT_ONCE, MOST_SECONDS, PER_SECOND, PacedRefusals

pytestmark = pytest.mark.anyio


class Clock:
    """The time of the event loop, which a test moves; timers are kept until it is their time."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        self._timers = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(module.asyncio, "get_running_loop", lambda: self)
        self.create_future = loop.create_future

    def time(self):
        return self.now

    def call_at(self, when, call, *arguments):
        timer = _Timer(when, call, arguments)
        self._timers.append(timer)
        return timer

    async def move(self, seconds):
        """Move on, in the order of the timers."""
        await settle()
        end = self.now + seconds
        while due := [it for it in self._timers if not it.cancelled and it.when <= end]:
            timer = min(due, key=lambda it: it.when)
            self._timers.remove(timer)
            self.now = max(self.now, timer.when)
            timer.call(*timer.arguments)
            await settle()
        self.now = end


class _Timer:
    def __init__(self, when, call, arguments):
        self.when, self.call, self.arguments = when, call, arguments
        self.cancelled = False

    def cancel(self):
        self.cancelled = True


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def refusals(clock):
    refusals = PacedRefusals()
    refusals.note("b")
    return refusals


def refuse(refusals, client, count):
    return [asyncio.ensure_future(refusals.hold(client)) for _ in range(count)]


def num_done(tasks):
    return sum(task.done() for task in tasks)


async def test_a_client_alone_is_refused_at_once(clock):
    refusals = PacedRefusals()
    refusals.note("a")
    tasks = refuse(refusals, "a", 10 * AT_ONCE)
    await settle()
    assert num_done(tasks) == len(tasks)


async def test_a_client_that_has_company_is_held_after_some_refusals_and_another_one_is_not(
    refusals, clock
):
    tasks = refuse(refusals, "a", AT_ONCE + 10)
    other = refuse(refusals, "b", 1)
    await settle()
    assert (num_done(tasks), num_done(other)) == (AT_ONCE, 1)
    await clock.move(5 / PER_SECOND + 0.001)
    assert num_done(tasks) == AT_ONCE + 5


async def test_a_client_that_retries_slowly_is_never_held(refusals, clock):
    for _ in range(20 * AT_ONCE):
        tasks = refuse(refusals, "a", 1)
        await clock.move(1 / PER_SECOND)
        assert not refusals.num_held
        refusals.note("b")
        assert num_done(tasks) == 1


async def test_nothing_is_held_longer_than_the_limit(refusals, clock):
    tasks = refuse(refusals, "a", 900)
    await clock.move(MOST_SECONDS + 0.001)
    assert num_done(tasks) == 900
    assert refusals.num_held == 0


async def test_clients_that_retry_at_once_and_for_ever_get_few_refusals_a_second(refusals, clock):
    answered = 0

    async def retry():
        nonlocal answered
        while True:
            await refusals.hold("a")
            answered += 1

    tasks = [asyncio.ensure_future(retry()) for _ in range(400)]
    await clock.move(2 * MOST_SECONDS)
    refusals.note("b")
    before = answered
    await clock.move(4 * MOST_SECONDS)
    rate = (answered - before) / (4 * MOST_SECONDS)
    assert rate <= 1.1 * max(PER_SECOND, 400 / MOST_SECONDS)
    for task in tasks:
        task.cancel()
    await settle()
    assert refusals.num_held == 0


async def test_beyond_the_limit_of_a_client_its_first_one_is_answered(refusals, clock, monkeypatch):
    monkeypatch.setattr(module, "MOST_OF_A_CLIENT", 8)
    tasks = refuse(refusals, "a", AT_ONCE + 20)
    await settle()
    assert refusals.num_held == 8
    assert num_done(tasks) == AT_ONCE + 12
    assert [task.done() for task in tasks[-8:]] == [False] * 8


async def test_beyond_the_limit_of_all_the_one_held_longest_is_answered(
    refusals, clock, monkeypatch
):
    monkeypatch.setattr(module, "MOST", 6)
    first = refuse(refusals, "a", AT_ONCE + 6)
    await settle()
    others = refuse(refusals, "c", AT_ONCE + 2)
    await settle()
    assert refusals.num_held == 6
    assert num_done(first) == AT_ONCE + 2
    assert num_done(others) == AT_ONCE


async def test_a_held_refusal_that_is_cancelled_leaves_nothing(refusals, clock):
    tasks = refuse(refusals, "a", AT_ONCE + 3)
    await settle()
    for task in tasks:
        task.cancel()
    await settle()
    assert refusals.num_held == 0
    await clock.move(MOST_SECONDS)


async def test_the_clients_that_are_remembered_are_bounded(refusals, monkeypatch):
    monkeypatch.setattr(module, "_MOST_KNOWN", 10)
    for number in range(100):
        await refusals.hold(f"client {number}")
    assert len(refusals._due) == 10
