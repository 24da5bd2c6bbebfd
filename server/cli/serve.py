"""`tessera serve`: the wiring of the service. Knows nothing of what happens inside a request."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from typing import TYPE_CHECKING

from model.checkpoint.config import ModelConfig
from model.checkpoint.hub import BUNDLED, resolve
from model.errors import ModelError
from server.cli.command_settings import engine_config, fail, read_settings
from server.cli.deferred_signals import held_back
from server.cli.listening import ListenError, listen
from server.engine.link.client import ENGINE_COMMAND, EngineClient, EngineStartError
from server.engine.link.hub import EngineHub
from server.engine.link.process_setup import keep_what_is_there, tokenize_in_our_threads
from server.http.config import HTTPConfig
from server.log import configure_logging

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from server.cli.settings import Settings
    from server.http.serving import HTTPServer

log = logging.getLogger("tessera")

_ENDING = (signal.SIGINT, signal.SIGTERM)


def main(arguments: list[str], spawned: subprocess.Popen[bytes] | None, began: float) -> None:
    """Serve with what the command line and the environment say; exits with status 2 where that is wrong.

    Args:
        arguments: after `tessera serve`.
        spawned: as for `serve`.
        began: likewise.
    """
    serve(read_settings(arguments), spawned=spawned, began=began)


def serve(
    settings: Settings,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    spawned: subprocess.Popen[bytes] | None = None,
    began: float | None = None,
) -> None:
    """Serve until a signal ends the process; exits with status 1 where the service cannot start.

    Args:
        settings: of the service.
        engine_command: starts an engine process.
        spawned: the first engine process, where it was started ahead. Its owner ends it where it is never used.
        began: `time.perf_counter()` when the command began; None takes now.
    """
    started = time.perf_counter() if began is None else began
    configure_logging(settings.log_level)
    tokenize_in_our_threads()  # front ends of a fleet inherit it
    try:
        model_path = resolve(settings.model, settings.revision)
        # An unsupported model is refused here, before anything is started.
        model_config = ModelConfig.from_folder(model_path)
        listeners = listen(settings.host, settings.port, settings.frontends)
        tokenizer_path = _tokenizer_path(settings, model_path)
    except (ModelError, ListenError) as error:
        fail(str(error))
    # Until the event loop takes the signal over: leave by way of `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    limits, config = _http_config(settings, model_config), engine_config(settings, model_path)
    if settings.frontends > 1:

        def make_hub() -> EngineHub:
            return EngineHub(config, settings.engine_hang_seconds, engine_command, spawned)

        _serve_fleet(make_hub, listeners, tokenizer_path, limits, started)
    else:
        client = EngineClient(config, settings.engine_hang_seconds, engine_command, spawned)
        _serve_alone(client, listeners[0], tokenizer_path, limits, started)


def _serve_alone(
    client: EngineClient,
    listener: socket.socket,
    tokenizer_path: Path,
    limits: HTTPConfig,
    started: float,
) -> None:
    """Be the front end and own the engine process."""
    try:
        with held_back(*_ENDING):
            client.launch()  # before the HTTP libraries are imported
        server = _create_server(client, tokenizer_path, limits)
        keep_what_is_there()
        with asyncio.Runner(loop_factory=server.loop_factory) as runner:
            runner.run(_serve(server, client, listener, started))
    except (ModelError, EngineStartError) as error:
        fail(str(error))
    finally:
        client.kill()


def _serve_fleet(
    make_hub: Callable[[], EngineHub],
    listeners: list[socket.socket],
    tokenizer_path: Path,
    limits: HTTPConfig,
    started: float,
) -> None:
    """Own the engine process and the front-end processes."""
    from server.cli.front_end_pool import FrontEndStartError, run_fleet  # noqa: PLC0415 - the metrics' library

    hub = None
    try:
        with held_back(*_ENDING):
            hub = make_hub()
            hub.launch()
        keep_what_is_there()
        asyncio.run(run_fleet(hub, listeners, tokenizer_path, limits, started))
    except (EngineStartError, FrontEndStartError) as error:
        fail(str(error))
    finally:
        if hub is not None:
            hub.kill()


def _tokenizer_path(settings: Settings, model_path: Path) -> Path:
    """The model's folder; random weights can do with any tokenizer, and a shape alone has none."""
    if settings.load_format == "dummy" and not (model_path / "tokenizer.json").exists():
        log.warning("%s has no tokenizer.json; taking the bundled model's", model_path)
        return resolve(BUNDLED)
    return model_path


def _create_server(client: EngineClient, tokenizer_path: Path, limits: HTTPConfig) -> HTTPServer:
    # Imported here so that the engine process is already on its way.
    from model.text.tokenizer import Tokenizer  # noqa: PLC0415
    from server.http.app import create_app  # noqa: PLC0415
    from server.http.serving import HTTPServer  # noqa: PLC0415

    return HTTPServer(create_app(client, Tokenizer.from_folder(tokenizer_path), limits))


async def _serve(
    server: HTTPServer, client: EngineClient, listener: socket.socket, started: float
) -> None:
    """Serve until a signal comes or the engine turns out unable to start."""
    await client.start()
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d (answers 503 until the model is loaded)", host, port)
    serving = asyncio.ensure_future(server.run_until_stopped(listener))
    ready = asyncio.ensure_future(client.wait_until_ready())
    try:
        done, _ = await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready in done:
            ready.result()  # raises where the engine cannot start
            seconds = time.perf_counter() - started
            log.info("ready after %.1f s: POST http://%s:%d/generate", seconds, host, port)
        await serving
    finally:
        server.should_exit = True
        ready.cancel()
        await asyncio.gather(serving, ready, return_exceptions=True)
        await client.stop()


def _http_config(settings: Settings, model_config: ModelConfig) -> HTTPConfig:
    return HTTPConfig(
        model_id=settings.model,
        eos_token_ids=model_config.eos_token_ids,
        max_concurrent_requests=settings.max_concurrent_requests,
        max_body_bytes=settings.max_body_bytes,
    )
