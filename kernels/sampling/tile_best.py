"""What the tiles of an output head leave for the argmax."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TileBest(NamedTuple):
    """The results of each tile of outputs from which `kernels.sampling.gpu.best_token` computes the argmax.

    Attributes:
        keys: [rows, tiles] int64 contiguous, the largest key.
        totals: [rows, tiles] float32 contiguous, the sum of exp(output - largest of the tile).
    """

    keys: Tensor
    totals: Tensor

    @classmethod
    def empty(cls, rows: int, tiles: int, device: torch.device | str) -> TileBest:
        """Allocate both tensors."""
        return cls(
            torch.empty((rows, tiles), dtype=torch.int64, device=device),
            torch.empty((rows, tiles), dtype=torch.float32, device=device),
        )
