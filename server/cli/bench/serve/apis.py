"""The two APIs that a server may have: rendering of requests, parsing of the events of a response.

`TGI` is /generate_stream of Text Generation Inference and Tessera; `OpenAI` is POST /v1/completions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

Name: TypeAlias = Literal["tgi", "openai"]


class StreamError(Exception):
    """An event reports an error, or cannot be parsed.

    Attributes:
        kind: the category that it is counted under.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Options:
    """Options that all requests of a run share.

    Attributes:
        model: its name, for OpenAI-compatible servers.
        ignore_eos: whether the server continues after an end-of-sequence token.
        temperature: 0 for greedy, which is sent with a repetition penalty of 1: a checkpoint may have another default.
    """

    model: str = ""
    ignore_eos: bool = True
    temperature: float = 0.0


@dataclass(slots=True)
class Event:
    """The content of one event.

    Attributes:
        token: whether it contains tokens.
        prompt_tokens: the server's count; None where the event has none.
        output_tokens: likewise.
        last: whether it completes the response.
    """

    token: bool
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    last: bool = False


class API(Protocol):
    """The API of a server."""

    @property
    def path(self) -> str:
        """Path that requests are posted to."""

    def body(self, prompt: str, max_tokens: int, options: Options) -> bytes:
        """Render a request for a stream."""

    def read(self, data: bytes) -> Event:
        """Parse one event.

        Raises:
            StreamError: the event reports an error, or is not one of this API.
        """


class _TGIDetails(msgspec.Struct):
    generated_tokens: int
    input_length: int | None = None


class _Token(msgspec.Struct):
    pass


class _TGIEvent(msgspec.Struct):
    token: _Token | None = None
    generated_text: str | None = None
    details: _TGIDetails | None = None
    error: str | None = None
    error_type: str = "error"


class TGI:
    """Text Generation Inference: one event per token; the last has the details."""

    path = "/generate_stream"

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_TGIEvent).decode

    def body(self, prompt: str, max_tokens: int, options: Options) -> bytes:
        """Render a request for a stream."""
        parameters: dict[str, Any] = {"max_new_tokens": max_tokens, "details": True}
        if options.ignore_eos:
            parameters["ignore_eos"] = True
        if options.temperature:
            parameters |= {"temperature": options.temperature, "do_sample": True}
        else:
            parameters["repetition_penalty"] = 1.0
        return msgspec.json.encode({"inputs": prompt, "parameters": parameters})

    def read(self, data: bytes) -> Event:
        """Parse one event; see `API.read`."""
        try:
            event = self._decode(data)
        except msgspec.DecodeError as error:
            raise StreamError("unreadable event") from error
        if event.error is not None:
            raise StreamError(f"error event: {event.error_type}")
        if event.generated_text is None:
            return Event(token=event.token is not None)
        details = event.details
        return Event(
            token=event.token is not None,
            prompt_tokens=details.input_length if details else None,
            output_tokens=details.generated_tokens if details else None,
            last=True,
        )


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0


class _OpenAIEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class OpenAI:
    """OpenAI's completions, with vLLM's `ignore_eos`; `usage` has the counts."""

    path = "/v1/completions"

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_OpenAIEvent).decode

    def body(self, prompt: str | list[int], max_tokens: int, options: Options) -> bytes:
        """Render a request for a stream."""
        body: dict[str, Any] = {
            "model": options.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        if not options.temperature:
            body["repetition_penalty"] = 1.0
        return msgspec.json.encode(body)

    def read(self, data: bytes) -> Event:
        """Parse one event; see `API.read`.

        A last event that contains only a finish reason does not count as a token.
        """
        if data == b"[DONE]":
            return Event(token=False, last=True)
        try:
            event = self._decode(data)
        except msgspec.DecodeError as error:
            raise StreamError("unreadable event") from error
        if event.error is not None:
            raise StreamError("error event")
        token = any(choice.text or choice.finish_reason is None for choice in event.choices)
        if event.usage is None:
            return Event(token=token)
        return Event(token, event.usage.prompt_tokens, event.usage.completion_tokens)


APIS: dict[Name, type[TGI] | type[OpenAI]] = {"tgi": TGI, "openai": OpenAI}
