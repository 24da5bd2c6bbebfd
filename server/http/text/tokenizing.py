"""The threads that tokenize: long texts never take all of them, and what nobody waits for any more is not run."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

ResultT = TypeVar("ResultT")

LONG = 32 * 1024
"""Size from which a text is long. One of this size takes about 20 ms to tokenize (byte-level BPE, EPYC Zen 4)."""

# A text of 2 MB takes 200 to 450 MB while it is tokenized, which the allocator would keep.
_TRIMMED = 256 * 1024


class TokenizerThreads:
    """Owns the threads. Used only on the event loop.

    Short texts may use all threads, long ones all but one, so that a short text waits only for other short ones.

    Args:
        count: number of threads; with one, short texts do wait for a long one.
    """

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "tokenize")
        self._long = asyncio.Semaphore(max(1, count - 1))

    def close(self) -> None:
        """Let the threads end; work that has not begun is cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], ResultT], size: int) -> ResultT:
        """Call a function in a thread. If the caller is cancelled before the function runs, it never does.

        Args:
            work: the function; must not use state that the event loop changes.
            size: characters of the text or bytes of the request that the function works on.
        """
        if size < LONG:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        await self._long.acquire()
        if size < _TRIMMED:
            return await run_in_place(self._pool, self._long, work)

        def work_and_trim() -> ResultT:
            try:
                return work()
            finally:
                _trim()

        return await run_in_place(self._pool, self._long, work_and_trim)


class Places(Protocol):
    """What limits how many functions a pool has: a semaphore, or `server.http.load.fair_queue.FairPlaces`."""

    def release(self) -> None:
        """Give a place back."""


async def run_in_place(
    pool: ThreadPoolExecutor, places: Places, work: Callable[[], ResultT]
) -> ResultT:
    """Call a function in a thread of a pool, and release a place when the function has returned.

    A caller that is cancelled does not wait for the function, but the place stays taken until it returns.

    Args:
        pool: the threads.
        places: limits how many functions the pool has; the caller has acquired one.
        work: the function.
    """
    loop = asyncio.get_running_loop()
    try:
        future = pool.submit(work)
    except BaseException:
        places.release()
        raise

    def release(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(places.release)

    future.add_done_callback(release)
    return await asyncio.wrap_future(future)


def _trim() -> None:
    """Return freed memory to the system, with the C library that can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
