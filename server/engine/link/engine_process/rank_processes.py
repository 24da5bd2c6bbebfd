"""Starts the processes of the other ranks of a tensor-parallel engine, and ends with them.

    engine process, rank 0  ──commands──>  process of rank 1, 2, ...    (rank_process.py)

If a rank ends, the engine ends too, since it cannot compute without it; its parent starts both again. If the engine
ends, its ranks do: each has a pipe from it as its standard input.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from kernels.collective.endpoint import RankEndpoint, num_bytes
from model.helper_process.command import module_command
from server.engine.core.messages import EngineConfig
from server.engine.link.engine_process.process_setup import (
    disable_nvlink_multicast,
    keep_nccl_on_loopback,
)
from server.engine.link.shared_file import shared_file
from server.engine.link.sockets import Connection
from server.engine.link.spawn import LinkedProcess, end, spawn
from server.engine.runner.step.rank_adapters import AdapterReport

if TYPE_CHECKING:
    from server.engine.runner.step.rank_adapters import AdapterCommand
    from server.engine.runner.step.ranks import RankCommand

log = logging.getLogger("tessera.engine")

_LAST_SECONDS: Final = 5.0

RANK_COMMAND: Final = module_command("server.engine.link.engine_process.rank_process")


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a rank's process: one line of JSON on its standard input.

    Attributes:
        link: descriptor of the `Connection` to the leader, which the process inherits.
        config: of the engine.
        endpoint: of the process; it inherits the descriptors.
    """

    link: int
    config: EngineConfig
    endpoint: RankEndpoint


class RankEndpoints:
    """Owns the descriptors by which the ranks of a host communicate.

    Attributes:
        ranks: the endpoint of each rank.

    Args:
        size: number of ranks.

    Raises:
        OSError: the operating system refuses.
    """

    def __init__(self, size: int) -> None:
        self._descriptors: set[int] = set()
        try:
            memory = self._own(shared_file(num_bytes(size)))
            store = self._own(shared_file())
            peers = [[-1] * size for _ in range(size)]
            for one, other in itertools.combinations(range(size), 2):
                pair = socket.socketpair()
                peers[one][other], peers[other][one] = (self._own(it.detach()) for it in pair)
        except OSError:
            self.close()
            raise
        self.ranks = [RankEndpoint(i, tuple(it), memory, store) for i, it in enumerate(peers)]

    def _own(self, descriptor: int) -> int:
        self._descriptors.add(descriptor)
        return descriptor

    def inherited(self, rank: int) -> list[int]:
        """Return the descriptors that the process of a rank inherits."""
        endpoint = self.ranks[rank]
        return [it for it in (*endpoint.peers, endpoint.memory, endpoint.store) if it >= 0]

    def close_all_but(self, rank: int) -> None:
        """Close what only other ranks use, so that the end of their processes is noticed."""
        self._close(self._descriptors - set(self.inherited(rank)))

    def close(self) -> None:
        """Close all that is still open."""
        self._close(set(self._descriptors))

    def _close(self, descriptors: set[int]) -> None:
        self._descriptors -= descriptors
        for descriptor in descriptors:
            os.close(descriptor)


class RankProcesses:
    """Owns the processes of all ranks but the first, and the connections to them.

    Attributes:
        size: number of ranks, the first included.
        endpoint: of the first.

    Args:
        config: of the engine; `tensor_parallel` is more than 1.

    Raises:
        OSError: the operating system refuses.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.size = config.tensor_parallel
        disable_nvlink_multicast()
        keep_nccl_on_loopback()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(AdapterReport)
        self._closing = False
        self._connections: list[Connection] = []
        self._processes: list[LinkedProcess] = []
        self._endpoints = RankEndpoints(self.size)
        self.endpoint, *others = self._endpoints.ranks
        try:
            for endpoint in others:
                self._start(config, endpoint)
        except OSError:
            self.close()
            raise
        self._endpoints.close_all_but(0)

    def _start(self, config: EngineConfig, endpoint: RankEndpoint) -> None:
        process = spawn(RANK_COMMAND, self._endpoints.inherited(endpoint.rank))
        self._processes.append(process)
        self._connections.append(Connection(process.link.detach()))
        launch = RankLaunch(link=process.link_descriptor, config=config, endpoint=endpoint)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its status says why
            process.stdin.write(msgspec.json.encode(launch) + b"\n")
            process.stdin.flush()
        name = f"rank-{endpoint.rank}-watch"
        threading.Thread(
            target=self._watch, args=(endpoint.rank, process), name=name, daemon=True
        ).start()

    def tell(self, command: RankCommand | AdapterCommand) -> None:
        """See `server.engine.runner.step.ranks.Ranks.tell`; any thread may call it."""
        data = self._encoder.encode(command)
        for connection in self._connections:
            connection.send(data)

    def reports(self) -> list[AdapterReport]:
        """See `server.engine.runner.step.rank_adapters.AdapterRanks.reports`."""
        if self._closing:
            raise RuntimeError("the processes of the ranks are being ended")
        return [
            self._decoder.decode(data)
            for connection in self._connections
            for data in connection.receive(wait=0)
        ]

    def end_engine(self) -> NoReturn:
        """See `server.engine.runner.step.ranks.Ranks.end_engine`."""
        time.sleep(
            _LAST_SECONDS
        )  # the thread that watches the rank logs its status, and ends this process
        os._exit(1)

    def close(self) -> None:
        """End the processes."""
        self._closing = True
        for process in self._processes:
            end(process)
        for connection in self._connections:
            connection.close()
        self._endpoints.close()

    def _watch(self, rank: int, process: LinkedProcess) -> None:
        """End this process when a rank's process ends: the engine's thread may wait for it in a collective."""
        status = process.wait()
        if self._closing:
            return
        log.critical("rank %d ended with status %d, and so does the engine", rank, status)
        os._exit(1)
