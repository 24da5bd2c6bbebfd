"""Threads that run before they are needed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class ThreadStartError(Exception):
    """The system refuses a thread: a limit of processes (`ulimit -u`, of the container) or of memory is reached."""


def started_pool(
    count: int, name: str, initializer: Callable[[], None] | None = None
) -> ThreadPoolExecutor:
    """Return a pool whose threads run already.

    A pool starts its threads when it has work for them. If the system refuses one then, that work fails, in the middle
    of a request.

    Args:
        count: number of threads.
        name: prefix of their names.
        initializer: called first in each of them.

    Raises:
        ThreadStartError: the system refuses.
    """
    pool = ThreadPoolExecutor(count, name, initializer)
    together = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            pool.submit(together.wait)
    except RuntimeError as error:
        together.abort()
        pool.shutdown(wait=False, cancel_futures=True)
        raise ThreadStartError(
            f"{count} threads of the name `{name}` are needed, and the system refuses one: {error}"
        ) from error
    together.wait()
    return pool
