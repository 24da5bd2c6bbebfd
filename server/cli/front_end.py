"""A front-end process, one of several on a port: HTTP, tokenizer and detokenizer, connected to the hub.

`server.cli.front_end_pool` starts it as `python -m server.cli.front_end` and sends its configuration to its standard
input. It ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from pathlib import Path

from model.errors import ModelError
from model.text.tokenizer import Tokenizer
from server.cli.front_end_config import STOP_SIGNAL, FrontEndConfig
from server.engine.link.client import RemoteEngine
from server.engine.link.process_setup import exit_with_parent, freeze_startup_objects, read_config
from server.http.app import create_app
from server.http.chat import load_chat_template
from server.http.metrics.shared_counters import SharedCounters
from server.http.metrics.specs import NUM_CELLS
from server.http.serving import HTTPServer
from server.log import configure_logging

log = logging.getLogger("tessera")


def main() -> None:
    """Serve until a signal comes or the hub ends."""
    # They often go to the whole process group. The parent decides when this process ends; see `STOP_SIGNAL`, which ends
    # it at once as long as it does not serve.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    config = read_config(FrontEndConfig)
    if config is None:
        return
    configure_logging(config.log_level, config.log_format)
    threading.Thread(
        target=exit_with_parent, args=(config.address,), name="parent-watch", daemon=True
    ).start()
    engine = RemoteEngine(config.address, config.first_id)
    counters = SharedCounters.shared(Path(config.counters), config.rows, NUM_CELLS, config.row)
    try:
        tokenizer = Tokenizer.from_folder(config.tokenizer_path)
        chat_template = load_chat_template(Path(config.tokenizer_path), tokenizer, config.http)
    except ModelError as error:
        log.error("%s", error)
        raise SystemExit(1) from None
    app = create_app(engine, tokenizer, config.http, counters, chat_template)
    server = HTTPServer(app, [STOP_SIGNAL])
    freeze_startup_objects()
    with asyncio.Runner(loop_factory=server.loop_factory) as runner:
        runner.run(_serve(server, engine, socket.socket(fileno=config.listener)))


async def _serve(server: HTTPServer, engine: RemoteEngine, listener: socket.socket) -> None:
    try:
        await engine.start()
        await server.run_until_stopped(listener)
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
