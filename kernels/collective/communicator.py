"""Collective operations among ranks, the processes that compute a model together.

All ranks call the same operations in the same order with tensors of the same shape and dtype. Sums are computed in the
order of the ranks, so that every rank has the same bits, whatever else the tensors contain.
"""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, distributed

from kernels.norms.pytorch import sum_in_order

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.collective.one_shot import OneShotSum

_logger = logging.getLogger(__name__)

# PyTorch 2.13 renamed it; 2.11 has only the old name.
_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


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

    def detached(self) -> AbstractContextManager[None]:
        """See `Communicator.detached`; it always is."""
        return contextlib.nullcontext()

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Communicator.all_gather`."""
        return _repeated(x, self.size)

    def broadcast(self, x: Tensor) -> None:
        """See `Communicator.broadcast`."""

    def minimum(self, number: int) -> int:
        """See `Communicator.minimum`."""
        return number


def _repeated(x: Tensor, size: int) -> Tensor:
    return x.expand(size, *x.shape).contiguous()


class TorchCommunicator(OrderedSum):
    """Communicates by `torch.distributed`: gloo for tensors on a CPU, NCCL for those on a GPU.

    Args:
        rank: of this process.
        size: number of ranks.
        store: path of a file that does not exist yet, the same for all ranks; they find each other by it.
        device: of the tensors; a GPU of its own for each rank.
    """

    def __init__(self, rank: int, size: int, store: str, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._detached = False
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        distributed.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=size
        )
        self._one_shot = None if device.type == "cpu" else _one_shot(rank, size, device)
        self.fuses_norm = self._one_shot is not None

    def summands(self, x: Tensor) -> Tensor:
        """See `Communicator.summands`; the sum if one launch can compute it, which is for small tensors on GPUs."""
        if self._one_shot is None or self._detached or not self._one_shot.supports(x):
            return self.all_gather(x)
        return self._one_shot(x)[None]

    def add_and_normalize(
        self, parts: Tensor, hidden: Tensor, weight: Tensor, eps: float, *, pdl: bool
    ) -> Tensor | None:
        """See `Communicator.add_and_normalize`; for small tensors on GPUs."""
        if self._one_shot is None or self._detached or not self._one_shot.normalizes(hidden):
            return None
        return self._one_shot.add_and_normalize(parts, hidden, weight, eps, pdl=pdl)

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
        if self._detached:
            return _repeated(x, self.size)
        out = x.new_empty(self.size, *x.shape)
        _gather(out.flatten(0, 1), x.contiguous())
        return out

    def broadcast(self, x: Tensor) -> None:
        """See `Communicator.broadcast`."""
        if not self._detached:
            distributed.broadcast(x, 0)

    def minimum(self, number: int) -> int:
        """See `Communicator.minimum`."""
        found = torch.tensor([number])
        distributed.all_reduce(found, distributed.ReduceOp.MIN)
        return int(found)


def _one_shot(rank: int, size: int, device: torch.device) -> OneShotSum | None:
    """Return the all-reduce in one launch if all ranks have it; else log why this one has not, and return None."""
    from kernels.collective.one_shot import OneShotSum  # noqa: PLC0415 - a host without a GPU may have no Triton

    found = None
    try:
        found = OneShotSum(rank, size, device)
    except (ImportError, RuntimeError) as error:
        _logger.warning("rank %d sums by NCCL, which is slower for small steps: %s", rank, error)
    most_warps = torch.tensor([found.most_warps if found else 0])
    distributed.all_reduce(most_warps, distributed.ReduceOp.MIN)
    if found:
        found.most_warps = int(most_warps)
    return found if most_warps.item() else None
