"""A front-end process, one of several on a port: HTTP, tokenizer and detokenizer, connected to the hub.

`server.cli.front_end.pool` starts it as `python -m server.cli.front_end.process` and sends its configuration to its
standard input. It ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from model.errors import ModelError
from model.text.tokenizer import Tokenizer
from server.cli.exit_deadline import exit_bounded
from server.cli.front_end.config import STOP_SIGNAL, FrontEndConfig
from server.engine.link.engine_process.process_setup import (
    dump_stacks_on_signal,
    exit_with_parent,
    freeze_startup_objects,
    read_config,
)
from server.engine.link.engine_process.watchdog import HANG_EXIT_CODE
from server.engine.link.front_end.client import RemoteEngine
from server.engine.link.spawn import ignore_ending_signals
from server.http.app import create_app
from server.http.metrics.shared_counters import SharedCounters
from server.http.metrics.specs import NUM_CELLS
from server.http.serving import HTTPServer
from server.http.text.chat import load_chat_template, with_end_tokens
from server.log import configure_logging
from server.standard_error import never_wait

log = logging.getLogger("tessera")

_LAST_SECONDS = 2.0


def main() -> None:
    """Serve until a signal comes or the hub ends."""
    never_wait()
    # The parent decides when this process ends; see `STOP_SIGNAL`, which ends it at once as long as it does not serve.
    ignore_ending_signals()
    dump_stacks_on_signal()
    parent = os.getppid()
    config = read_config(FrontEndConfig)
    if config is None:
        return
    configure_logging(config.log_level, config.log_format)
    threading.Thread(target=exit_with_parent, name="parent-watch", daemon=True).start()
    engine = RemoteEngine(config.link, config.first_id, config.hang_seconds)
    counters = SharedCounters.shared(config.counters, config.rows, NUM_CELLS, config.row)
    try:
        tokenizer = Tokenizer.from_folder(config.tokenizer_path)
        chat_template = load_chat_template(Path(config.tokenizer_path), tokenizer, config.http)
        limits = with_end_tokens(config.http, tokenizer, chat_template, logs=config.row == 0)
    except ModelError as error:
        log.error("%s", error)
        raise SystemExit(1) from None
    app = create_app(engine, tokenizer, limits, counters, chat_template)
    server = HTTPServer(app, limits, [STOP_SIGNAL])
    freeze_startup_objects()
    with exit_bounded(), asyncio.Runner(loop_factory=server.loop_factory) as runner:
        try:
            runner.run(_serve(server, engine, socket.socket(fileno=config.listener), parent))
        finally:
            server.close()


async def _serve(
    server: HTTPServer, engine: RemoteEngine, listener: socket.socket, parent: int
) -> None:
    try:
        await engine.start()
        serving = asyncio.ensure_future(server.run_until_stopped(listener))
        waiting: set[asyncio.Future[Any]] = {serving, engine.hub_lost}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await _end_service(parent, engine.hub_lost.result())
        await serving
    finally:
        engine.stop()


async def _end_service(parent: int, reason: str) -> None:
    """Kill the main process, which hangs, and end this one, so that the whole service is started again.

    Requests are answered with 503 for a moment. If the main process is the first of a container, it cannot be killed
    from inside; the container's health check fails then.
    """
    log.critical("the main process of the service fails (%s); ending the service", reason)
    with contextlib.suppress(OSError):
        if os.getppid() == parent:
            os.kill(parent, signal.SIGUSR1)  # logs its stacks
        await asyncio.sleep(_LAST_SECONDS)
        if os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)
    os._exit(HANG_EXIT_CODE)


if __name__ == "__main__":
    main()
