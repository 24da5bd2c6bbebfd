"""Matrices of integers in the layout of the C library, which multiplies the numbers of a checkpoint as they are."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from kernels.quantizers import power_of_two
from kernels.weight_format import LIBRARY_GROUP, NARROW_GROUP, is_read_by_library
from kernels.weights import Weight, quantize

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.weight_format import WeightFormat

_PAIR: Final = 32
_ROWS: Final = 512
_WIDE_GROUP: Final = 64
"""Inputs whose activations share a scale with weights of 8 bits that have a scale for each output."""
_ONE_GROUP: Final = 62
"""Power of two of the groups that share a scale where an output has only one."""
_SIGN: Final = 128
"""Added to signed numbers, which the library stores without a sign."""


class CMatrix(ctypes.Structure):
    """`Matrix` of native/products.h."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("padded", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("scale_groups", ctypes.c_int64),
        ("group_bits", ctypes.c_int64),
        ("has_shifts", ctypes.c_int64),
        ("offset", ctypes.c_int64),
    )


class PackedMatrix:
    """A matrix of integers with scales; owns its memory.

    The numbers of a weight stay what they are if `is_read_by_library` and they have no more bits than those of `form`,
    to which other weights are rounded. Scales and shifts of groups are float16, times a float32 factor of the output:
    they lose at most 2^-12 of the largest of the output.

    Args:
        library: from `kernels.cpu.library.load`.
        weight: [N, C]; C is a multiple of 32.
        form: one of `LIBRARY_FORMATS`.
        bias: [N] or None.
        gated: whether `weight` is the gate's rows above those of up, which are then interleaved in tiles of 16.
        drop: called with the numbers of some rows when they are not read any more; not if it is gated.

    Attributes:
        c: the structure that the C functions take.
        format: of the numbers.
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
        drop: Callable[[Tensor], None] | None = None,
    ) -> None:
        outputs, inputs = weight.shape
        order = _interleaved(outputs) if gated else None
        is_kept = is_read_by_library(weight.format) and weight.format.bits <= form.bits
        self.format = weight.format if is_kept else form
        self._library = library
        layout = _layout(self.format, inputs)
        padded = -(-outputs // _PAIR) * _PAIR
        self.c = CMatrix(outputs=outputs, padded=padded, inputs=inputs, **layout)
        reference = ctypes.byref(self.c)
        weights = _allocated(library.tessera_weight_bytes(reference), padded)
        scales = _allocated(library.tessera_scale_bytes(reference), padded)
        factors = torch.zeros(padded)
        self.c.weights, self.c.scales = weights.data_ptr(), scales.data_ptr()
        self.c.factors = factors.data_ptr()
        self._tensors = [weights, scales, factors]
        if bias is not None:
            ordered = bias.float() if order is None else bias.float()[order]
            values = torch.zeros(padded)
            values[:outputs] = ordered
            self.c.bias = values.data_ptr()
            self._tensors.append(values)
        for first in range(0, outputs, _ROWS):
            stop = min(first + _ROWS, outputs)
            rows = weight.rows(first, stop) if order is None else weight.permuted(order[first:stop])
            arranged = _arranged(
                rows if is_kept else quantize(rows.dequantize(), form), self.c.scale_groups
            )
            factors[first:stop] = arranged.factors
            library.tessera_pack(
                reference,
                ctypes.c_int64(first),
                ctypes.c_int64(stop - first),
                *(ctypes.c_void_p(None if it is None else it.data_ptr()) for it in arranged[1:]),
            )
            if drop is not None:
                drop(weight.numbers[first:stop])

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def rows(self, index: Tensor) -> Tensor:
        """Return rows, [M] int64, as numbers, [M, C] float32; of a matrix that is not gated."""
        index = index.contiguous()
        out = torch.empty((len(index), self.c.inputs))
        address, count = ctypes.c_void_p(index.data_ptr()), ctypes.c_int64(len(index))
        self._library.tessera_rows(
            ctypes.byref(self.c), address, count, ctypes.c_void_p(out.data_ptr())
        )
        return out


def _allocated(num_bytes: int, padded: int) -> Tensor:
    """Return memory for rows that are packed in their order; only the last ones, which may be padding, are zeros.

    So pages are not used before their rows are packed, and `drop` may have returned others by then.
    """
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    memory[num_bytes - num_bytes // padded * _PAIR :] = 0
    return memory


def _layout(form: WeightFormat, inputs: int) -> dict[str, int]:
    """Return the fields of a matrix in a format that the library reads: scales of a group are a power of two apart."""
    by_row = form.scales == "row"
    group = form.group & -form.group
    is_narrow = not by_row and group < LIBRARY_GROUP
    # A scale of an output is a factor where nothing else needs scales.
    only_factors = by_row and form.bits == 8 and not form.shifts and inputs % _WIDE_GROUP == 0
    return {
        "bits": 8 if is_narrow else form.bits,
        "group": NARROW_GROUP if is_narrow else _WIDE_GROUP if only_factors else LIBRARY_GROUP,
        "scale_groups": 0 if only_factors else 1 if by_row else -(-inputs // group),
        "group_bits": _ONE_GROUP if by_row else (group // LIBRARY_GROUP or 1).bit_length() - 1,
        "has_shifts": int(form.shifts),
        "offset": form.offset + (_SIGN if form.dtype == "int8" else 0),
    }


class _Arranged(NamedTuple):
    """Rows of a matrix as `tessera_pack` takes them."""

    factors: Tensor
    numbers: Tensor
    scale: Tensor | None
    shift: Tensor | None


def _arranged(rows: Weight, scale_groups: int) -> _Arranged:
    """Return the numbers [N, C] uint8 of a weight, and its scales and shifts [N, scale_groups] by their factors [N]."""
    numbers = rows.unpacked().contiguous()
    if numbers.dtype is torch.int8:
        numbers = numbers.view(torch.uint8) ^ _SIGN
    assert rows.scale is not None
    if not scale_groups:
        return _Arranged(rows.scale.float(), numbers, None, None)
    parts = [_of_groups(rows, part, scale_groups) for part in rows.scales.values()]
    largest = torch.cat(parts, 1).abs().amax(1, keepdim=True)
    factors = power_of_two(largest)
    scale, *shift = (part / factors for part in parts)
    return _Arranged(factors[:, 0], numbers, scale, shift[0] if shift else None)


def _of_groups(rows: Weight, scale: Tensor, scale_groups: int) -> Tensor:
    """Return scales or shifts as float32 [N, scale_groups]; groups may have to be repeated."""
    form, wide = rows.format, scale.float().view(len(scale), -1)
    if form.scales == "block":
        wide = wide.repeat_interleave(form.group, 0)[: rows.shape[0]]
    if form.scales != "row":
        wide = wide.repeat_interleave(form.group // (form.group & -form.group), 1)
    return wide[:, :scale_groups].contiguous()


def _interleaved(outputs: int) -> Tensor:
    """Return the order of rows in which tiles of gate and up alternate."""
    tiles = torch.arange(outputs).view(2, -1, 16)
    return tiles.transpose(0, 1).flatten()
