"""Ranks of a tensor-parallel model as threads of one process."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from kernels.collective.communicator import OrderedSum


class ThreadRanks:
    """The meeting point of `size` threads."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots = [None] * size

    def run(self, compute):
        """Call `compute(communicator)` for each rank in a thread of its own; return the results by rank."""

        def guarded(rank):
            try:
                return compute(ThreadCommunicator(self, rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.size)]
            errors = [it.exception() for it in futures]
            for error in errors:
                if error is not None and not isinstance(error, threading.BrokenBarrierError):
                    raise error
            return [it.result() for it in futures]


class ThreadCommunicator(OrderedSum):
    """A `Communicator` among threads."""

    def __init__(self, ranks, rank):
        self.rank, self.size, self._ranks = rank, ranks.size, ranks
        self.num_bytes = 0

    @contextlib.contextmanager
    def detached(self):
        yield

    def all_gather(self, x):
        self.num_bytes += x.nbytes
        return torch.stack(self._exchange(x))

    def broadcast(self, x):
        first = self._exchange(x)[0]
        if self.rank:
            x.copy_(first)
        self._ranks.barrier.wait()

    def minimum(self, number):
        return min(self._exchange(number))

    def _exchange(self, value):
        self._ranks.slots[self.rank] = value
        self._ranks.barrier.wait()
        found = list(self._ranks.slots)
        self._ranks.barrier.wait()
        return found
