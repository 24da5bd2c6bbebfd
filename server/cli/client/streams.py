"""Requests for streamed text over the three routes that servers have, and the parts of their answers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from server.client.errors import read_error


class ServerError(Exception):
    """The server refuses a request, ends a stream with an error, or sends something unreadable."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The content of one event.

    Attributes:
        text: that the event adds.
        finish: why the text ends; None where it continues.
        warnings: sentences of the server for the user.
    """

    text: str = ""
    finish: str | None = None
    warnings: tuple[str, ...] = ()


class Route(Protocol):
    """A route that streams text."""

    @property
    def path(self) -> str:
        """Path of the route."""

    def read(self, data: bytes) -> Piece:
        """Parse one event.

        Raises:
            ServerError: it reports an error, or is not one of this route.
        """


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _OpenAIEvent(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None
    warnings: list[str] = []


class _OpenAI:
    """A route of OpenAI's API."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._decode = msgspec.json.Decoder(_OpenAIEvent).decode

    def read(self, data: bytes) -> Piece:
        """Parse one event; see `Route.read`."""
        if data.strip() == b"[DONE]":
            return Piece()
        try:
            event = self._decode(data)
        except msgspec.DecodeError as error:
            raise ServerError(f"an event of the stream cannot be read: {error}") from error
        if event.error is not None:
            raise ServerError(read_error(data).message)
        warnings = tuple(event.warnings)
        if not event.choices:
            return Piece(warnings=warnings)
        choice = event.choices[0]
        text = choice.text or (choice.delta and choice.delta.content) or ""
        return Piece(text, choice.finish_reason, warnings)


class Completions(_OpenAI):
    """OpenAI's completions: `POST /v1/completions`."""

    def __init__(self) -> None:
        super().__init__("/v1/completions")

    def body(self, prompt: str, model: str | None, options: argparse.Namespace) -> bytes:
        """Render a request.

        Args:
            prompt: to continue.
            model: its name; None leaves the choice to the server.
            options: the flags of `server.cli.client.options`.
        """
        return _openai_body({"prompt": prompt}, model, options)


class Chat(_OpenAI):
    """OpenAI's chat: `POST /v1/chat/completions`."""

    def __init__(self) -> None:
        super().__init__("/v1/chat/completions")

    def body(
        self, messages: list[dict[str, str]], model: str | None, options: argparse.Namespace
    ) -> bytes:
        """Render a request.

        Args:
            messages: of the conversation, each with `role` and `content`.
            model: its name; None leaves the choice to the server.
            options: the flags of `server.cli.client.options`.
        """
        return _openai_body({"messages": messages}, model, options)


def _encode(body: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:  # Python reads other bytes as surrogates
        raise ServerError("the text has bytes that are not UTF-8") from None


def _openai_body(body: dict[str, Any], model: str | None, options: argparse.Namespace) -> bytes:
    body["stream"] = True
    fields = {
        "model": model,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        "stop": options.stop,
    }
    body |= {name: value for name, value in fields.items() if value is not None}
    return _encode(body)


class _Token(msgspec.Struct):
    text: str = ""
    special: bool = False


class _Details(msgspec.Struct):
    finish_reason: str | None = None


class _TGIEvent(msgspec.Struct):
    token: _Token | None = None
    generated_text: str | None = None
    details: _Details | None = None
    error: str | None = None


class GenerateStream:
    """Text Generation Inference: `POST /generate_stream`, for servers without OpenAI's API."""

    path = "/generate_stream"

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_TGIEvent).decode

    def body(self, prompt: str, options: argparse.Namespace) -> bytes:
        """Render a request.

        Args:
            prompt: to continue.
            options: the flags of `server.cli.client.options`.
        """
        parameters: dict[str, Any] = {"details": True}
        fields = {
            "max_new_tokens": options.max_tokens,
            "temperature": options.temperature or None,
            "do_sample": True if options.temperature else None,
            "seed": options.seed,
            "stop": options.stop,
        }
        parameters |= {name: value for name, value in fields.items() if value is not None}
        return _encode({"inputs": prompt, "parameters": parameters})

    def read(self, data: bytes) -> Piece:
        """Parse one event; see `Route.read`."""
        try:
            event = self._decode(data)
        except msgspec.DecodeError as error:
            raise ServerError(f"an event of the stream cannot be read: {error}") from error
        if event.error is not None:
            raise ServerError(event.error)
        text = event.token.text if event.token and not event.token.special else ""
        if event.generated_text is None:
            return Piece(text)
        return Piece(text, (event.details and event.details.finish_reason) or "stop")
