"""The process of a rank that does not lead: repeats the leader's operations on its part of the model.

`server.engine.link.engine_process.rank_processes` starts it as `python -m
server.engine.link.engine_process.rank_process`.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import signal
import threading

import msgspec

from server.engine.core.start_checks import StartupError
from server.engine.link.engine_process.process_setup import (
    dump_stacks_on_signal,
    end_with_parent,
    exit_with_parent,
    freeze_startup_objects,
    garbage_collection_paused,
    read_config,
    set_passive_openmp_wait,
)
from server.engine.link.engine_process.rank_processes import RankLaunch
from server.engine.link.sockets import Connection
from server.engine.link.spawn import ignore_ending_signals
from server.log import configure_logging
from server.standard_error import never_wait

log = logging.getLogger("tessera.engine")


def main() -> None:
    """Load the rank's part of the model and carry out commands until the leader ends."""
    never_wait()
    ignore_ending_signals(signal.SIGUSR2)
    dump_stacks_on_signal()
    set_passive_openmp_wait()
    launches: queue.SimpleQueue[RankLaunch] = queue.SimpleQueue()
    end_with_parent()
    threading.Thread(target=_listen, args=(launches,), name="leader-watch", daemon=True).start()
    with garbage_collection_paused():
        from kernels.collective.communicator import RankLostError  # noqa: PLC0415 - torch
        from server.engine.runner.start.startup import start_rank  # noqa: PLC0415 - torch
        from server.engine.runner.step.rank_adapters import (  # noqa: PLC0415 - torch
            AdapterCommand,
            AdapterReport,
        )
        from server.engine.runner.step.ranks import RankCommand  # noqa: PLC0415 - torch
    launch = launches.get()
    connection = Connection(launch.link)
    decoder = msgspec.msgpack.Decoder(RankCommand | AdapterCommand)

    def report(message: AdapterReport) -> None:
        connection.send(msgspec.msgpack.encode(message))

    try:
        executor = start_rank(launch.config, launch.endpoint, report)
    except StartupError as error:
        log.critical("rank %d: %s", launch.endpoint.rank, error)
        raise SystemExit(1) from None
    freeze_startup_objects()
    while True:
        for data in connection.receive(wait=math.inf):
            try:
                executor.run(decoder.decode(data))
            except RankLostError as error:
                log.critical("rank %d ends: %s", launch.endpoint.rank, error)
                raise SystemExit(1) from None


def _listen(launches: queue.SimpleQueue[RankLaunch]) -> None:
    """Read the configuration, and end the process when the leader ends."""
    launch = read_config(RankLaunch)
    if launch is None:
        os._exit(0)
    configure_logging(launch.config.log_level, launch.config.log_format)
    launches.put(launch)
    exit_with_parent()


if __name__ == "__main__":
    main()
