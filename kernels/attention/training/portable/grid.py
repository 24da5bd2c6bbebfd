"""Tile sizes of the kernels of attention for training, by head dim and dtype. None is measured yet."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Final

import torch

from kernels.arch import HOPPER

if TYPE_CHECKING:
    from kernels.arch import GPUArch


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingLaunch:
    """Tile sizes of one kernel.

    Attributes:
        block_m: queries of a tile.
        block_n: keys of a tile.
        num_warps: warps of a program.
        num_stages: tiles in flight.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def within(self, mask_tile: tuple[int, int]) -> TrainingLaunch:
        """Return the launch with tiles that divide those of a block mask; (0, 0) for none."""
        block_m, block_n = (
            math.gcd(own, of_mask) if of_mask else own
            for own, of_mask in zip((self.block_m, self.block_n), mask_tile, strict=True)
        )
        return dataclasses.replace(self, block_m=block_m, block_n=block_n)


Launches = tuple[TrainingLaunch, TrainingLaunch, TrainingLaunch]
"""Of the forward, of the gradients of keys and values, and of that of queries."""

_L: Final = TrainingLaunch
_HALF: Final[dict[int, Launches]] = {
    64: (_L(128, 64, 8, 2), _L(64, 64, 8, 2), _L(64, 64, 4, 2)),
    128: (_L(128, 32, 8, 2), _L(64, 64, 8, 2), _L(64, 64, 8, 2)),
    256: (_L(64, 32, 8, 1), _L(32, 32, 8, 1), _L(32, 32, 4, 1)),
}
_HOPPER: Final[dict[int, Launches]] = {
    64: (_L(128, 64, 8, 3), _L(32, 128, 4, 3), _L(128, 64, 8, 3)),
    128: (_L(128, 128, 8, 3), _L(64, 128, 8, 3), _L(128, 64, 8, 3)),
    256: (_L(64, 64, 8, 1), _L(32, 32, 4, 1), _L(32, 32, 4, 1)),
}
_SINGLE: Final[dict[int, Launches]] = {
    64: (_L(32, 32, 4, 1), _L(16, 32, 4, 1), _L(32, 16, 4, 1)),
    128: (_L(32, 16, 8, 1), _L(16, 16, 8, 1), _L(16, 16, 8, 1)),
    256: (_L(16, 16, 8, 1), _L(16, 16, 8, 1), _L(16, 16, 8, 1)),
}
"""For float32."""


def training_launches(arch: GPUArch, head_dim: int, dtype: torch.dtype) -> Launches:
    """Return the launches for a head dim of at most 256."""
    table = _HALF if arch.unsupported(HOPPER, "wgmma is Hopper's") else _HOPPER
    if dtype is torch.float32:
        table = _SINGLE
    return next(launches for size, launches in table.items() if head_dim <= size)
