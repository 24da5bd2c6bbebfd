"""Weights of 8 or 4 bits, in the layout of the C library.

8 bits: w ~ scale * q of each output, q in -127 .. 127, scale = max|w| / 127.
4 bits: w ~ scale * (q - 8) of each output and group of 32 inputs, q in 0 .. 15, scale in float16.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

GROUP8: Final = 64
"""Inputs whose activations share a scale, in a product with 8-bit weights."""
GROUP4: Final = 32
"""Inputs whose weights, and whose activations, share a scale in a product with 4-bit weights."""
_PAIR: Final = 32
_ROWS: Final = 4096
_CANDIDATES: Final = 8


class CMatrix(ctypes.Structure):
    """`Matrix` of native/products.h."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("padded", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("bits", ctypes.c_int64),
    )


def quantize_8_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [N, C] to numbers [N, C] uint8 with an offset of 128 and scales [N] float32."""
    weight = weight.float()
    scale = weight.abs().amax(1) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0)
    numbers = torch.round(weight * inverse[:, None]).clamp_(-127, 127) + 128
    return numbers.to(torch.uint8), scale


def quantize_4_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize [N, C] to numbers [N, C] uint8 with an offset of 8 and scales [N, C / 32] float32.

    Of several scales for a group the one with the least squared error is used.
    """
    groups = weight.float().view(len(weight), -1, GROUP4)
    index = groups.abs().argmax(-1, keepdim=True)
    extreme = groups.gather(-1, index)
    best_scale = best_numbers = best_error = None
    for i in range(_CANDIDATES):
        # -8 has no positive counterpart, so the largest number becomes -8 or less.
        scale = (extreme / -(8.0 + 0.25 * (i - 2))).half().float()
        inverse = torch.where(scale != 0, 1 / scale, 0)
        numbers = torch.round(groups * inverse).clamp_(-8, 7)
        error = (numbers * scale - groups).square().sum(-1, keepdim=True)
        if best_error is None or best_scale is None or best_numbers is None:
            best_scale, best_numbers, best_error = scale, numbers, error
            continue
        better = error < best_error
        best_scale = torch.where(better, scale, best_scale)
        best_numbers = torch.where(better, numbers, best_numbers)
        best_error = torch.where(better, error, best_error)
    assert best_numbers is not None
    assert best_scale is not None
    return (best_numbers + 8).to(torch.uint8).flatten(1), best_scale[..., 0]


QUANTIZERS: Final[dict[int, Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    8: quantize_8_bits,
    4: quantize_4_bits,
}


class PackedMatrix:
    """A matrix of quantized weights; owns its memory.

    Args:
        library: from `kernels.cpu.library.load`.
        weight: [N, C] of any float dtype; C is a multiple of 64.
        bits: 8 or 4.
        bias: [N] or None.
        gated: whether `weight` is the gate's rows above those of up, which are then interleaved in tiles of 16.

    Attributes:
        c: the structure that the C functions take.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor,
        bits: int,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
    ) -> None:
        outputs, inputs = weight.shape
        order = _interleaved(outputs) if gated else None
        padded = -(-outputs // _PAIR) * _PAIR
        self.c = CMatrix(outputs=outputs, padded=padded, inputs=inputs, bits=bits)
        reference = ctypes.byref(self.c)
        weights = torch.zeros(library.tessera_weight_bytes(reference), dtype=torch.uint8)
        scales = torch.zeros(library.tessera_scale_bytes(reference), dtype=torch.uint8)
        self.c.weights, self.c.scales = weights.data_ptr(), scales.data_ptr()
        self._tensors = [weights, scales]
        if bias is not None:
            ordered = bias.float() if order is None else bias.float()[order]
            values = torch.zeros(padded)
            values[:outputs] = ordered
            self.c.bias = values.data_ptr()
            self._tensors.append(values)
        for first in range(0, outputs, _ROWS):
            rows = (
                weight[first : first + _ROWS]
                if order is None
                else weight[order[first : first + _ROWS]]
            )
            numbers, row_scales = (part.contiguous() for part in QUANTIZERS[bits](rows))
            library.tessera_pack(
                reference,
                ctypes.c_int64(first),
                ctypes.c_int64(len(rows)),
                ctypes.c_void_p(numbers.data_ptr()),
                ctypes.c_void_p(row_scales.data_ptr()),
            )

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds."""
        return sum(tensor.nbytes for tensor in self._tensors)


def _interleaved(outputs: int) -> Tensor:
    """Return the order of rows in which tiles of gate and up alternate."""
    tiles = torch.arange(outputs).view(2, -1, 16)
    return tiles.transpose(0, 1).flatten()
