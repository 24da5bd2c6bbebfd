"""Starts the processes of the other ranks of a tensor-parallel engine, and ends with them.

    engine process, rank 0  ──commands──>  process of rank 1, 2, ...    (rank_process.py)

If a rank ends, the engine ends too, since it cannot compute without it; its parent starts both again. If the engine
ends, its ranks do: each has a pipe from it as its standard input.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from server.engine.core.messages import EngineConfig
from server.engine.link.engine_process.process_setup import disable_nvlink_multicast
from server.engine.link.socket_folder import SocketFolder
from server.engine.link.sockets import Connection
from server.engine.link.spawn import end, module_command, spawn

if TYPE_CHECKING:
    import subprocess

    from server.engine.runner.step.ranks import RankCommand

log = logging.getLogger("tessera.engine")

RANK_COMMAND: Final = module_command("server.engine.link.engine_process.rank_process")


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a rank's process: one line of JSON on its standard input.

    Attributes:
        address: of the `Connection` to the leader.
        config: of the engine.
        rank: 1 or more.
        store: as in `server.engine.runner.step.ranks.Ranks`.
    """

    address: str
    config: EngineConfig
    rank: int
    store: str


class RankProcesses:
    """Owns the processes of all ranks but the first, and the connections to them.

    Attributes:
        size: number of ranks, the first included.
        store: as in `server.engine.runner.step.ranks.Ranks`.

    Args:
        config: of the engine; `tensor_parallel` is more than 1.

    Raises:
        OSError: the operating system refuses.
    """

    def __init__(self, config: EngineConfig) -> None:
        disable_nvlink_multicast()
        self.size = config.tensor_parallel
        self._folder = SocketFolder()
        self.store = str(self._folder.path / "store")
        self._encoder = msgspec.msgpack.Encoder()
        self._closing = False
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, self.size):
            address = str(self._folder.path / f"rank-{rank}")
            launch = RankLaunch(address=address, config=config, rank=rank, store=self.store)
            self._connections.append(Connection(address, parent=True))
            process = spawn(RANK_COMMAND)
            self._processes.append(process)
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(launch) + b"\n")
            process.stdin.flush()
            threading.Thread(
                target=self._watch, args=(rank, process), name=f"rank-{rank}-watch", daemon=True
            ).start()

    def tell(self, command: RankCommand) -> None:
        """See `server.engine.runner.step.ranks.Ranks.tell`."""
        data = self._encoder.encode(command)
        for connection in self._connections:
            connection.send(data)

    def close(self) -> None:
        """End the processes."""
        self._closing = True
        for process in self._processes:
            end(process)
        for connection in self._connections:
            connection.close()
        self._folder.remove()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """End this process when a rank's process ends: the engine's thread may wait for it in a collective."""
        status = process.wait()
        if self._closing:
            return
        log.critical("rank %d ended with status %d, and so does the engine", rank, status)
        self._folder.remove()
        os._exit(1)
