"""The engine process: reads its configuration from standard input, then serves one front end or hub until either ends.

`server.engine.link.spawn` starts it as `python -m server.engine.link.process`, possibly long before it is configured.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from server.engine.core.messages import EngineMessage, EngineReady, FrontEndMessage, StartupFailed
from server.engine.link.process_setup import (
    exit_with_parent,
    freeze_startup_objects,
    garbage_collection_paused,
    read_config,
    set_passive_openmp_wait,
)
from server.engine.link.protocol import EngineLaunch
from server.engine.link.sockets import Connection
from server.engine.runner.gpu_driver import open_gpu
from server.engine.runner.startup_progress import log_phase
from server.log import configure_logging

if TYPE_CHECKING:
    from collections.abc import Iterator


class Channel:
    """The engine's side of the connection to the front end or the hub.

    Args:
        address: from `EngineLaunch`.
    """

    def __init__(self, address: str) -> None:
        self.connection = Connection(address, parent=False)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FrontEndMessage)

    def send(self, message: EngineMessage) -> None:
        """Queue a message; never blocks."""
        self.connection.send(self._encoder.encode(message))

    def receive(self, *, wait: float) -> Iterator[FrontEndMessage]:
        """Yield all messages that have arrived; if there are none, wait up to `wait` seconds for one."""
        return map(self._decoder.decode, self.connection.receive(wait=wait))

    def close(self) -> None:
        """Wait until all messages are sent, then close the connection."""
        self.connection.close(linger_ms=-1)


def main() -> None:
    """Import PyTorch, wait for the configuration and run the engine until a shutdown message or the parent's end."""
    began = time.perf_counter()
    # Signals often go to the whole process group; the parent decides when this process ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_passive_openmp_wait()  # sets a variable of the environment, so before another thread may read it
    launches: queue.SimpleQueue[EngineLaunch] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(launches,), name="parent-watch", daemon=True).start()
    with garbage_collection_paused():
        from server.engine.runner.startup import StartupError, start_engine  # noqa: PLC0415 - torch; signals and input first
    imported = time.perf_counter() - began

    launch = launches.get()
    log_phase("importing PyTorch", imported)
    with contextlib.closing(Channel(launch.address)) as channel:
        try:
            engine = start_engine(launch.config, channel)
        except StartupError as error:
            channel.send(StartupFailed(str(error)))
            raise SystemExit(1) from None
        freeze_startup_objects()
        channel.send(EngineReady(engine.info))
        engine.run()


def _listen(launches: queue.SimpleQueue[EngineLaunch]) -> None:
    """Read the configuration, initialize the GPU during the imports, and end the process when its parent ends."""
    launch = read_config(EngineLaunch)
    if launch is None:
        os._exit(0)
    configure_logging(launch.config.log_level)
    if launch.config.device != "cpu":
        threading.Thread(target=open_gpu, name="open-gpu", daemon=True).start()
    launches.put(launch)
    exit_with_parent(launch.address)


if __name__ == "__main__":
    main()
