"""The all-reduce of small tensors on GPUs that read each other's memory, in one launch; see `gpu.sum_ranks`."""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from kernels.arch import detect
from kernels.collective.gpu.sum_ranks import BLOCK, VECTOR, sum_ranks, sum_ranks_and_normalize
from kernels.gpu.dependent_launch import dependent_launch
from kernels.torch_private import share_memory

_MOST_BYTES: Final = 2 << 20
"""Largest tensor: each rank reads all parts, where NCCL's algorithms for large tensors send each byte twice at most."""
_MOST_PROGRAMS: Final = 512
_NUMBER_BYTES: Final = (2, 4)
_WARPS_PER_SM: Final = 32
"""All programs of a launch run at once: from sm_80 on an SM has room for 32 warps of at most 64 registers a thread."""
_SUM_WARPS: Final = 4
_WARP_COLUMNS: Final = 256
"""Columns of a warp that normalizes a row: a thread copies one vector."""
_MOST_WARPS: Final = 16


class _Slots:
    """Memory that the ranks share, for launches of one kernel: slots of two halves, and a flag for each program."""

    def __init__(self, size: int, device: torch.device) -> None:
        flag_bytes = 4 * _MOST_PROGRAMS * size
        self._memory, addresses = share_memory(2 * _MOST_BYTES + flag_bytes, device)
        slots = torch.tensor(addresses, dtype=torch.int64, device=device)
        launches = torch.zeros(_MOST_PROGRAMS, dtype=torch.int32, device=device)
        self.arguments = slots, slots + 2 * _MOST_BYTES, launches


class OneShotSum:
    """Adds a tensor over all ranks of the default process group, in their order.

    Attributes:
        most_warps: of a launch; must be the same on all ranks, since they decide by it whether to launch.

    Raises:
        RuntimeError: the GPUs cannot read each other's memory.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self._ranks = {"RANK": rank, "SIZE": size}
        # Launches for numbers of two sizes would divide the same slots among programs in two ways.
        self._summed = {it: _Slots(size, device) for it in _NUMBER_BYTES}
        self._normalized = _Slots(size, device)
        self._row_bytes: int | None = None
        self.most_warps = _WARPS_PER_SM * detect(device).num_sms

    def supports(self, x: Tensor) -> bool:
        """Whether one launch can add a tensor over all ranks.

        It can if `x` has at most 2 MiB, at most 2048 elements for each program that the GPU runs at once, and a
        multiple of 8 elements.
        """
        return self._fits(x, -(-x.numel() // BLOCK.value), _SUM_WARPS, x.numel())

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, float32 in the shape of `x`: the same bits on every rank.

        Args:
            x: any shape that `supports` accepts, the same on all ranks.
        """
        x = x.contiguous()
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        sum_ranks[(-(-x.numel() // BLOCK.value),)](
            x, out, *self._summed[x.element_size()].arguments, x.numel() // VECTOR.value,
            **self._ranks, HALF=_MOST_BYTES // x.element_size(), num_warps=_SUM_WARPS,
        )  # fmt: skip
        return out

    def normalizes(self, hidden: Tensor) -> bool:
        """Whether `add_and_normalize` supports a residual stream, [T, C].

        It does if that has at most 2 MiB, as many rows at most as the GPU runs programs at once, rows at multiples of
        8 elements, and the columns and dtype of the first one that it supported.
        """
        rows, columns = hidden.shape
        row_bytes = columns * hidden.element_size()
        return (
            self._fits(hidden, rows, _row_warps(columns), columns)
            and hidden.stride(0) % VECTOR.value == 0
            and self._row_bytes in (None, row_bytes)
        )

    def add_and_normalize(
        self, parts: Tensor, hidden: Tensor, weight: Tensor, eps: float, *, pdl: bool
    ) -> Tensor:
        """Add the partial sums of all ranks to the residual stream in place and compute its RMS norm, in one launch.

        A rank's partial sums are added and rounded to the dtype of `hidden` first.

        Args:
            parts: [S, T, C] contiguous, float32 or the dtype of `hidden`; of this rank.
            hidden: [T, C], contiguous in C, the same on all ranks, for which `normalizes` returns true; written.
            weight: [C], in the dtype of `hidden` or float32.
            eps: added to the mean square.
            pdl: use programmatic dependent launch.

        Returns:
            [T, C], a new tensor: the same bits on every rank.
        """
        rows, columns = hidden.shape
        # Slots are divided by rows, so all launches have rows of one size.
        self._row_bytes = columns * hidden.element_size()
        out = torch.empty((rows, columns), dtype=hidden.dtype, device=hidden.device)
        sum_ranks_and_normalize[(rows,)](
            hidden, parts, weight, out, *self._normalized.arguments, hidden.stride(0), rows, eps,
            C=columns, WIDTH=triton.next_power_of_2(columns), SPLITS=len(parts),
            **self._ranks, HALF=_MOST_BYTES // hidden.element_size(), num_warps=_row_warps(columns),
            **dependent_launch(pdl),
        )  # fmt: skip
        return out

    def _fits(self, x: Tensor, programs: int, num_warps: int, run: int) -> bool:
        """Whether a launch can exchange `x`, whose programs copy runs of a multiple of `run` elements."""
        most_programs = min(_MOST_PROGRAMS, self.most_warps // num_warps)
        return 0 < programs <= most_programs and x.nbytes <= _MOST_BYTES and run % VECTOR.value == 0


def _row_warps(columns: int) -> int:
    """Return the warps of a program that normalizes a row."""
    warps = 1 << (-(-columns // _WARP_COLUMNS) - 1).bit_length()
    return min(_MOST_WARPS, warps)
