"""How the matrix of a linear layer is stored, apart from its values: full numbers, or quantized ones with scales.

A `WeightFormat` is hashable: registries select kernels by it. A `Weight` is a matrix in a format. `Weight.dequantize`
defines what each format means: it is the reference of every kernel, and what a kernel falls back to that does not read
a format itself.

    w[n, c] = (number[n, c] - zero[n, c]) * scale[n, c]

    scales      scale and zero of an element                       their shape
    "none"      1 and 0
    "row"       one for each output                                [N]
    "group"     one for each output and `group` inputs             [N, C / group]
    "block"     one for each `group` outputs and `group` inputs    [N / group, C / group], rounded up

Numbers of 4 bits lie two in a byte, the one of the lower column in the lower half.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, Literal

import torch
from torch import Tensor

from kernels.fp8 import FP8, quantize_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix is stored.

    Attributes:
        name: of the format; of a format without scales, that of its dtype.
        bits: of a number.
        group: inputs that share a scale (and outputs, of blocks); 0 where `scales` is "none" or "row".
        scales: which elements share a scale.
        zeros: whether numbers have a zero of their own, in the same shape as the scales.
        float: whether numbers are floating-point numbers; else integers.
        offset: subtracted from every number, for unsigned numbers without zeros.
    """

    name: str
    bits: int
    group: int = 0
    scales: Literal["none", "row", "group", "block"] = "none"
    zeros: bool = False
    float: bool = True
    offset: int = 0

    @property
    def is_quantized(self) -> bool:
        """Whether the numbers have scales."""
        return self.scales != "none"

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix of a shape [N, C]."""
        outputs, inputs = shape
        groups = -(-inputs // self.group) if self.group else 0
        return {
            "none": (),
            "row": (outputs,),
            "group": (outputs, groups),
            "block": (-(-outputs // self.group) if self.group else 0, groups),
        }[self.scales]

    def num_bytes(self, shape: Sequence[int], scale_bytes: int = 4) -> int:
        """Return the bytes of a matrix of a shape [N, C] whose scales have `scale_bytes` each."""
        outputs, inputs = shape
        scales = 1 if self.is_quantized else 0
        for size in self.scale_shape(shape):
            scales *= size
        return outputs * inputs * self.bits // 8 + scales * scale_bytes * (2 if self.zeros else 1)


def unquantized(dtype: torch.dtype | str) -> WeightFormat:
    """Return the format of full numbers of a dtype, or of the dtype of that name."""
    name = str(dtype).removeprefix("torch.")
    found: torch.dtype = getattr(torch, name)
    return WeightFormat(name, 8 * found.itemsize)


FP8_ROWS: Final = WeightFormat(FP8, 8, scales="row")
"""float8_e4m3fn with a float32 scale for each output (docs/decisions/0021-fp8-weights.md)."""
INT8_ROWS: Final = WeightFormat("int8", 8, scales="row", float=False, offset=128)
"""Numbers 1 to 255 in uint8, with a float32 scale for each output."""
INT4_GROUPS: Final = WeightFormat("int4", 4, group=32, scales="group", float=False, offset=8)
"""Numbers 0 to 15, with a float32 scale that float16 holds for each output and 32 inputs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [N, C] in a format. Its tensors may be views of those of a larger one.

    Attributes:
        format: how it is stored.
        shape: (N, C).
        numbers: [N, C] of the format's dtype, or [N, C / 2] uint8 for 4 bits; contiguous.
        scale: as `WeightFormat.scale_shape`; None where the format has none.
        zero: as `scale`; None where the format has none.
    """

    format: WeightFormat
    shape: tuple[int, int]
    numbers: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None

    @classmethod
    def full(cls, numbers: Tensor) -> Weight:
        """Return a matrix [N, C] of full numbers as a weight."""
        outputs, inputs = numbers.shape
        return cls(unquantized(numbers.dtype), (outputs, inputs), numbers)

    @classmethod
    def empty(
        cls,
        format: WeightFormat,
        shape: tuple[int, int],
        device: torch.device | str,
        scale_dtype: torch.dtype = torch.float32,
    ) -> Weight:
        """Allocate a matrix without values."""
        outputs, inputs = shape
        columns = inputs * format.bits // 8 if format.bits < 8 else inputs
        numbers = torch.empty((outputs, columns), dtype=numbers_dtype(format), device=device)
        scales = [
            torch.empty(format.scale_shape(shape), dtype=scale_dtype, device=device)
            for has in (format.is_quantized, format.zeros)
            if has
        ]
        return cls(format, shape, numbers, *scales)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it consists of, by the names of the attributes."""
        parts = {"numbers": self.numbers, "scale": self.scale, "zero": self.zero}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def rows(self, start: int, stop: int) -> Weight:
        """Return the outputs from `start` to `stop`, as views.

        Raises:
            ValueError: blocks of scales would be divided.
        """
        step = self.format.group if self.format.scales == "block" else 1
        return self._part(0, start, stop, step, 1)

    def columns(self, start: int, stop: int) -> Weight:
        """Return the inputs from `start` to `stop`, as views.

        Raises:
            ValueError: groups of scales, or bytes, would be divided.
        """
        packed = 8 // self.format.bits if self.format.bits < 8 else 1
        return self._part(1, start, stop, self.format.group or 1, packed)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values, [N, C], computed in float32 and then rounded to `dtype`.

        Args:
            dtype: of the result; None for that of full numbers, or float32.
        """
        form, scale, zero = self.format, self.scale, self.zero
        if not form.is_quantized:
            return self.numbers if dtype is None else self.numbers.to(dtype)
        assert scale is not None
        numbers = self.numbers
        if form.bits == 4:
            numbers = torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)
        values = numbers.float()
        if form.offset:
            values -= form.offset
        if zero is not None:
            values -= self._spread(zero)
        return (values * self._spread(scale)).to(dtype or torch.float32)

    def _spread(self, scale: Tensor) -> Tensor:
        """Return the scale of every element, broadcastable to [N, C]."""
        outputs, inputs = self.shape
        scale, group = scale.float(), self.format.group
        if self.format.scales == "row":
            return scale[:, None]
        if self.format.scales == "block":
            scale = scale.repeat_interleave(group, 0)[:outputs]
        return scale.repeat_interleave(group, 1)[:, :inputs]

    def _part(self, dim: int, start: int, stop: int, step: int, packed: int) -> Weight:
        size = self.shape[dim]
        ends = tuple(end for end in (start, stop) if end != size)
        if any(end % step or end % packed for end in ends):
            raise ValueError(
                f"{start} to {stop} of {size} divides groups of {max(step, packed)} in {self.format.name}"
            )
        shape = (stop - start, self.shape[1]) if dim == 0 else (self.shape[0], stop - start)
        numbers = self.numbers.narrow(dim, start // packed, (stop - start) // packed)

        def part(scale: Tensor | None) -> Tensor | None:
            if scale is None or dim >= scale.ndim:
                return scale
            first = start // step
            return scale.narrow(dim, first, -(-stop // step) - first)

        return Weight(self.format, shape, numbers, part(self.scale), part(self.zero))


def numbers_dtype(form: WeightFormat) -> torch.dtype:
    """Return the dtype of `Weight.numbers`."""
    if form.is_quantized and not form.float:
        return torch.uint8
    dtype: torch.dtype = getattr(torch, FP8 if form.is_quantized else form.name)
    return dtype


def stacked(weights: Sequence[Weight]) -> Weight:
    """Stack the outputs of matrices of one format and number of inputs; copies.

    Raises:
        ValueError: blocks of scales would be divided.
    """
    first = weights[0]
    step = first.format.group if first.format.scales == "block" else 1
    if any(weight.shape[0] % step for weight in weights[:-1]):
        sizes = ", ".join(str(weight.shape[0]) for weight in weights)
        raise ValueError(f"outputs {sizes} divide blocks of {step} in {first.format.name}")
    tensors = {
        name: torch.cat([weight.tensors[name] for weight in weights]) for name in first.tensors
    }
    return Weight(first.format, (sum(it.shape[0] for it in weights), first.shape[1]), **tensors)


def _int8_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    wide = values.float()
    scale = wide.abs().amax(1) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0)
    return (torch.round(wide * inverse[:, None]).clamp_(-127, 127) + 128).to(torch.uint8), scale


_CANDIDATES: Final = 8


def _int4_groups(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round to 4 bits; of several scales for a group the one with the least squared error is used."""
    groups = values.float().view(len(values), -1, INT4_GROUPS.group)
    index = groups.abs().argmax(-1, keepdim=True)
    extreme = groups.gather(-1, index)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for i in range(_CANDIDATES):
        # -8 has no positive counterpart, so the largest number becomes -8 or less.
        scale = (extreme / -(8.0 + 0.25 * (i - 2))).half().float()
        inverse = torch.where(scale != 0, 1 / scale, 0)
        numbers = torch.round(groups * inverse).clamp_(-8, 7)
        error = (numbers * scale - groups).square().sum(-1, keepdim=True)
        found = (error, scale, numbers)
        if best is not None:
            better = error < best[0]
            found = tuple(torch.where(better, a, b) for a, b in zip(found, best, strict=True))  # type: ignore[assignment]
        best = found
    assert best is not None
    numbers = (best[2] + INT4_GROUPS.offset).to(torch.uint8).flatten(1)
    return numbers[:, ::2] | numbers[:, 1::2] << 4, best[1][..., 0]


_QUANTIZERS: Final[Mapping[WeightFormat, Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    FP8_ROWS: quantize_rows,
    INT8_ROWS: _int8_rows,
    INT4_GROUPS: _int4_groups,
}


def quantize(values: Tensor, form: WeightFormat) -> Weight:
    """Round a matrix to a format that weights can be converted to: `FP8_ROWS`, `INT8_ROWS` or `INT4_GROUPS`.

    Args:
        values: [N, C], any float dtype; C is a multiple of the format's group.
        form: the format.
    """
    outputs, inputs = values.shape
    return Weight(form, (outputs, inputs), *_QUANTIZERS[form](values))
