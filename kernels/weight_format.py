"""How the matrix of a linear layer is stored, apart from its values: full numbers, or quantized ones with scales.

    w[n, c] = (number[n, c] - offset) * scale[n, c] + shift[n, c]

Where inputs have an order, this holds for the column `order[c]` of the matrix in place of c: groups are of columns that
are beside each other as they are stored.

    scales      scale and shift of an element                      their shape
    "none"      1 and 0
    "row"       one for each output                                [N]
    "group"     one for each output and `group` inputs             [N, C / group], rounded up
    "block"     one for each `group` outputs and `group` inputs    [N / group, C / group], rounded up

`kernels.weights.Weight` is a matrix in a format. This module does not import PyTorch, because the front end reads the
formats of checkpoints.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, Literal

ORDER_BYTES: Final = 4
"""Bytes of the index of a column."""
_FULL_BITS: Final = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


@dataclasses.dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix is stored. Hashable: kernels are selected by it.

    Attributes:
        name: for plans and reasons; of a format without scales, that of its dtype.
        bits: of a number. Numbers of 4 bits lie two in a byte, the one of the lower column in the lower half.
        group: inputs that share a scale (and outputs, of blocks); 0 where `scales` is "none" or "row".
        scales: which elements share a scale.
        shifts: whether each scale has a shift, which is added.
        float: whether numbers are floating-point numbers; else integers.
        offset: subtracted from every number.
        scale_dtype: name of the dtype of scales and shifts.
        ordered: whether the columns are stored in another order than that of the inputs.
    """

    name: str
    bits: int
    group: int = 0
    scales: Literal["none", "row", "group", "block"] = "none"
    shifts: bool = False
    float: bool = True
    offset: int = 0
    scale_dtype: str = "float32"
    ordered: bool = False

    @property
    def is_quantized(self) -> bool:
        """Whether the numbers have scales."""
        return self.scales != "none"

    @property
    def dtype(self) -> str:
        """Name of the dtype of the numbers; that of the bytes that hold them if they have no dtype of their own."""
        if not self.is_quantized:
            return self.name
        if self.float:
            return "float8_e4m3fn"
        return "int8" if self.bits == 8 and not self.offset else "uint8"

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix of a shape [N, C]; without scales ()."""
        outputs, inputs = shape
        if self.scales == "none":
            return ()
        if self.scales == "row":
            return (outputs,)
        rows = outputs if self.scales == "group" else -(-outputs // self.group)
        return (rows, -(-inputs // self.group))

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a matrix of a shape [N, C], with its scales, shifts and order."""
        outputs, inputs = shape
        numbers = outputs * (inputs * self.bits // 8)
        scales = math.prod(self.scale_shape(shape)) if self.is_quantized else 0
        scale_bytes = (1 + self.shifts) * scales * _FULL_BITS[self.scale_dtype] // 8
        return numbers + scale_bytes + ORDER_BYTES * self.ordered * inputs

    @property
    def fits_int8(self) -> bool:
        """Whether `as_int8` holds the numbers: they are integers with scales for groups, in the range of int8."""
        in_range = self.bits < 8 or self.offset == (0 if self.dtype == "int8" else 128)
        return self.scales == "group" and not self.float and in_range

    def as_int8(self, name: str, *, shifts: bool) -> WeightFormat:
        """Return the format that has these numbers, less their offset, as int8; `fits_int8` must hold.

        Args:
            name: of the format.
            shifts: whether it has shifts, which those of a matrix without are 0.
        """
        return dataclasses.replace(self, name=name, bits=8, offset=0, shifts=shifts)

    def divided(self, dim: int, *ends: int) -> WeightFormat:
        """Return the format in which no scale is on both sides of an end: this one, or one with more scales.

        Args:
            dim: 0 for outputs, 1 for inputs.
            ends: where a matrix is divided.
        """
        if not self.group or not any(end % self.group for end in ends):
            return self
        if dim == 1:
            return dataclasses.replace(self, scales="group", group=math.gcd(self.group, *ends))
        return dataclasses.replace(self, scales="group")


def unquantized(dtype: object) -> WeightFormat:
    """Return the format of full numbers of a dtype, given as PyTorch's or by name."""
    name = str(dtype).removeprefix("torch.")
    return WeightFormat(name, _FULL_BITS[name])


FP8_ROWS: Final = WeightFormat("float8_e4m3fn", 8, scales="row")
"""With a float32 scale for each output (docs/decisions/0021-fp8-weights.md)."""
INT8_ROWS: Final = WeightFormat("int8", 8, scales="row", float=False, offset=128)
"""Numbers 1 to 255, with a float32 scale for each output."""
INT8_GROUPS: Final = WeightFormat("int8", 8, group=32, scales="group", float=False, offset=128)
"""Numbers 1 to 255, with a scale of 11 bits for each output and 32 inputs."""
INT4_GROUPS: Final = WeightFormat("int4", 4, group=32, scales="group", float=False, offset=8)
"""Numbers 0 to 15, with a scale of 11 bits for each output and 32 inputs."""
SCALE_BYTES: Final = 4
"""Bytes of the scale of a key or a value in a quantized cache."""
LIBRARY_FORMATS: Final = (INT8_GROUPS, INT4_GROUPS)
"""Formats to which weights are rounded for the C library for CPUs (`kernels.cpu`), which reads others besides."""
LIBRARY_GROUP: Final = 32
"""Inputs whose activations share a scale in the C library, with few exceptions."""
NARROW_GROUP: Final = 16
"""The least number of inputs that share a scale of a weight there."""


def is_read_by_library(form: WeightFormat) -> bool:
    """Whether the C library for CPUs multiplies the numbers of a format as they are."""
    is_divided = form.group % NARROW_GROUP == 0
    is_integer = form.is_quantized and not form.float and form.bits in (4, 8)
    return is_integer and is_divided and not form.ordered
