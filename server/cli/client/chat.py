"""`tessera chat`: a conversation with a running server, in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator
from typing import Self

from server.cli.client.options import split_target, target
from server.cli.client.session import Session, listed_name, write_answer
from server.cli.client.streams import Chat, ServerError
from server.cli.output import INTERRUPTED, discard_output, fail
from server.client.address import DEFAULT_URL

_HELP = "Ctrl-C stops an answer, /new begins a new conversation, Ctrl-D or /exit ends."


def add_words(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument and the flags of a conversation."""
    parser.add_argument("target", nargs="?", metavar="URL|MODEL", help="of a running server")
    parser.add_argument("--system", metavar="TEXT", help="instructions for the whole conversation")


def main(options: argparse.Namespace) -> None:
    """Hold a conversation; if standard input is not a terminal, all of it is one message.

    Exits with status 1 if there is no server, or if it refuses the only message.
    """
    try:
        split_target([] if options.target is None else [options.target], options)
    except ValueError as error:
        fail(str(error), "chat", status=2)
    try:
        with asyncio.Runner() as runner, Conversation(options, runner) as conversation:
            conversation.connect()
            if sys.stdin.isatty():
                talk(conversation)
            else:
                _answer_once(conversation)
    except ServerError as error:
        fail(str(error), "chat")
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # `tessera chat < question | head`
        discard_output()


class Conversation:
    """The messages of a conversation, and the server that answers them.

    Attributes:
        model: its name; None leaves the choice to the server.
    """

    def __init__(self, options: argparse.Namespace, runner: asyncio.Runner) -> None:
        self.model: str | None = options.model
        self.url: str = options.url or DEFAULT_URL
        self._options = options
        self._runner = runner
        self._session = Session(target(options), self.url)
        self._route = Chat()
        self._messages: list[dict[str, str]] = []
        self.begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self._session.close()

    def begin(self) -> None:
        """Forget all messages but the instructions."""
        system = self._options.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def connect(self) -> None:
        """Find the server and the name of its model.

        Raises:
            ServerError: there is no server, or it has no chat.
        """
        models = self._runner.run(self._session.models())
        if models is None:
            raise ServerError(
                f"the server at {self.url} has no {self._route.path}; `tessera complete` continues a text"
            )
        if self.model is None:
            self.model = next(iter(models), None)
        else:
            self.model = listed_name(self.model, models) or self.model

    def ask(self, message: str) -> None:
        """Send a message and write the answer. What an interrupted answer says so far stays part of the conversation.

        Raises:
            ServerError: there is no answer; the message is then no part of the conversation.
            KeyboardInterrupt: the user stopped the answer; the request is aborted.
        """
        self._messages.append({"role": "user", "content": message})
        received: list[str] = []
        try:
            self._runner.run(self._answer(received))
        except ServerError:
            self._messages.pop()
            raise
        except KeyboardInterrupt:
            self._keep(received)
            raise
        self._keep(received)

    def _keep(self, received: list[str]) -> None:
        self._messages.append({"role": "assistant", "content": "".join(received)})

    async def _answer(self, received: list[str]) -> None:
        body = self._route.body(self._messages, self.model, self._options)
        async with contextlib.aclosing(self._session.stream(self._route, body)) as parts:
            await write_answer(parts, received)


def talk(conversation: Conversation) -> None:
    """Answer each line that is typed, until the end of the input."""
    print(f"{conversation.model or 'the model'} at {conversation.url}. {_HELP}", file=sys.stderr)
    for line in typed_lines():
        message = line.strip()
        if message == "/new":
            conversation.begin()
        elif message.startswith("/"):
            print(_HELP, file=sys.stderr)
        else:
            _ask(conversation, message)


def typed_lines() -> Iterator[str]:
    """Yield the lines that are typed, except empty ones, until Ctrl-D or `/exit`."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415 - gives `input` its editing and history
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # drops the line that is being typed
            print()
            continue
        if line.strip() in ("/exit", "/quit", "/bye"):
            return
        if line.strip():
            yield line


def _ask(conversation: Conversation, message: str) -> None:
    try:
        conversation.ask(message)
    except KeyboardInterrupt:
        print("\n[stopped]", file=sys.stderr)
    except ServerError as error:
        print(f"[{error}]", file=sys.stderr)


def _answer_once(conversation: Conversation) -> None:
    message = sys.stdin.read().strip()
    if not message:
        fail("standard input has no message", "chat", status=2)
    conversation.ask(message)
