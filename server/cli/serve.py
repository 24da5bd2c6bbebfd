"""`tessera serve`: connects the parts of the service and runs it."""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from model.errors import ModelError
from model.hub.resolve import is_bundled
from model.thread_pool import ThreadStartError
from server.cli.command_settings import engine_config, find_model
from server.cli.deferred_signals import deferred_signals, exit_on_signals
from server.cli.exit_deadline import exit_within
from server.cli.front_end.count import front_end_count
from server.cli.listening import listen, local_hosts
from server.cli.model_name import with_model_name
from server.cli.output import fail
from server.cli.service_parts import (
    api_keys,
    check_tracing,
    engine_environments,
    http_config,
    tokenizer_path,
    warn_if_open,
)
from server.engine.core.start_checks import StartupError
from server.engine.link.child_process import ChildStartError
from server.engine.link.engine_process.process_setup import (
    disable_tokenizer_threads,
    dump_stacks_on_signal,
    freeze_startup_objects,
    raise_descriptor_limit,
)
from server.engine.link.engine_process.watchdog import LoopWatch, Watchdog
from server.engine.link.front_end.client import EngineClient
from server.engine.link.front_end.hub import EngineHub
from server.engine.link.spawn import ENGINE_COMMAND, ending_signals
from server.log import LogFormat, configure_logging

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from server.cli.front_end.pool import FrontEndPool
    from server.cli.settings import Settings
    from server.engine.link.spawn import LinkedProcess
    from server.http.config import HTTPConfig
    from server.http.serving import HTTPServer

log = logging.getLogger("tessera")

_START_SECONDS = 6.0
"""For what must not be interrupted while the service starts, after a signal."""
_END_SECONDS = 14.0
"""For the end of a service, after the time that its requests have."""
_HURRIED_SECONDS = 3.6
"""For the end after a second signal."""
_HURRIED_ENGINE_SECONDS = 1.0


def serve(
    settings: Settings,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    spawned: LinkedProcess | None = None,
    began: float | None = None,
    listening: Callable[[int], None] = lambda _: None,
) -> None:
    """Serve until a signal ends the process; exits with status 1 if the service cannot start.

    SIGINT, SIGTERM, SIGQUIT and, unless it is ignored, SIGHUP end the service in the stages of `server.http.lifecycle`,
    a second one at once. SIGUSR1 logs the stacks of all threads, and SIGUSR2 does nothing.

    Args:
        settings: of the service.
        engine_command: starts an engine process.
        spawned: an engine process that was spawned earlier. The caller ends it if it is not used.
        began: `time.perf_counter()` at the start of the command; None means now.
        listening: called with the port that the service listens on.
    """
    began = time.perf_counter() if began is None else began
    signals = ending_signals()
    _set_up_process(settings, signals)
    try:
        raise_descriptor_limit()
        check_tracing(settings)
        keys = api_keys(settings)  # before anything is downloaded
        settings = with_model_name(settings)
        model_path, model_config = find_model(settings)
        environments = engine_environments(settings)
        front_ends = front_end_count(settings.frontends, settings.device, len(environments))
        listeners = listen(settings.host, settings.port, front_ends)
        listening(listeners[0].getsockname()[1])
        tokenizer_folder = tokenizer_path(settings, model_path)
        address, port = listeners[0].getsockname()[:2]
        warn_if_open(settings.host, address, port, tuple(keys))
        allowed_hosts = _allowed_hosts(settings, listeners[0], tuple(keys))
        limits = http_config(settings, model_path, model_config, keys, allowed_hosts)
    except (ModelError, StartupError) as error:
        fail(str(error), "serve")
    log.info("starting with the model %s", settings.model)
    engine_type = EngineHub if front_ends > 1 else EngineClient
    engine: EngineHub | EngineClient | None = None
    ending = _Ending(limits.drain_delay + limits.drain_timeout)
    try:
        # An exception within the import of an extension module would become another one.
        deferred = functools.partial(
            deferred_signals, *signals, note=functools.partial(exit_within, _START_SECONDS)
        )
        with deferred():
            engine = engine_type(
                engine_config(settings, model_path),
                settings.engine_hang_seconds,
                engine_command,
                spawned,
                environments,
            )
            engine.launch()  # before the HTTP libraries are imported
        _try_tokenizer(tokenizer_folder)  # which a signal ends
        with deferred():
            server = _create_front_ends(
                engine, listeners, tokenizer_folder, limits, settings.log_format, ending.note
            )
            loop_factory = server.loop_factory
        freeze_startup_objects()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_serve(engine, server, listeners[0], began, ending))
    except (ModelError, ChildStartError, ThreadStartError) as error:
        fail(str(error), "serve")
    finally:
        if engine is not None:
            engine.kill()


def _set_up_process(settings: Settings, ending: Iterable[signal.Signals]) -> None:
    # Until the event loop handles them, exit through the `finally` blocks.
    for number in ending:
        signal.signal(number, lambda *_: sys.exit(0))
    # Not ignored: what is ignored stays so in child processes, and this one ends a front end that starts.
    signal.signal(signal.SIGUSR2, lambda *_: None)
    configure_logging(settings.log_level, settings.log_format)
    dump_stacks_on_signal()
    disable_tokenizer_threads()


