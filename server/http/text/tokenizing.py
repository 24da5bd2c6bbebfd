"""The threads that tokenize: by turns of clients, long texts never on all, and nothing that nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from model.device.niceness import give_way
from model.thread_pool import started_pool
from server.http.load.fair_queue import FairPlaces
from server.http.text.tokenizer_memory import TokenizerMemory

ResultT = TypeVar("ResultT")

LONG = 32 * 1024
"""Size from which a text is long. One of this size takes about 20 ms to tokenize (byte-level BPE, EPYC Zen 4)."""

# A text of 2 MB takes 200 to 450 MB while it is tokenized, which the allocator would keep.
_TRIMMED = 256 * 1024


class TokenizerThreads:
    """Owns the threads. Used only on the event loop.

    Short texts may use all threads, long ones all but one, so that a short text waits only for other short ones, and
    for one of each other client at most.

    Args:
        count: number of threads; with one, short texts do wait for a long one.
        growth: factor by which the tokenizer can lengthen a text.

    Raises:
        ThreadStartError: the system refuses a thread.
    """

    def __init__(self, count: int, growth: float = 1.0) -> None:
        self._pool = started_pool(count, "tokenize", give_way)
        self._places = FairPlaces(count)
        self._long = FairPlaces(max(1, count - 1))
        self._memory = TokenizerMemory(growth)

    def close(self) -> None:
        """Let the threads end; work that has not begun is cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], ResultT], size: int, client: str = "") -> ResultT:
        """Call a function in a thread. If the caller is cancelled before the function runs, it never does.

        Args:
            work: the function; must not use state that the event loop changes.
            size: bytes of the text or of the request that the function works on.
            client: who sent the request.

        Raises:
            CapacityError: there is too little memory for the text at the moment.
            BodyTooLargeError: there never is enough.
        """
        if size < LONG:
            await self._places.acquire(client)
            return await run_in_place(self._pool, partial(self._places.release, client), work)
        with contextlib.ExitStack() as stack:
            await self._long.acquire(client)
            stack.callback(self._long.release, client)
            memory = await self._memory.acquire(size)
            stack.callback(self._memory.release, memory)
            await self._places.acquire(client)
            stack.callback(self._places.release, client)
            release = stack.pop_all().close
        return await run_in_place(self._pool, release, work if size < _TRIMMED else _trimming(work))


def _trimming(work: Callable[[], ResultT]) -> Callable[[], ResultT]:
    """Return a function that gives the memory back after the work."""

    def work_and_trim() -> ResultT:
        try:
            return work()
        finally:
            _trim()

    return work_and_trim


async def run_in_place(
    pool: ThreadPoolExecutor, release: Callable[[], None], work: Callable[[], ResultT]
) -> ResultT:
    """Call a function in a thread of a pool, and release its place when it has returned.

    A caller that is cancelled does not wait for the function, but the place stays taken until it returns.

    Args:
        pool: the threads.
        release: releases the place.
        work: the function.
    """
    loop = asyncio.get_running_loop()
    try:
        future = pool.submit(work)
    except BaseException:
        release()
        raise

    def done(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(release)

    future.add_done_callback(done)
    return await asyncio.wrap_future(future)


def _trim() -> None:
    """Return freed memory to the system, with the C library that can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
