"""What adapters add to products on a CPU, in one call of the C library; see native/rows.h.

The sums of a row are those of the row and its adapter, so its bits depend on no other row.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import torch

from kernels.cpu import workers
from kernels.cpu.decoder import CLora
from kernels.cpu.library import load

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kernels.linear.lora import LoraRows, LoraWeights

_LANES: Final = 16


class _Adaptation(ctypes.Structure):
    """`Adaptation` of native/rows.h."""

    _fields_ = (
        ("matrices", CLora),
        ("slots", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
    )


def computes(weights: LoraWeights) -> bool:
    """Return whether the library adds what adapters make of the rows of a product; otherwise PyTorch does."""
    sizes = weights.a.shape[-1], *weights.parts
    fits = len(weights.parts) <= CLora.MOST_PARTS and not any(it % _LANES for it in sizes)
    return fits and weights.a.dtype is torch.float32 and not isinstance(load(), str)


def begin_lora(
    x: Tensor,
    weights: LoraWeights,
    rows: LoraRows,
    *,
    pdl: bool = False,  # noqa: ARG001 - only kernels start early
) -> Callable[[Tensor], Tensor]:
    """See `kernels.linear.lora.begin_lora`."""

    def add(y: Tensor) -> Tensor:
        assert x.is_contiguous()
        assert y.stride(1) == 1
        assert x.dtype is y.dtype is torch.float32
        slots, (num_slots, rank, _) = rows.slots.contiguous(), weights.b.shape
        ranks = torch.full((num_slots,), rank)
        adaptation = _Adaptation(
            CLora.of(weights),
            slots.data_ptr(),
            ranks.data_ptr(),
            rank,
            x.data_ptr(),
            y.data_ptr(),
            y.stride(0),
            len(slots),
        )
        workers.call("tessera_adapt", adaptation)
        return y

    return add
