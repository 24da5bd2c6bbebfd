"""Collective operations among ranks, the processes that compute a model together.

All ranks call the same operations in the same order with tensors of the same shape and dtype. Sums are computed in the
order of the ranks, so that every rank has the same bits, whatever else the tensors contain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from kernels.errors import KernelError
from kernels.norms.pytorch import sum_in_order


class RankLostError(KernelError):
    """A rank has ended, so that no collective operation can be completed any more.

    Args:
        rank: that ended.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has ended")


class Communicator(Protocol):
    """Connects this process, one of N ranks, to the others.

    Attributes:
        rank: 0 to N - 1.
        size: N.
        fuses_norm: whether `add_and_normalize` computes small residual streams. Projections then leave it the partial
            sums of a split product, which otherwise would take launches to add.
    """

    rank: int
    size: int
    fuses_norm: bool

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x, [T, C], over all ranks; returns a new tensor [T, C] in float32, the same bits on each rank."""

    def summands(self, x: Tensor) -> Tensor:
        """Return tensors whose sum in their order is that of x, [T, C], over all ranks.

        A kernel that reads the sum can add several of them itself.

        Returns:
            A new tensor, [N, T, C] in the dtype of x or [1, T, C] float32.
        """

    def add_and_normalize(
        self, parts: Tensor, hidden: Tensor, weight: Tensor, eps: float, *, pdl: bool
    ) -> Tensor | None:
        """Add the partial sums of all ranks to the residual stream in place and compute its RMS norm, in one launch.

        Args:
            parts: [S, T, C] contiguous, of this rank, float32 or the dtype of `hidden`.
            hidden: [T, C], contiguous in C, the same on all ranks; written.
            weight: [C], in the dtype of `hidden` or float32.
            eps: added to the mean square.
            pdl: use programmatic dependent launch.

        Returns:
            [T, C], a new tensor, the same bits on each rank; or None, with nothing done, where it takes several
            launches.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, [N, ...] for x of [...], in the order of the ranks."""

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x with that of rank 0."""

    def minimum(self, number: int) -> int:
        """Return the smallest number of all ranks."""

    def detached(self) -> AbstractContextManager[None]:
        """Return a context within which ranks do not communicate: each takes its own tensor for that of all others.

        It serves to compile kernels and to measure memory, which ranks do at their own pace.
        """


class OrderedSum:
    """The all-reduce of communicators that gather: every rank adds the parts of all ranks in their order."""

    fuses_norm = False
    _detached = False

    @contextlib.contextmanager
    def detached(self) -> Iterator[None]:
        """See `Communicator.detached`."""
        self._detached = True
        try:
            yield
        finally:
            self._detached = False

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Communicator.all_gather`."""
        raise NotImplementedError

    def summands(self, x: Tensor) -> Tensor:
        """See `Communicator.summands`; the parts of all ranks."""
        return self.all_gather(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Communicator.all_reduce`."""
        return sum_in_order(self.summands(x))

    def add_and_normalize(
        self, _parts: Tensor, _hidden: Tensor, _weight: Tensor, _eps: float, *, pdl: bool
    ) -> Tensor | None:
        """See `Communicator.add_and_normalize`; it takes several launches."""
        del pdl
        return None


class AbsentRanks(OrderedSum):
    """Rank 0 of a group whose other ranks do not exist, to plan and to compile; see `Communicator.detached`.

    Args:
        size: number of ranks.
        fuses_norm: see `Communicator`; on a GPU whether the GPUs would read each other's memory.
    """

    rank = 0

    def __init__(self, size: int, *, fuses_norm: bool = False) -> None:
        self.size, self.fuses_norm = size, fuses_norm

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Communicator.all_gather`."""
        return repeated(x, self.size)

    def broadcast(self, x: Tensor) -> None:
        """See `Communicator.broadcast`."""

    def minimum(self, number: int) -> int:
        """See `Communicator.minimum`."""
        return number


def repeated(x: Tensor, size: int) -> Tensor:
    """Return what ranks gather that all have x, [size, ...] for x of [...]."""
    return x.expand(size, *x.shape).contiguous()
