"""Requests that wait while the engine is being started again."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

from server.engine.core.request import FinishReason, TokenEvent

if TYPE_CHECKING:
    from server.engine.link.front_end.request_stream import RequestStream


class _Entry(NamedTuple):
    stream: RequestStream
    expiry: asyncio.TimerHandle


class RestartQueue:
    """Owns the streams whose requests have no engine at the moment. Used only on the event loop.

    A request waits for `seconds` at most, and not past its deadline. The number of waiting requests is bounded by the
    admission limit of the HTTP layer: a waiting request is in flight.

    Attributes:
        seconds: how long a request waits; with 0, none does.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._entries: dict[int, _Entry] = {}

    @property
    def streams(self) -> list[RequestStream]:
        """The streams, in the order in which they were added."""
        return [entry.stream for entry in self._entries.values()]

    def accepts(self, stream: RequestStream) -> bool:
        """Return whether a request that the engine has lost may wait and be sent again.

        Its client has received nothing, so that it cannot tell; a request is sent again once, so that one that ends the
        engine does so twice at most.
        """
        return self.seconds > 0 and stream.request is not None and not stream.has_output

    def add(self, stream: RequestStream) -> None:
        """Let a request wait."""
        request = stream.request
        assert request is not None
        seconds, expire = self.seconds, self._time_out
        if request.deadline is not None and (left := request.deadline - time.monotonic()) < seconds:
            seconds, expire = max(0.0, left), self._pass_deadline
        timer = asyncio.get_running_loop().call_later(seconds, expire, stream)
        self._entries[stream.request_id] = _Entry(stream, timer)

    def discard(self, request_id: int) -> None:
        """Drop a request; unknown ids are ignored."""
        if entry := self._entries.pop(request_id, None):
            entry.expiry.cancel()
            entry.stream.release(accepted=True)

    def take(self) -> list[RequestStream]:
        """Remove all streams, whose requests the caller sends."""
        streams = self.streams
        for entry in self._entries.values():
            entry.expiry.cancel()
        self._entries.clear()
        return streams

    def fail(self, error: str) -> None:
        """End all requests with an error."""
        for stream in self.take():
            _end(stream, FinishReason.ERROR, error)
            stream.release(accepted=False)

    def _time_out(self, stream: RequestStream) -> None:
        del self._entries[stream.request_id]
        _end(
            stream, FinishReason.ERROR, "the engine stopped unexpectedly and is being started again"
        )
        stream.release(accepted=False)

    def _pass_deadline(self, stream: RequestStream) -> None:
        del self._entries[stream.request_id]
        _end(stream, FinishReason.TIMEOUT)
        stream.release(accepted=True)


def _end(stream: RequestStream, reason: FinishReason, error: str | None = None) -> None:
    stream.push(TokenEvent(token_id=None, finish_reason=reason, error=error))
    stream.deliver()
