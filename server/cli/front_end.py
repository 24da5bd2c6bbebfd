"""A front-end process, one of several on a port: HTTP, tokenizer and detokenizer, with the engine at the end of a line.

Started by `server.cli.front_end_pool` as `python -m server.cli.front_end`, with its configuration on standard input.
It ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from pathlib import Path

import msgspec

from model.errors import ModelError
from model.text.tokenizer import Tokenizer
from server.cli.front_end_config import FrontEndConfig
from server.engine.link.process_setup import keep_what_is_there
from server.engine.link.remote import RemoteEngine
from server.engine.link.standard_input import end_with_parent, read_line
from server.http.app import create_app
from server.http.metrics.registry import NUM_CELLS
from server.http.metrics.shared_counters import SharedCounters
from server.http.serving import HTTPServer
from server.log import configure_logging

log = logging.getLogger("tessera")


def main() -> None:
    """Serve until a signal comes or the hub disappears."""
    # Signals often go to the whole process group; once the loop runs, it takes them in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not (line := read_line()):
        return
    config = msgspec.json.decode(line, type=FrontEndConfig)
    configure_logging(config.log_level)
    threading.Thread(
        target=end_with_parent, args=(config.directory,), name="hub-watch", daemon=True
    ).start()
    engine = RemoteEngine(config.address, config.first_id)
    counters = SharedCounters.shared(Path(config.board), config.rows, NUM_CELLS, config.row)
    try:
        tokenizer = Tokenizer.from_folder(config.tokenizer_path)
    except ModelError as error:
        log.error("%s", error)
        raise SystemExit(1) from None
    server = HTTPServer(create_app(engine, tokenizer, config.http, counters))
    keep_what_is_there()
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
