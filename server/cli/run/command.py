"""`tessera run`: talk to a model, or ask it once, in one command.

A running service with this model and no settings of its own is used; otherwise the command starts one, which ends with
it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from model.errors import ModelError
from model.hub.resolve import BUNDLED
from server.cli.client import chat, complete
from server.cli.client.options import target
from server.cli.client.session import Session, listed_name
from server.cli.client.streams import ServerError
from server.cli.command_settings import find_model
from server.cli.model_name import with_model_name
from server.cli.output import INTERRUPTED, discard_output, fail
from server.cli.run.service import ServiceProcess
from server.cli.service_parts import api_keys
from server.engine.core.start_checks import StartupError
from server.log import configure_logging

if TYPE_CHECKING:
    from server.cli.settings import Settings

COMMAND = "run"
_NOT_OF_THE_ENGINE = frozenset(
    {
        "model",
        "host",
        "port",
        "api_key",
        "api_key_file",
        "log_level",
        "log_format",
        "ignore_unknown_env",
        "peer_env",
    }
)
"""Settings with which a running service can be used: what they say of it is visible, or has no effect on answers."""
_ANSWER_SECONDS = 2.0
"""Time in which a running service answers; what needs longer is not one to talk to."""
_POLL_SECONDS = 0.1
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # noqa: S104 # nosec B104 - compared, not bound


def run(options: argparse.Namespace, settings: Settings, most_tokens: int) -> None:
    """Find or start a service, talk to it and end it; exits with status 1 if there is no answer.

    Args:
        options: flags of the conversation. Gets `url`, `model` and `api_key`.
        settings: of the service.
        most_tokens: of a continuation, unless `--max-tokens` is given.
    """
    configure_logging(settings.log_level, settings.log_format)
    given = frozenset(settings.model_fields_set)
    try:
        settings = with_model_name(settings)
        options.api_key = next(iter(api_keys(settings)), None)
        options.model = None
        if given <= _NOT_OF_THE_ENGINE and _use_running(options, settings):
            print(f"[using the service at {options.url}]", file=sys.stderr)
            _talk(options, most_tokens)
            return
        find_model(settings)
        with ServiceProcess(_service_settings(settings)) as service:
            port = service.port()
            if port is None:
                raise SystemExit(service.status or 1)
            options.url = _url(settings.host, port)
            _wait_until_ready(options, service)
            _talk(options, most_tokens)
    except (ModelError, StartupError, ServerError) as error:
        fail(str(error), COMMAND)
    except OSError as error:
        fail(f"the service cannot be started: {error}", COMMAND)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def _use_running(options: argparse.Namespace, settings: Settings) -> bool:
    """Return whether a service at the address of the settings serves the model; `options` then has its URL."""
    path = Path(settings.model).expanduser()
    # A relative path means another folder to a service that was started elsewhere, and no service says its revision.
    is_elsewhere = settings.model != BUNDLED and path.exists() and not path.is_absolute()
    if settings.port == 0 or settings.revision is not None or is_elsewhere:
        return False
    options.url = _url(settings.host, settings.port)

    async def models() -> list[str]:
        with contextlib.closing(Session(target(options), options.url)) as session:
            return await asyncio.wait_for(session.models(), _ANSWER_SECONDS) or []

    try:
        options.model = listed_name(settings.model, asyncio.run(models()))
    except (ServerError, TimeoutError):
        return False
    return options.model is not None


def _service_settings(settings: Settings) -> Settings:
    """Return the settings of a service for one person: on a free port, and without its log."""
    defaults = {"port": 0, "log_level": "warning", "access_log": False}
    given = settings.model_fields_set
    return settings.model_copy(
        update={name: value for name, value in defaults.items() if name not in given}
    )


def _url(host: str, port: int) -> str:
    host = _EVERYWHERE.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _wait_until_ready(options: argparse.Namespace, service: ServiceProcess) -> None:
    """Wait until the model is loaded, and show what the service does meanwhile.

    Raises:
        ServerError: the service ended or stopped.
    """
    shown = ""

    async def health() -> dict[str, object]:
        with contextlib.closing(Session(target(options), options.url)) as session:
            return await session.get("/health")

    while True:
        if service.status is not None:
            raise ServerError(f"the service ended with status {service.status}")
        state = {}
        with contextlib.suppress(ServerError):
            state = asyncio.run(health())
        phase = str(state.get("phase", ""))
        if state.get("state") == "ready":
            _show("")
            return
        if phase != shown:
            shown = phase
            _show(phase)
        time.sleep(_POLL_SECONDS)


def _show(phase: str) -> None:
    """Show what the service does: on a terminal on one line, which an empty text clears."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{phase}", end="", file=sys.stderr, flush=True)
    elif phase:
        print(f"[{phase}]", file=sys.stderr, flush=True)


def _talk(options: argparse.Namespace, most_tokens: int) -> None:
    """Hold a conversation, or continue texts if that is what the model is made for."""
    with asyncio.Runner() as runner:
        with contextlib.closing(Session(target(options), options.url)) as session:
            chats = runner.run(session.is_for_chat())
        prompt = options.prompt
        if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
            prompt = sys.stdin.read()
            prompt = prompt.strip() if chats else prompt
        if prompt == "":
            fail("the prompt is empty", COMMAND, status=2)
        try:
            if chats:
                _chat(options, runner, prompt)
                return
            options.max_tokens = options.max_tokens or most_tokens
            if prompt is not None:
                _complete(options, runner, prompt)
            else:
                _continue_texts(options, runner)
        except BrokenPipeError:  # `tessera run ... | head`
            discard_output()


def _chat(options: argparse.Namespace, runner: asyncio.Runner, prompt: str | None) -> None:
    with chat.Conversation(options, runner) as conversation:
        conversation.connect()
        if prompt is None:
            chat.talk(conversation)
        else:
            conversation.ask(prompt)


def _complete(options: argparse.Namespace, runner: asyncio.Runner, prompt: str) -> None:
    if options.system is not None:
        raise ServerError("--system: this model continues texts, without instructions")
    runner.run(complete.continue_text(prompt, options))


def _continue_texts(options: argparse.Namespace, runner: asyncio.Runner) -> None:
    """Continue each line that is typed."""
    print(
        "This model continues texts: type the beginning of one. Ctrl-C stops it, Ctrl-D ends.",
        file=sys.stderr,
    )
    for line in chat.typed_lines():
        try:
            _complete(options, runner, line)
        except KeyboardInterrupt:
            print("\n[stopped]", file=sys.stderr)
        except ServerError as error:
            print(f"[{error}]", file=sys.stderr)
