"""The front end's view of one request in the engine: its events, as they come."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from server.engine.core.request import FinishReason, TokenEvent

if TYPE_CHECKING:
    from collections.abc import Callable


class RequestStream:
    """The events of one request, in order; made by `EngineClient.submit`, read by one task.

    The reader is a function that is called with everything that is there, within the engine client's own callback: no
    task is woken up for a token. A slow reader gets longer lists, not a longer wait. The last list ends with an event
    that has a `finish_reason`.

    Attributes:
        num_cached_tokens: prompt tokens taken from the prefix cache; valid from the first event on.
        queue_seconds: time in the engine before the first step; valid from the first event on.
        prompt_logprobs: of prompt tokens 1.., if the request asked; valid from the first event on.
    """

    __slots__ = (
        "_abort",
        "_events",
        "_finished",
        "_take",
        "_waiter",
        "num_cached_tokens",
        "prompt_logprobs",
        "queue_seconds",
        "request_id",
    )

    def __init__(self, request_id: int, abort: Callable[[int], None]) -> None:
        self.request_id = request_id
        self.num_cached_tokens = 0
        self.queue_seconds = 0.0
        self.prompt_logprobs: list[float] | None = None
        self._abort = abort
        self._events: list[TokenEvent] = []
        self._take: Callable[[list[TokenEvent]], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._finished = False

    async def follow(self, take: Callable[[list[TokenEvent]], bool]) -> None:
        """Hand over events as they come, until `take` wants no more or has had the last one.

        Args:
            take: called with the events that came since it was called last, at least one, from any callback of the
                event loop; returns whether it wants more. What it raises is raised here.
        """
        self._take = take
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            self.deliver()
            await self._waiter
        finally:
            self._take = self._waiter = None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        """Wait for events; all that are queued come at once."""
        taken: list[TokenEvent] = []

        def take(events: list[TokenEvent]) -> bool:
            taken.extend(events)
            return False

        await self.follow(take)
        if not taken:
            raise StopAsyncIteration
        return taken

    def abort(self) -> None:
        """Stop the request if it still runs; its blocks are freed. Calling it again does nothing."""
        if not self._finished:
            self._abort(self.request_id)
            self.push(TokenEvent(token_id=None, finish_reason=FinishReason.ABORT))
            self.deliver()

    def push(self, event: TokenEvent) -> None:
        """Add an event, to be delivered; for the client alone."""
        self._events.append(event)
        if event.finish_reason is not None:
            self._finished = True

    def deliver(self) -> None:
        """Hand what was pushed to the reader; without one it is kept. For the client alone."""
        take, waiter = self._take, self._waiter
        if (
            take is None or waiter is None or waiter.done()
        ):  # done: the reader's task is about to run
            return
        self._take = None  # what `take` does may end the stream, which delivers
        more = True
        try:
            while more and self._events:
                events, self._events = self._events, []
                more = take(events)
        except Exception as error:  # noqa: BLE001 - it is the reader's
            waiter.set_exception(error)
            return
        if more and not self._finished:
            self._take = take
        else:
            waiter.set_result(None)
