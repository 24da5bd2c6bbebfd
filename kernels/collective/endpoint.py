"""What a rank inherits from the process that starts the ranks. Imports no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankEndpoint:
    """A rank's place among the ranks of a host: file descriptors that nobody else can open.

    `server.engine.link.engine_process.rank_processes` makes them.

    Attributes:
        rank: of this process.
        peers: for each rank, a blocking socket that is connected to it; -1 for the rank itself.
        memory: of `num_bytes`, which all ranks share.
        store: an empty file, by which the libraries of GPUs find the ranks.
    """

    rank: int
    peers: tuple[int, ...]
    memory: int
    store: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.peers)


SLOT_BYTES = 4 << 20
"""Memory for what one rank gives to the others at once: the residual stream of 512 tokens of a model with 2048 columns.
Pages are used once they are written to."""


def num_bytes(size: int) -> int:
    """Return the bytes of the memory that a number of ranks share: two slots for each rank."""
    return 2 * size * SLOT_BYTES
