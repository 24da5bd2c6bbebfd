"""The events of a request in flight, from the callback that receives them to the task that reads them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from server.engine.core.request import FinishReason, GenerateRequest, SequenceUsage, TokenEvent


class RequestStream:
    """The events of one request, in order; created by `EngineHandle.submit`, read by one task.

    The reader is a function. It is called from the callback that receives the engine's messages, with all events that
    are available: no task is woken up for a token. A slow reader gets longer lists, not a longer delay. The last event
    has a `finish_reason`.

    Attributes:
        request: what the engine was asked for, while it may be sent to another engine process; None for never.
        engine: number of the engine that has it, -1 if none was chosen; only for the engine's side.
        num_cached_tokens: prompt tokens found in the prefix cache; valid from the first event on.
        queue_seconds: time in the engine before the first step; valid from the first event on.
        prompt_logprobs: log-probabilities of prompt tokens 1.., if requested; valid from the first event on.
        usage: what the request used; valid from the last event on, if that came from the engine.
        prompt_top_tokens: the most likely tokens at the positions of prompt tokens 1.., if requested; likewise.
        events: what was added and not yet delivered; only for the engine's side, which adds events by `push`, or those
            without a `finish_reason` directly.
        on_start: called when the first step of the request begins; None for nothing.
        delivered: when events were last delivered, `time.perf_counter` seconds. The same for all streams that events of
            one step are delivered to.

    Args:
        request_id: of the request.
        abort: called with the request id when the reader drops the request.
        stop: called with the request id when the reader needs no more tokens; the last event must follow.
        external_id: see `GenerateRequest`.
        client: likewise.
    """

    __slots__ = (
        "_abort", "_accepted", "_finished", "_first_events", "_stop", "_stopped", "_take", "_waiter",
        "client", "delivered", "engine", "events", "external_id", "num_cached_tokens", "on_start",
        "prompt_logprobs", "prompt_top_tokens", "queue_seconds", "request", "request_id", "usage",
    )  # fmt: skip

    def __init__(
        self,
        request_id: int,
        abort: Callable[[int], None],
        stop: Callable[[int], None],
        external_id: str = "",
        client: str = "",
    ) -> None:
        self.request_id = request_id
        self.request: GenerateRequest | None = None
        self.engine = -1
        self.external_id = external_id
        self.client = client
        self.num_cached_tokens = 0
        self.queue_seconds = 0.0
        self.on_start: Callable[[], None] | None = None
        self.prompt_logprobs: list[float] | None = None
        self.usage = SequenceUsage()
        self.prompt_top_tokens: list[list[tuple[int, float]]] | None = None
        self._abort = abort
        self._stop = stop
        self._stopped = False
        self.events: list[TokenEvent] = []
        self.delivered = 0.0
        self._first_events = self.events
        self._accepted: asyncio.Future[bool] | None = None
        self._take: Callable[[list[TokenEvent]], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._finished = False

    async def follow(self, take: Callable[[list[TokenEvent]], bool]) -> None:
        """Pass events to `take` as they arrive, until it returns False or has received the last one.

        Args:
            take: called from callbacks of the event loop with the events since its last call, at least one; returns
                whether it accepts more. `follow` raises what it raises.
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
        """Wait for events; returns all that are available."""
        taken: list[TokenEvent] = []

        def take(events: list[TokenEvent]) -> bool:
            taken.extend(events)
            return False

        await self.follow(take)
        if not taken:
            raise StopAsyncIteration
        return taken

    @property
    def finished(self) -> bool:
        """Whether the last event has arrived."""
        return self._finished

    @property
    def has_output(self) -> bool:
        """Whether an event has arrived."""
        # The list is replaced when events are delivered: a flag would have to be set for each token.
        return bool(self.events) or self.events is not self._first_events

    @property
    def is_held(self) -> bool:
        """Whether `accepted` waits."""
        return self._accepted is not None and not self._accepted.done()

    def hold(self) -> None:
        """Make `accepted` wait until `release`; only for the engine's side."""
        self._accepted = asyncio.get_running_loop().create_future()

    def release(self, *, accepted: bool) -> None:
        """End the wait of `accepted` if there is one; only for the engine's side."""
        if self._accepted is not None and not self._accepted.done():
            self._accepted.set_result(accepted)

    async def accepted(self) -> bool:
        """Wait while no engine runs that could take the request; return False if none has come in time.

        A request that has ended by an abort or its deadline counts as accepted: its last event says why.
        """
        return True if self._accepted is None else await self._accepted

    def stop(self) -> None:
        """End the request if it still runs, because its text is complete; its last event follows."""
        if not self._finished and not self._stopped:
            self._stopped = True
            self._stop(self.request_id)

    async def settle(self) -> None:
        """Call `stop`, and wait for the last event; drops all events that were not read."""
        if not self._finished:
            self.stop()
            await self.follow(lambda _: True)

    def abort(self) -> None:
        """Drop the request if it still runs, which frees its blocks. Does nothing after `stop`."""
        if not self._finished and not self._stopped:
            self._abort(self.request_id)
            self.push(TokenEvent(token_id=None, finish_reason=FinishReason.ABORT))
            self.deliver()

    def expire(self) -> None:
        """End the request as at its deadline if it still runs, and drop it: the engine has not ended it in time."""
        if not self._finished:
            self._abort(self.request_id)
            self.push(TokenEvent(token_id=None, finish_reason=FinishReason.TIMEOUT))
            self.deliver()

    def start(self, queue_seconds: float, num_cached_tokens: int) -> None:
        """Note that the first step of the request begins; only for the engine's side."""
        self.queue_seconds, self.num_cached_tokens = queue_seconds, num_cached_tokens
        if self.on_start is not None:
            self.on_start()

    def push(self, event: TokenEvent) -> bool:
        """Add an event without delivering it; only for the engine's side.

        Returns:
            Whether it is the only one, and `deliver` must be called. Otherwise it waits with the others, for a call
            that follows or for the reader.
        """
        events = self.events
        events.append(event)
        if event.finish_reason is not None:
            self._finished = True
            if event.usage is not None:
                self.usage = event.usage
        return len(events) == 1

    def deliver(self, now: float | None = None) -> None:
        """Pass the added events to the reader, or keep them while there is none; only for the engine's side.

        Args:
            now: the time, for `delivered`; None reads the clock.
        """
        take, waiter = self._take, self._waiter
        # A waiter that is done means that the reader's task is about to run.
        if take is None or waiter is None or waiter.done():
            return
        self._take = None  # `take` may end the stream, which calls `deliver`
        self.delivered = time.perf_counter() if now is None else now
        more = True
        try:
            while more and self.events:
                events, self.events = self.events, []
                more = take(events)
        except Exception as error:  # noqa: BLE001 - raised by `follow`
            waiter.set_exception(error)
            del waiter  # by its traceback the error would refer to itself, with all of its request
            return
        if more and not self._finished:
            self._take = take
        else:
            waiter.set_result(None)
