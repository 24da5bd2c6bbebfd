"""The requests of a front end that are in the engine: sorts the events of each step into their streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.engine.core.request import FinishReason, TokenEvent
from server.engine.link.request_stream import RequestStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from server.engine.link.protocol import StepMessage


class StreamTable:
    """Owns the streams that have not ended, by request id."""

    def __init__(self) -> None:
        self._streams: dict[int, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_id: int, abort: Callable[[int], None]) -> RequestStream:
        """Make the stream of a request.

        Args:
            request_id: that no open stream has.
            abort: called with it when the reader wants no more.
        """
        stream = self._streams[request_id] = RequestStream(request_id, abort)
        return stream

    def close(self, request_id: int) -> bool:
        """Forget a stream; returns whether there was one."""
        return self._streams.pop(request_id, None) is not None

    def take(self, steps: Iterable[StepMessage]) -> None:
        """Hand the events of steps to the readers: what a stream gets from all of them comes together."""
        touched: list[RequestStream] = []
        for step in steps:
            self._sort(step, touched)
        for stream in touched:
            stream.deliver()

    def fail(self, error: str) -> list[int]:
        """End every stream with an error; returns their ids."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.push(TokenEvent(token_id=None, finish_reason=FinishReason.ERROR, error=error))
            stream.deliver()
        return list(streams)

    def _sort(self, step: StepMessage, touched: list[RequestStream]) -> None:
        streams = self._streams
        for started in step.started:
            if stream := streams.get(started.request_id):
                stream.queue_seconds = started.queue_seconds
                stream.num_cached_tokens = started.num_cached_tokens
        for request_id, prompt_logprobs in step.prompt_logprobs.items():
            if stream := streams.get(request_id):
                stream.prompt_logprobs = prompt_logprobs
        token_ids, finish_reasons, logprobs = step.token_ids, step.finish_reasons, step.logprobs
        unusual = step.top_tokens or step.errors
        for i, request_id in enumerate(step.request_ids):
            stream = streams.get(request_id)
            if stream is None:
                continue
            if unusual or finish_reasons[i]:
                stream.push(step.event(i))
            else:
                stream.push(TokenEvent(token_id=token_ids[i], logprob=logprobs.get(i)))
            touched.append(stream)
            if finish_reasons[i]:
                del streams[request_id]
