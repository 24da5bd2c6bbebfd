"""Runs coroutines up to the point where they wait, without a task for them.

Most coroutines of an ASGI server do not wait: a small body has arrived with its headers, and a socket accepts a small
response. A task, or a timeout, would take longer than what they do.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Generator
from typing import Any, Generic, TypeVar

ResultT = TypeVar("ResultT")


class Begun(Generic[ResultT]):
    """A coroutine that has run until it waited or returned. Raises what the coroutine raises.

    Attributes:
        rest: continues the coroutine; None if it has returned. Must be awaited at most once.
        result: what it returned; only if `rest` is None.
    """

    __slots__ = ("rest", "result")

    result: ResultT
    rest: Awaitable[ResultT] | None

    def __init__(self, work: Awaitable[ResultT]) -> None:
        steps = work.__await__()
        try:
            awaited = next(steps)
        except StopIteration as end:
            self.result, self.rest = end.value, None
        else:
            self.rest = _resume(steps, awaited)


@types.coroutine
def _resume(
    steps: Generator[object, Any, ResultT], awaited: object
) -> Generator[object, Any, ResultT]:
    """Run the rest of a coroutine."""
    while True:
        try:
            try:
                sent = yield awaited
            except BaseException as error:  # noqa: BLE001 - the coroutine handles it
                awaited = steps.throw(error)
            else:
                awaited = steps.send(sent)
        except StopIteration as end:
            result: ResultT = end.value
            return result
