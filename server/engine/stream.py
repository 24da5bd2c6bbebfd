"""The front end's view of one request in the engine: its events, as they come."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from server.engine.request import FinishReason, TokenEvent

if TYPE_CHECKING:
    from collections.abc import Callable


class RequestStream:
    """The events of one request, in order; made by `EngineClient.submit`, read by one task.

    Iteration yields everything that is queued at once, so a slow reader gets longer lists, not a longer wait.
    The last list ends with an event that has a `finish_reason`.

    Attributes:
        num_cached_tokens: prompt tokens taken from the prefix cache; valid from the first event on.
        queue_seconds: time in the engine before the first step; valid from the first event on.
        prompt_logprobs: of prompt tokens 1.., if the request asked; valid from the first event on.
    """

    __slots__ = (
        "_abort",
        "_events",
        "_finished",
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
        self._waiter: asyncio.Future[None] | None = None
        self._finished = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        """Wait for events; all that are queued come at once."""
        if not self._events:
            if self._finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        return events

    def abort(self) -> None:
        """Stop the request if it still runs; its blocks are freed. Calling it again does nothing."""
        if not self._finished:
            self._abort(self.request_id)
            self.push(TokenEvent(token_id=None, finish_reason=FinishReason.ABORT))

    def push(self, event: TokenEvent) -> None:
        """Add an event; for the client alone."""
        self._events.append(event)
        if event.finish_reason is not None:
            self._finished = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