class _Ending:
    """Bounds the end of the service: from the first signal on, and more closely from the second.

    Attributes:
        num_signals: signals so far.

    Args:
        seconds: that requests have after the first signal.
    """

    def __init__(self, seconds: float) -> None:
        self.num_signals = 0
        self._seconds = seconds

    def note(self) -> None:
        """Count a signal."""
        self.num_signals += 1
        hurried = self.num_signals > 1
        exit_within(_HURRIED_SECONDS if hurried else self._seconds + _END_SECONDS)

    async def stop(self, engine: EngineHub | EngineClient) -> None:
        """Stop the engine; after a second signal it has less time."""
        if self.num_signals > 1:
            await engine.stop(_HURRIED_ENGINE_SECONDS)
        else:
            await engine.stop()


def _try_tokenizer(folder: Path) -> None:
    """Read the tokenizer in a process that has limits, unless it is our own.

    Raises:
        TokenizerError: it cannot be used.
    """
    if not is_bundled(folder):
        from model.text.bounded.processes import try_folder  # noqa: PLC0415 - after the engine has started

        try_folder(folder)


class _SingleFrontEnd:
    """This process as the only front end; has the methods of a `FrontEndPool`."""

    def __init__(self, server: HTTPServer, listener: socket.socket) -> None:
        self.loop_factory = server.loop_factory
        self._server = server
        self._listener = listener

    async def start(self) -> None:
        """Do nothing: `run_until_stopped` starts the server."""

    async def run_until_stopped(self) -> None:
        """Serve until a signal or `stop`; returns once all connections are closed."""
        try:
            await self._server.run_until_stopped(self._listener)
        finally:
            self._server.close()

    def stop(self) -> None:
        """Make `run_until_stopped` return."""
        self._server.stop()


def _create_front_ends(
    engine: EngineHub | EngineClient,
    listeners: list[socket.socket],
    tokenizer_folder: Path,
    limits: HTTPConfig,
    log_format: LogFormat,
    on_signal: Callable[[], object],
) -> FrontEndPool | _SingleFrontEnd:
    # Imported here so that the engine process starts first.
    if isinstance(engine, EngineHub):
        from server.cli.front_end.pool import FrontEndPool  # noqa: PLC0415

        return FrontEndPool(engine, listeners, tokenizer_folder, limits, log_format, on_signal)
    from model.text.tokenizer import Tokenizer  # noqa: PLC0415
    from server.http.app import create_app  # noqa: PLC0415
    from server.http.serving import HTTPServer  # noqa: PLC0415
    from server.http.text.chat import load_chat_template, with_end_tokens  # noqa: PLC0415 - likewise

    tokenizer = Tokenizer.from_folder(tokenizer_folder)
    with exit_on_signals(*ending_signals()):  # a template may compute for seconds
        chat_template = load_chat_template(tokenizer_folder, tokenizer, limits)
    limits = with_end_tokens(limits, tokenizer, chat_template)
    app = create_app(engine, tokenizer, limits, chat_template=chat_template)
    return _SingleFrontEnd(HTTPServer(app, limits, on_signal=on_signal), listeners[0])


async def _serve(
    engine: EngineHub | EngineClient,
    front_ends: FrontEndPool | _SingleFrontEnd,
    listener: socket.socket,
    began: float,
    ending: _Ending,
) -> None:
    """Serve until a signal; raises the error of an engine or a front end that cannot start, or be started again."""
    watchdog = Watchdog(LoopWatch(asyncio.get_running_loop(), engine.hang_seconds))
    watchdog.start()
    await engine.start()
    serving = asyncio.ensure_future(front_ends.run_until_stopped())
    ready = asyncio.ensure_future(_wait_until_ready(engine, front_ends, listener, began))
    try:
        waiting: set[asyncio.Future[Any]] = {serving, ready, engine.failed}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
        waiting.remove(ready)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if engine.failed.done():
            raise ChildStartError(f"{engine.failed.result()}; the service ends")
        await serving
    finally:
        front_ends.stop()
        ready.cancel()
        await asyncio.gather(serving, ready, return_exceptions=True)
        await ending.stop(engine)
        watchdog.stop()


async def _wait_until_ready(
    engine: EngineHub | EngineClient,
    front_ends: FrontEndPool | _SingleFrontEnd,
    listener: socket.socket,
    began: float,
) -> None:
    """Start the front ends; log when they listen and when the engine is ready."""
    host, port = listener.getsockname()[:2]
    await front_ends.start()
    log.info("listening on http://%s:%d (answers 503 until the model is loaded)", host, port)
    await engine.wait_until_ready()
    seconds = time.perf_counter() - began
    log.info("ready after %.1f s: POST http://%s:%d/generate", seconds, host, port)


def _allowed_hosts(
    settings: Settings, listener: socket.socket, keys: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the hosts that requests may name; none for any. Keys keep out the pages that the check is against."""
    if settings.allowed_hosts:
        return () if "*" in settings.allowed_hosts else settings.allowed_hosts
    return () if keys else local_hosts(settings.host, listener)
