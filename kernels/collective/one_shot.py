"""The all-reduce of small tensors on GPUs that read each other's memory, in one launch; see `gpu.sum_ranks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from kernels.arch import detect
from kernels.collective.gpu.sum_ranks import BLOCK, VECTOR, sum_ranks
from kernels.torch_private import share_memory

if TYPE_CHECKING:
    from torch import Tensor

_MOST_BYTES: Final = 2 << 20
"""Largest tensor: each rank reads all parts, where NCCL's algorithms for large tensors send each byte twice at most."""
_MOST_PROGRAMS: Final = 512
_PROGRAMS_PER_SM: Final = 8
"""All programs of a launch run at once: from sm_80 on an SM has room for 12 thread blocks of four warps."""
_NUM_WARPS: Final = 4


class OneShotSum:
    """Adds a tensor over all ranks of the default process group, in their order.

    Args:
        rank: of this process.
        size: number of ranks.
        device: the GPU of this rank.

    Attributes:
        most_programs: of a launch; must be the same on all ranks, since they decide by it whether to launch.

    Raises:
        RuntimeError: the GPUs cannot read each other's memory.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self._rank, self._size = rank, size
        flag_bytes = 4 * _MOST_PROGRAMS * size
        self._memory, addresses = share_memory(2 * _MOST_BYTES + flag_bytes, device)
        self._slots = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._flags = self._slots + 2 * _MOST_BYTES
        self.most_programs = min(_MOST_PROGRAMS, _PROGRAMS_PER_SM * detect(device).num_sms)
        self._launches = torch.zeros(_MOST_PROGRAMS, dtype=torch.int32, device=device)

    def supports(self, x: Tensor) -> bool:
        """Whether a tensor is small enough: at most 2 MiB and `most_programs` times 2048 elements, a multiple of 8."""
        num_elements = x.numel()
        return (
            0 < num_elements <= self.most_programs * BLOCK.value
            and num_elements * x.element_size() <= _MOST_BYTES
            and num_elements % VECTOR.value == 0
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, float32 in the shape of `x`: the same bits on every rank.

        Args:
            x: any shape that `supports` accepts, the same on all ranks.
        """
        x = x.contiguous()
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        sum_ranks[(-(-x.numel() // BLOCK.value),)](
            x, out, self._slots, self._flags, self._launches, x.numel() // VECTOR.value,
            RANK=self._rank, SIZE=self._size, HALF=_MOST_BYTES // x.element_size(), num_warps=_NUM_WARPS,
        )  # fmt: skip
        return out
