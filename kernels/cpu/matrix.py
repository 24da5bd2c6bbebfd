"""Weights in `INT8_ROWS` or `INT4_GROUPS`, in the layout of the C library."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kernels.weights import Weight, converted

if TYPE_CHECKING:
    from kernels.weight_format import WeightFormat

GROUP8: Final = 64
"""Inputs whose activations share a scale, in a product with 8-bit weights."""
_PAIR: Final = 32
_ROWS: Final = 4096


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


class PackedMatrix:
    """A matrix of quantized weights; owns its memory.

    Args:
        library: from `kernels.cpu.library.load`.
        weight: [N, C] in any format; C is a multiple of 64.
        form: `INT8_ROWS` or `INT4_GROUPS`, to which weights are rounded whose numbers are others.
        bias: [N] or None.
        gated: whether `weight` is the gate's rows above those of up, which are then interleaved in tiles of 16.

    Attributes:
        c: the structure that the C functions take.
    """

    @torch.no_grad()
    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Weight,
        form: WeightFormat,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
    ) -> None:
        outputs, inputs = weight.shape
        order = _interleaved(outputs) if gated else None
        padded = -(-outputs // _PAIR) * _PAIR
        self.c = CMatrix(outputs=outputs, padded=padded, inputs=inputs, bits=form.bits)
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
            stop = min(first + _ROWS, outputs)
            rows = weight.rows(first, stop) if order is None else weight.permuted(order[first:stop])
            rows = converted(rows, form)
            assert rows.scale is not None
            numbers, row_scales = rows.unpacked().contiguous(), rows.scale.contiguous()
            library.tessera_pack(
                reference,
                ctypes.c_int64(first),
                ctypes.c_int64(stop - first),
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
