"""The engine process: reads its configuration from standard input, then serves one front end or hub until either ends.

`server.engine.link.spawn` starts it as `python -m server.engine.link.engine_process.process`, possibly long before it
is configured.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator

import msgspec

from server.engine.core.messages import (
    EngineMessage,
    EngineReady,
    FrontEndMessage,
    StartupFailed,
    StepMessage,
)
from server.engine.core.progress import Activity, Progress
from server.engine.core.request import FinishReason
from server.engine.core.start_checks import StartupError
from server.engine.link.engine_process.process_setup import (
    dump_stacks_on_signal,
    exit_with_parent,
    freeze_startup_objects,
    garbage_collection_paused,
    read_config,
    set_passive_openmp_wait,
)
from server.engine.link.engine_process.rank_processes import RankProcesses
from server.engine.link.engine_process.watchdog import EngineWatch, Watchdog
from server.engine.link.protocol import DECODE_ERRORS, EngineLaunch, RequestHeader
from server.engine.link.sockets import MAX_REQUEST_BYTES, Connection
from server.engine.link.spawn import ignore_ending_signals
from server.engine.runner.start.gpu_driver import open_gpu
from server.engine.runner.start.startup_progress import log_phase
from server.log import configure_logging
from server.standard_error import never_wait

log = logging.getLogger("tessera.engine")


class Channel:
    """The engine's side of the connection to the front end or the hub.

    Args:
        connection: to the parent.
        progress: of the engine; a message counts as progress, for example of the start.
    """

    def __init__(self, connection: Connection, progress: Progress | None = None) -> None:
        self._progress = progress or Progress()
        self.connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FrontEndMessage)

    def send(self, message: EngineMessage) -> None:
        """Queue a message; never blocks."""
        self._progress.count += 1
        self.connection.send(self._encoder.encode(message))

    def receive(self, *, wait: float) -> Iterator[FrontEndMessage]:
        """Yield all messages that have arrived; if there are none, wait up to `wait` seconds for one.

        A message that cannot be decoded is dropped. If it is a request, it ends with an error.
        """
        for data in self.connection.receive(wait=wait):
            try:
                message = self._decoder.decode(data)
            except DECODE_ERRORS as error:
                self._refuse(data, error)
                continue
            yield message

    def _refuse(self, data: bytes, error: Exception) -> None:
        log.error("dropped a message of %d bytes that cannot be decoded: %s", len(data), error)
        with contextlib.suppress(*DECODE_ERRORS):
            header = msgspec.msgpack.decode(data, type=RequestHeader)
            self.send(
                StepMessage(
                    request_ids=[header.request_id],
                    token_ids=[-1],
                    finish_reasons=[int(FinishReason.ERROR)],
                    errors={0: "the engine could not decode the request"},
                )
            )

    def close(self) -> None:
        """Wait until all messages are sent, then close the connection."""
        self.connection.flush(math.inf)
        self.connection.close()


def main() -> None:
    """Import PyTorch, wait for the configuration and run the engine until a shutdown message or the parent's end."""
    began = time.perf_counter()
    never_wait()
    ignore_ending_signals(signal.SIGUSR2)
    dump_stacks_on_signal()
    set_passive_openmp_wait()  # sets a variable of the environment, so before another thread may read it
    launches: queue.SimpleQueue[tuple[EngineLaunch, Connection]] = queue.SimpleQueue()
    progress = Progress()
    threading.Thread(
        target=_listen, args=(launches, progress), name="parent-watch", daemon=True
    ).start()
    with garbage_collection_paused():  # after signals and input
        from server.engine.runner.start.startup import release_memory, start_engine  # noqa: PLC0415 - torch
    imported = time.perf_counter() - began

    launch, connection = launches.get()
    log_phase("importing PyTorch", imported)
    with contextlib.closing(Channel(connection, progress)) as channel:
        engine, failure, ranks = None, "", None
        try:
            if launch.config.tensor_parallel > 1:
                ranks = RankProcesses(launch.config)
            engine = start_engine(launch.config, channel, ranks)
        except (StartupError, OSError) as error:
            failure = str(error)
        if engine is None:
            # After the handler: until then, the exception's frames hold the model. Who reads the reason can use the
            # memory, to start again for example.
            release_memory()
            channel.send(StartupFailed(failure))
            raise SystemExit(1)
        freeze_startup_objects()
        engine.progress = progress
        channel.send(EngineReady(engine.info))
        engine.run()
        progress.begin(Activity.IDLE)  # nothing hangs while the last messages are sent
        if ranks is not None:
            ranks.close()


def _listen(
    launches: queue.SimpleQueue[tuple[EngineLaunch, Connection]], progress: Progress
) -> None:
    """Read the configuration, initialize the GPU during the imports, and end the process when its parent ends."""
    launch = read_config(EngineLaunch)
    if launch is None:
        os._exit(0)
    config = launch.config
    suffix = f".{config.engine}" if config.num_engines > 1 else ""
    configure_logging(config.log_level, config.log_format, suffix)
    if config.device != "cpu":
        threading.Thread(target=open_gpu, name="open-gpu", daemon=True).start()
    connection = connect(launch, progress)
    launches.put((launch, connection))
    exit_with_parent()


def connect(launch: EngineLaunch, progress: Progress) -> Connection:
    """Open the connection to the parent; from a thread, send heartbeats and end this process if the engine hangs."""
    connection = Connection(launch.link, MAX_REQUEST_BYTES)
    Watchdog(EngineWatch(connection, progress, launch.hang_seconds)).start()
    return connection


if __name__ == "__main__":
    main()
