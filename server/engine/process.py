"""The engine process: takes its configuration on standard input, serves one front end, ends with it.

Started by `server.engine.client` as `python -m server.engine.process <socket folder>`.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
import threading
from typing import TYPE_CHECKING

import msgspec
import zmq

from server.engine.gpu_driver import open_gpu
from server.engine.protocol import (
    EngineConfig,
    EngineMessage,
    EngineReady,
    FrontEndMessage,
    StartupFailed,
    StartupPhase,
)
from server.engine.quiet import keep_what_is_there, quiet_idle_threads
from server.engine.standard_input import end_with_parent, read_line
from server.log import configure_logging

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("tessera.engine")


class Channel:
    """The engine's end of the two sockets."""

    def __init__(self, directory: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._requests = context.socket(zmq.PULL)
        self._steps = context.socket(zmq.PUSH)
        for socket, name in ((self._requests, "requests"), (self._steps, "steps")):
            socket.set_hwm(0)
            socket.connect(f"ipc://{directory}/{name}")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FrontEndMessage)

    def send(self, message: EngineMessage) -> None:
        """Queue a message to the front end; never blocks."""
        self._steps.send(self._encoder.encode(message))

    def receive(self, *, wait: float) -> Iterator[FrontEndMessage]:
        """Every message that is there; where there is none, the first to come within `wait` seconds."""
        if wait and not self._requests.poll(None if math.isinf(wait) else int(wait * 1000)):
            return
        while True:
            try:
                data = self._requests.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield self._decoder.decode(data)


def main() -> None:
    """Start the engine and run it until the front end says so or disappears."""
    # Signals often go to the whole process group; the front end decides when we end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if not (line := read_line()):
        return
    config = msgspec.json.decode(line, type=EngineConfig)
    configure_logging(config.log_level)
    channel = Channel(sys.argv[1])
    threading.Thread(
        target=end_with_parent, args=(sys.argv[1],), name="front-end-watch", daemon=True
    ).start()

    quiet_idle_threads()  # changes the environment, so before a thread may read it
    if config.device != "cpu":
        threading.Thread(target=open_gpu, name="open-gpu", daemon=True).start()
    channel.send(StartupPhase("importing PyTorch"))
    from server.engine.startup import StartupError, start_engine  # noqa: PLC0415 - torch; the phase shows first

    try:
        engine = start_engine(config, channel)
    except StartupError as error:
        channel.send(StartupFailed(str(error)))
        raise SystemExit(1) from None
    keep_what_is_there()
    channel.send(EngineReady(engine.info))
    engine.run()


if __name__ == "__main__":
    main()
