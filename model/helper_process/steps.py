"""Code that waits in a thread or on an event loop, whichever its caller has.

Such code is a generator. It yields what it waits for, and is sent whether that came in time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import select
import time
from collections.abc import Generator
from typing import NamedTuple, TypeVar

ResultT = TypeVar("ResultT")


class Wait(NamedTuple):
    """What a generator waits for; only for the time to pass if neither a descriptor nor a future is given.

    Attributes:
        seconds: how long at most; None for no limit.
        descriptor: of a socket; None for none.
        is_write: whether the socket must take data, instead of having some.
        future: one that must be done.
    """

    seconds: float | None
    descriptor: int | None = None
    is_write: bool = False
    future: concurrent.futures.Future[None] | None = None


Steps = Generator[Wait, bool, ResultT]


def run_in_thread(steps: Steps[ResultT]) -> ResultT:
    """Run a generator to its end; the thread waits."""
    with contextlib.closing(steps):
        try:
            wait = next(steps)
            while True:
                wait = steps.send(_block(wait))
        except StopIteration as end:
            result: ResultT = end.value
            return result


async def run_on_loop(steps: Steps[ResultT]) -> ResultT:
    """Run a generator to its end; the event loop does other work meanwhile. A cancelled caller closes the generator."""
    loop = asyncio.get_running_loop()
    with contextlib.closing(steps):
        try:
            wait = next(steps)
            while True:
                wait = steps.send(await _suspend(loop, wait))
        except StopIteration as end:
            result: ResultT = end.value
            return result


def _block(wait: Wait) -> bool:
    if wait.descriptor is not None:
        poll = select.poll()
        poll.register(wait.descriptor, select.POLLOUT if wait.is_write else select.POLLIN)
        return bool(poll.poll(None if wait.seconds is None else wait.seconds * 1000))
    if wait.future is not None:
        return bool(concurrent.futures.wait([wait.future], wait.seconds).done)
    time.sleep(wait.seconds or 0.0)
    return False


async def _suspend(loop: asyncio.AbstractEventLoop, wait: Wait) -> bool:
    if wait.descriptor is None and wait.future is None:
        await asyncio.sleep(wait.seconds or 0.0)
        return False
    ready: asyncio.Future[bool] = loop.create_future()

    def set_ready(value: bool) -> None:
        if not ready.done():
            ready.set_result(value)

    timer = None if wait.seconds is None else loop.call_later(wait.seconds, set_ready, False)
    try:
        if wait.descriptor is None:
            assert wait.future is not None
            wait.future.add_done_callback(lambda _: loop.call_soon_threadsafe(set_ready, True))
        elif wait.is_write:
            loop.add_writer(wait.descriptor, set_ready, True)
        else:
            loop.add_reader(wait.descriptor, set_ready, True)
        return await ready
    finally:
        if timer is not None:
            timer.cancel()
        # Before the generator can close the descriptor, whose number is used again.
        if wait.descriptor is not None:
            (loop.remove_writer if wait.is_write else loop.remove_reader)(wait.descriptor)
