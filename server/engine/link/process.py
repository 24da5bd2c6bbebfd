"""The engine process: takes its configuration on standard input, serves one front end, ends with it.

Started by `server.engine.link.spawn` as `python -m server.engine.link.process`, perhaps long before it is configured.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from server.engine.link.process_setup import (
    keep_what_is_there,
    quiet_idle_threads,
    without_collections,
)
from server.engine.link.protocol import (
    EngineLaunch,
    EngineMessage,
    EngineReady,
    FrontEndMessage,
    StartupFailed,
)
from server.engine.link.standard_input import end_with_parent, read_line
from server.engine.runner.gpu_driver import open_gpu
from server.engine.runner.startup_progress import log_phase
from server.log import configure_logging

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    """Import PyTorch, learn what to be, and be that engine until the front end says so or disappears."""
    began = time.perf_counter()
    # Signals often go to the whole process group; the front end decides when we end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    quiet_idle_threads()  # changes the environment, so before a thread may read it
    launches: queue.SimpleQueue[EngineLaunch] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(launches,), name="front-end-watch", daemon=True).start()
    with without_collections():
        from server.engine.runner.startup import StartupError, start_engine  # noqa: PLC0415 - torch; signals and input first
    imported = time.perf_counter() - began

    launch = launches.get()
    log_phase("importing PyTorch", imported)
    channel = Channel(launch.directory)
    try:
        engine = start_engine(launch.config, channel)
    except StartupError as error:
        channel.send(StartupFailed(str(error)))
        raise SystemExit(1) from None
    keep_what_is_there()
    channel.send(EngineReady(engine.info))
    engine.run()


def _listen(launches: queue.SimpleQueue[EngineLaunch]) -> None:
    """Hand over what the front end tells, have the GPU opened meanwhile, and leave when the front end does."""
    if not (line := read_line()):
        os._exit(0)
    launch = msgspec.json.decode(line, type=EngineLaunch)
    configure_logging(launch.config.log_level)
    if launch.config.device != "cpu":
        threading.Thread(target=open_gpu, name="open-gpu", daemon=True).start()
    launches.put(launch)
    end_with_parent(launch.directory)


if __name__ == "__main__":
    main()
