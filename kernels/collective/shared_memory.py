"""Collective operations of ranks on CPUs, in memory that they share.

A rank writes its tensor to its slot, sends a byte to each other rank, and reads all slots once it has a byte from each.
There are two slots for each rank, used in turn. A rank that writes to one of them for the second time has a byte of the
operation in between from every rank, all of which have therefore read it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.collective.communicator import OrderedSum, RankLostError, repeated
from kernels.collective.endpoint import SLOT_BYTES, RankEndpoint, num_bytes
from kernels.norms.pytorch import sum_in_order

if TYPE_CHECKING:
    from collections.abc import Iterator


class SharedMemoryCommunicator(OrderedSum):
    """Communicates with the other ranks of this host by memory and sockets; for tensors on the CPU.

    An operation waits for the slowest rank, however long that takes. It raises as soon as a rank has ended.

    Args:
        endpoint: of this rank. Its descriptors stay the caller's, and open as long as this object is used.

    Raises:
        OSError: the operating system refuses.
    """

    def __init__(self, endpoint: RankEndpoint) -> None:
        self.rank, self.size = endpoint.rank, endpoint.size
        self._peers = [(i, peer) for i, peer in enumerate(endpoint.peers) if i != self.rank]
        memory = mmap.mmap(endpoint.memory, num_bytes(self.size))
        self._slots = torch.frombuffer(memory, dtype=torch.uint8).view(2, self.size, SLOT_BYTES)
        self._turn = 0

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Communicator.all_gather`.

        Raises:
            RankLostError: a rank has ended.
        """
        if self._detached:
            return repeated(x, self.size)
        out = x.new_empty(self.size, *x.shape)
        mine, all_ranks = _bytes_of(x[None]), _bytes_of(out)
        # Also once for a tensor without elements: all ranks meet as often.
        for start in range(0, max(1, x.nbytes), SLOT_BYTES):
            part = slice(start, start + SLOT_BYTES)
            all_ranks[:, part] = self._exchange(mine[:, part])
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Communicator.all_reduce`; adds up where the parts lie.

        Raises:
            RankLostError: a rank has ended.
        """
        if self._detached or x.nbytes > SLOT_BYTES:
            return super().all_reduce(x)
        parts = self._exchange(_bytes_of(x[None]))
        return sum_in_order(parts.view(x.dtype).view(self.size, *x.shape))

    def broadcast(self, x: Tensor) -> None:
        """See `Communicator.broadcast`.

        Raises:
            RankLostError: a rank has ended.
        """
        if not self._detached:
            x.copy_(self.all_gather(x)[0])

    def minimum(self, number: int) -> int:
        """See `Communicator.minimum`.

        Raises:
            RankLostError: a rank has ended.
        """
        return int(self.all_gather(torch.tensor([number])).min())

    def _exchange(self, part: Tensor) -> Tensor:
        """Give bytes, [1, B], to all ranks; return theirs, [N, B], which are valid until the next call but one."""
        slots = self._slots[self._turn, :, : part.shape[1]]
        self._turn = 1 - self._turn
        slots[self.rank] = part[0]
        for rank, peer in self._peers:
            with _lost_at_error(rank):
                os.write(peer, b"\0")
        for rank, peer in self._peers:
            with _lost_at_error(rank):
                if not os.read(peer, 1):
                    raise ConnectionResetError
        return slots


@contextlib.contextmanager
def _lost_at_error(rank: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RankLostError(rank) from error


def _bytes_of(x: Tensor) -> Tensor:
    """Return the bytes of each element of the first dimension: [N, B] for [N, ...]; a view if x is contiguous."""
    return x.reshape(len(x), -1).view(torch.uint8)
