"""The requests that both clients send, and how their answers are read."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from server.client.chat_records import ChatChunk, ChatReply
from server.client.errors import ServiceConnectionError, read_error, status_error, stream_error
from server.client.events import EventReader
from server.client.records import GenerateReply, Health, PromptSpan, StreamEvent
from server.engine.core.plan_report import PlanReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from server.client.parameters import ChatParameters, GenerateParameters

AnswerT = TypeVar("AnswerT")

_OK, _UNAVAILABLE = 200, 503
_DONE: Final = b"[DONE]"
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of a decoder; the last one is that of JSON nested too deep."""


class Call(Generic[AnswerT]):
    """A request.

    Attributes:
        method: GET or POST.
        path: of the route.
        body: JSON; None for none.
        statuses: of responses that are answers and no errors.

    Args:
        path: of the route.
        answer: type of the answer, or of an event of a stream.
        body: of the request.
        statuses: see above.

    Raises:
        ValueError: a number of the body is not finite, or a text has lone surrogates, which JSON does not have.
        TypeError: a value has no JSON.
    """

    def __init__(
        self,
        path: str,
        answer: Any,  # noqa: ANN401 - a type, also list[...], for which typing has no name
        body: Mapping[str, object] | None = None,
        statuses: tuple[int, ...] = (_OK,),
    ) -> None:
        self.method = "GET" if body is None else "POST"
        self.path = path
        self.statuses = statuses
        self.body: bytes | None = None
        if body is not None:
            _check_numbers("", body)
            self.body = json.dumps(body, ensure_ascii=False).encode()
        self._decode = msgspec.json.Decoder(answer).decode

    def read(self, status: int, headers: Mapping[str, str], body: bytes) -> AnswerT:
        """Decode a response.

        Args:
            status: of the response.
            headers: of the response, by name in any case.
            body: of the response.

        Raises:
            ServiceStatusError: it is an error.
            ServiceConnectionError: it is not an answer of a service.
        """
        if status not in self.statuses:
            raise status_error(status, headers, body)
        try:
            answer: AnswerT = self._decode(body)
        except _UNREADABLE as error:
            if status != _OK:  # of a proxy, for example
                raise status_error(status, headers, body) from None
            raise unreadable(f"the answer of {self.path}", error, headers) from error
        return answer


class StreamCall(Call[AnswerT]):
    """A request whose answer is a stream of events.

    Attributes:
        is_complete: whether the last event has been read.
    """

    def __init__(self, path: str, event: type[AnswerT], body: Mapping[str, object]) -> None:
        super().__init__(path, event, body)
        self.is_complete = False
        self._events = EventReader()

    def feed(self, data: bytes, headers: Mapping[str, str]) -> Iterable[AnswerT]:
        """Decode the next chunk of the stream.

        Args:
            data: may end anywhere.
            headers: of the response, by name in any case.

        Raises:
            ServiceStatusError: the stream ends with an error.
            ServiceConnectionError: an event cannot be read.
        """
        for event in self._events.feed(data):
            if event.strip() == _DONE:
                self.is_complete = True
                continue
            try:
                answer: AnswerT = self._decode(event)
            except _UNREADABLE as error:
                if read_error(event).is_known:
                    raise stream_error(event, headers.get("x-request-id")) from None
                raise unreadable("an event of the stream", error, headers) from error
            if isinstance(answer, StreamEvent) and answer.generated_text is not None:
                self.is_complete = True
            yield answer

    def check_end(self, headers: Mapping[str, str]) -> None:
        """Check that the stream ended with its last event.

        Raises:
            ServiceConnectionError: it did not.
        """
        if not self.is_complete:
            raise ServiceConnectionError(
                "the stream ended before the answer was complete",
                request_id=headers.get("x-request-id"),
            )


def unreadable(what: str, error: Exception, headers: Mapping[str, str]) -> ServiceConnectionError:
    """Return the error of something that no service of this version sends."""
    return ServiceConnectionError(
        f"{what} cannot be read: {error}", request_id=headers.get("x-request-id")
    )


def generate(prompt: str, parameters: GenerateParameters) -> Call[GenerateReply]:
    """Return the request for a text."""
    return Call("/generate", GenerateReply, {"inputs": prompt, "parameters": parameters})


def generate_stream(prompt: str, parameters: GenerateParameters) -> StreamCall[StreamEvent]:
    """Return the request for a text, token by token."""
    body = {"inputs": prompt, "parameters": parameters}
    return StreamCall("/generate_stream", StreamEvent, body)


def chat(
    messages: str | Iterable[Mapping[str, object]],
    parameters: ChatParameters,
    extra_body: Mapping[str, object] | None,
) -> Call[ChatReply]:
    """Return the request for an answer."""
    body = _chat_body(messages, parameters, extra_body, stream=False)
    return Call("/v1/chat/completions", ChatReply, body)


def chat_stream(
    messages: str | Iterable[Mapping[str, object]],
    parameters: ChatParameters,
    extra_body: Mapping[str, object] | None,
) -> StreamCall[ChatChunk]:
    """Return the request for an answer, event by event."""
    body = _chat_body(messages, parameters, extra_body, stream=True)
    return StreamCall("/v1/chat/completions", ChatChunk, body)


def tokenize(text: str) -> Call[list[PromptSpan]]:
    """Return the request for the tokens of a text."""
    return Call("/tokenize", list[PromptSpan], {"inputs": text})


def health() -> Call[Health]:
    """Return the request for the state of the service."""
    return Call("/health", Health, statuses=(_OK, _UNAVAILABLE))


def plan() -> Call[PlanReport]:
    """Return the request for the kernels of the service."""
    return Call("/plan", PlanReport)


def _chat_body(
    messages: str | Iterable[Mapping[str, object]],
    parameters: ChatParameters,
    extra_body: Mapping[str, object] | None,
    *,
    stream: bool,
) -> dict[str, object]:
    extra = extra_body or {}
    named = {"messages", "stream", *parameters}
    if both := sorted(named & extra.keys()):
        raise ValueError(f"extra_body has {', '.join(both)}, which the call itself sets")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return {"messages": list(messages), **parameters, **extra, "stream": stream}


def _check_numbers(name: str, value: object) -> None:
    """Refuse NaN and infinities, which JSON does not have.

    Args:
        name: of the field.
        value: of the field.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; it must be a finite number")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_numbers(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            _check_numbers(f"{name}.{i}", inner)
