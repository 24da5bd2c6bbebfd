"""The RMS norm of a group of Mamba-2 whose elements several ranks have: they exchange sums of squares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from kernels.collective.communicator import Communicator

PARTS: Final = 8
"""Sums of squares of a token that a rank exchanges, a power of two: the all-reduce in one launch takes multiples of 8
elements (`kernels.collective.one_shot`)."""


class DividedNorm:
    """Normalizes this rank's elements of a group; the norm of `Mamba2Shape`, after the gate.

    Args:
        weight: [inner], of this rank's elements, which are those of one group.
        eps: added to the mean square.
        num_ranks: that follow each other and have a group together; divides the number of ranks.
        communicator: of all ranks, which must call this at the same time for the same tokens.
    """

    def __init__(
        self, weight: Tensor, eps: float, num_ranks: int, communicator: Communicator
    ) -> None:
        assert communicator.size % num_ranks == 0
        self.weight, self.eps, self.count = weight, eps, num_ranks * len(weight)
        self._communicator = communicator
        self._groups = communicator.size // num_ranks
        self._group = communicator.rank // num_ranks

    def __call__(self, y: Tensor) -> Tensor:
        """Normalize y, [..., inner] contiguous, which may be overwritten."""
        rows = y.view(-1, y.shape[-1])
        new = torch.empty if self._groups == 1 else torch.zeros
        sums = new(len(rows), self._groups, PARTS, dtype=torch.float32, device=y.device)
        self.add_squares(rows, sums[:, self._group])
        total = self._communicator.all_reduce(sums.flatten(1)).view_as(sums)
        return self.normalize(rows, total[:, self._group]).view_as(y)

    def add_squares(self, y: Tensor, sums: Tensor) -> None:
        """Write sums of the squares of y, [T, inner], to `sums`, [T, PARTS] float32."""
        squares = functional.pad(y.float().square(), (0, -y.shape[1] % PARTS))
        torch.sum(torch.unflatten(squares, -1, (PARTS, -1)), -1, out=sums)

    def normalize(self, y: Tensor, total: Tensor) -> Tensor:
        """Normalize y, [T, inner], by the sums of squares of all ranks of the group, [T, PARTS] float32."""
        scale = torch.rsqrt(total.sum(-1, keepdim=True) / self.count + self.eps)
        return (y.float() * scale * self.weight.float()).to(y.dtype)
