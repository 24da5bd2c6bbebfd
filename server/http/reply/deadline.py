"""The end of requests with `timeout_ms` that the engine does not end, because it is stopped or they wait elsewhere."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, TypeVar

from server.errors import DeadlineExceededError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from server.http.reply.generation import Generation

ResultT = TypeVar("ResultT")

_GRACE_SECONDS: Final = 1.0
"""Time after a deadline in which the engine may end the request, with the token that it computes."""


async def in_time(work: Coroutine[object, object, ResultT], deadline: float | None) -> ResultT:
    """Wait for work that precedes the engine's, such as tokenizing and the compilation of a grammar.

    Args:
        work: is cancelled at the deadline.
        deadline: `time.monotonic` seconds; None for no limit.

    Raises:
        DeadlineExceededError: the deadline has passed.
    """
    if deadline is None:
        return await work
    limit = asyncio.timeout(max(0.0, deadline - time.monotonic()))
    try:
        async with limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise DeadlineExceededError from None
        raise


def expire_later(generation: Generation, deadline: float | None) -> asyncio.TimerHandle | None:
    """End a generation soon after its deadline if the engine has not done it; the caller cancels the timer.

    Args:
        generation: of the request.
        deadline: `time.monotonic` seconds; None for no limit, and no timer.
    """
    if deadline is None:
        return None
    seconds = max(0.0, deadline - time.monotonic()) + _GRACE_SECONDS
    return asyncio.get_running_loop().call_later(seconds, generation.expire)
