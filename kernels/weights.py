"""The matrices of linear layers, in any `kernels.weight_format.WeightFormat`.

`Weight.dequantize` defines what a format means: it is the reference of every kernel, and what a kernel falls back to
that does not read a format itself.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from kernels.fp8 import LARGEST_E4M3, SMALLEST_AMAX, quantize_rows
from kernels.weight_format import (
    FP8_ROWS,
    INT4_GROUPS,
    INT8_GROUPS,
    INT8_ROWS,
    WeightFormat,
    unquantized,
)

_DIVISORS: Final = tuple(7.0 + 0.25 * i for i in range(9))
"""Rough scales of a group in 4 bits are the largest magnitude divided by these."""
_LOW_BITS: Final = (1 << 13) - 1
"""Bits of a float32 number that float16 does not have."""
_ROWS_AT_ONCE: Final = 256
"""Rows whose numbers take several bytes each for a while: 4-bit ones that are sorted, FP8 as indices of a table."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix [N, C] in a format. Its tensors may be views of those of a larger one.

    Attributes:
        format: how it is stored.
        shape: (N, C).
        numbers: [N, C] of the format's dtype, or [N, C / 2] uint8 for 4 bits; contiguous.
        scale: of the format's `scale_dtype`, as `WeightFormat.scale_shape`; None where the format has none.
        shift: as `scale`; None where the format has none.
        order: [C] int32, the column of the matrix that each stored column is; None where they are in their own order.
    """

    format: WeightFormat
    shape: tuple[int, int]
    numbers: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None
    order: Tensor | None = None

    @classmethod
    def full(cls, numbers: Tensor) -> Weight:
        """Return a matrix [N, C] of full numbers as a weight."""
        outputs, inputs = numbers.shape
        return cls(unquantized(numbers.dtype), (outputs, inputs), numbers)

    @classmethod
    def empty(
        cls, form: WeightFormat, shape: tuple[int, int], device: torch.device | str
    ) -> Weight:
        """Allocate a matrix without values."""
        outputs, inputs = shape
        columns = inputs * form.bits // 8 if form.bits < 8 else inputs
        numbers = torch.empty((outputs, columns), dtype=getattr(torch, form.dtype), device=device)
        scales = [
            torch.empty(
                form.scale_shape(shape), dtype=getattr(torch, form.scale_dtype), device=device
            )
            for has in (form.is_quantized, form.shifts)
            if has
        ]
        made = cls(form, shape, numbers, *scales)
        if not form.ordered:
            return made
        return dataclasses.replace(
            made, order=torch.empty(inputs, dtype=torch.int32, device=device)
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it consists of, by the names of the attributes."""
        order = {} if self.order is None else {"order": self.order}
        return {"numbers": self.numbers, **self.scales, **order}

    @property
    def scales(self) -> dict[str, Tensor]:
        """Its scales and shifts, by the names of the attributes."""
        parts = {"scale": self.scale, "shift": self.shift}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}

    def rows(self, start: int, stop: int) -> Weight:
        """Return the outputs from `start` to `stop`; see `narrow`."""
        return self.narrow(0, start, stop - start)

    def columns(self, start: int, stop: int) -> Weight:
        """Return the inputs from `start` to `stop`; see `narrow`."""
        return self.narrow(1, start, stop - start)

    def narrow(self, dim: int, start: int, length: int) -> Weight:
        """Return some outputs (0) or inputs (1), as `Tensor.narrow`: numbers are views, and scales if none is divided.

        Scales that would be divided are repeated; the format of the result, `WeightFormat.divided`, has more of them.
        Some inputs of a matrix that has an order are a copy as full numbers: their groups have no size in common.

        Raises:
            ValueError: a byte with two numbers would be divided.
        """
        stop, size = start + length, self.shape[dim]
        if self.order is not None and dim == 1:
            return self if length == size else Weight.full(self.dequantize()[:, start:stop])
        ends = (end for end in (start, stop) if end < size)
        whole = self.refined(self.format.divided(dim, *ends))
        form = whole.format
        packed = 8 // form.bits if dim == 1 and form.bits < 8 else 1
        if start % packed or (stop % packed and stop < size):
            raise ValueError(f"{start} to {stop} of {size} inputs divides a byte of {form.name}")
        parts = {"numbers": whole.numbers.narrow(dim, start // packed, length // packed)}
        step = form.group if dim == 1 or form.scales == "block" else 1
        for name, scale in whole.scales.items():
            first = start // step if dim < scale.ndim else 0
            count = -(-stop // step) - first if dim < scale.ndim else len(scale)
            parts[name] = scale.narrow(min(dim, scale.ndim - 1), first, count)
        shape = (length, self.shape[1]) if dim == 0 else (self.shape[0], length)
        return Weight(form, shape, **parts, order=self.order)

    def split_with_sizes(self, sizes: Sequence[int]) -> list[Weight]:
        """Return stacked matrices of these numbers of outputs, as views.

        Raises:
            ValueError: they share scales.
        """
        ends = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
        if self.format.divided(0, *ends[:-1]) != self.format:
            raise ValueError(f"outputs {list(sizes)} divide blocks of {self.format.group}")
        return [self.rows(start, stop) for start, stop in itertools.pairwise(ends)]

    def refined(self, form: WeightFormat) -> Weight:
        """Return the same values with more scales; `form` is a result of `WeightFormat.divided`, maybe of several.

        Scales and shifts get its `scale_dtype`. Numbers get 8 bits if only it has them, and a matrix without shifts
        gets those of 0 if it has shifts.
        """
        if form == self.format:
            return self
        parts = {"numbers": self.numbers}
        if form.bits > self.format.bits or form.offset != self.format.offset:
            parts["numbers"] = (self.unpacked().short() - self.format.offset).to(torch.int8)
        scales = self.scales
        if form.shifts and self.scale is not None:
            scales.setdefault("shift", torch.zeros_like(self.scale))
        for name, scale in scales.items():
            wide = scale
            if self.format.scales == "block":
                wide = wide.repeat_interleave(self.format.group, 0)[: self.shape[0]]
            if form.group:
                wide = wide.repeat_interleave(self.format.group // form.group, 1)
                wide = wide[:, : form.scale_shape(self.shape)[1]].contiguous()
            parts[name] = wide.to(getattr(torch, form.scale_dtype))
        return Weight(form, self.shape, **parts, order=self.order)

    def scaled(self, factor: float | Tensor) -> Weight:
        """Return the values times a factor, or a factor of each output [N]; of full numbers in float32.

        Quantized numbers stay what they are, and their scales and shifts are multiplied, which become float32.
        """
        factor = torch.as_tensor(factor, dtype=torch.float32, device=self.numbers.device)
        column = factor[:, None] if factor.ndim else factor
        if self.scale is None:
            return Weight.full(self.numbers.float() * column)
        whole = self
        if factor.ndim and self.format.scales == "block":
            whole = self.refined(self.format.divided(0, 1))
        parts = {
            name: scale.float() * (factor if scale.ndim == 1 else column)
            for name, scale in whole.scales.items()
        }
        form = dataclasses.replace(whole.format, scale_dtype="float32")
        return Weight(form, self.shape, self.numbers, **parts, order=self.order)

    def permuted(self, order: Tensor) -> Weight:
        """Return the outputs with the indices `order`, [M] int64, as a copy.

        Blocks whose outputs stay together keep their scales; else each output gets scales of its own.
        """
        whole, place = self, order
        if self.format.scales == "block":
            blocks = order // self.format.group
            place = blocks[:: self.format.group]
            if not torch.equal(place.repeat_interleave(self.format.group)[: len(order)], blocks):
                whole, place = self.refined(self.format.divided(0, 1)), order
        parts = {name: scale[place.to(scale.device)] for name, scale in whole.scales.items()}
        numbers = self.numbers[order.to(self.numbers.device)]
        return Weight(whole.format, (len(order), self.shape[1]), numbers, **parts, order=self.order)

    def with_columns_sorted(self, order: Tensor) -> Weight:
        """Return a matrix whose stored columns are those of this one with the indices `order`, as a copy.

        Args:
            order: [C] int32; becomes that of the result, whose scales are those of this one.
        """
        assert self.order is None, "has an order already"
        index = order.to(self.numbers.device)
        numbers = torch.empty_like(self.numbers)
        for first in range(0, self.shape[0], _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            # Rows are copied several times as fast as columns.
            turned = _unpacked(self.numbers[rows].t().contiguous(), self.format.bits, dim=1)
            turned = turned.flatten(0, 1).index_select(0, index)
            numbers[rows] = _packed(turned, self.format.bits, dim=0).t()
        form = dataclasses.replace(self.format, ordered=True)
        return dataclasses.replace(self, format=form, numbers=numbers, order=order)

    def in_stored_order(self) -> Weight:
        """Return the matrix of the columns as they are stored, which is to be multiplied by `x[..., order]`."""
        form = dataclasses.replace(self.format, ordered=False)
        return dataclasses.replace(self, format=form, order=None)

    def detach(self) -> Weight:
        """Return it without gradients."""
        return dataclasses.replace(self, numbers=self.numbers.detach())

    def to(self, device: torch.device) -> Weight:
        """Return it on a device."""
        parts = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return Weight(self.format, self.shape, **parts)

    def copy_(self, source: Weight) -> None:
        """Write the values of a matrix of the same shape, rounded if this format is another and quantized.

        Raises:
            ValueError: numbers that would have to be rounded are not finite; the text is the end of a sentence.
        """
        if not self.format.is_quantized:
            self.numbers.copy_(source.dequantize())
            return
        if source.format.name in self.format.name.split("+"):
            source = source.refined(self.format)
        else:
            values = source.to(self.numbers.device).dequantize()
            if not bool(values.isfinite().all()):
                name = self.format.name
                raise ValueError(f"has weights that are not finite, which {name} cannot hold")
            source = quantize(values, self.format)
        for name, tensor in self.tensors.items():
            tensor.copy_(source.tensors[name])

    def unpacked(self) -> Tensor:
        """Return the numbers, [N, C], those of 4 bits one in a byte; not with an order, which a reader could miss."""
        assert self.order is None, "read them of `in_stored_order`, and gather the inputs"
        return _unpacked(self.numbers, self.format.bits, dim=-1).flatten(1)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values, [N, C], computed in float32 and then rounded to `dtype`.

        Args:
            dtype: of the result; None for that of full numbers, or float32.
        """
        form = self.format
        if not form.is_quantized:
            return self.numbers if dtype is None else self.numbers.to(dtype)
        if self.order is not None:
            own = self.order.to(self.numbers.device).argsort()
            return self.in_stored_order().dequantize(dtype).index_select(1, own)
        assert self.scale is not None
        values = _float32(self.unpacked())
        is_even = form.group > 0 and self.shape[1] % form.group == 0
        if is_even:
            values = values.view(self.shape[0], -1, form.group)
        if form.offset:
            values -= form.offset
        values *= self._spread(self.scale, is_even=is_even)
        if self.shift is not None:
            values += self._spread(self.shift, is_even=is_even)
        return values.view(self.shape).to(dtype or torch.float32)

    def _spread(self, scale: Tensor, *, is_even: bool) -> Tensor:
        """Return scales that are broadcast to [N, C], or to [N, groups, group] if all groups are whole."""
        if self.format.scales == "row":
            return scale[:, None]
        if self.format.scales == "block":
            scale = scale.repeat_interleave(self.format.group, 0)[: self.shape[0]]
        if is_even:
            return scale[..., None]
        return scale.repeat_interleave(self.format.group, 1)[:, : self.shape[1]]


def _float32(numbers: Tensor) -> Tensor:
    """Return numbers [N, C] in float32, as a copy.

    On a CPU a table of all numbers of FP8 converts 4 times as fast as PyTorch: 4.6 ms in place of 20.8 for 2048 x 2048,
    one thread of a Xeon.
    """
    if numbers.dtype is not torch.float8_e4m3fn or numbers.device.type != "cpu":
        return numbers.float()
    table, values = _fp8_values(), torch.empty(numbers.shape)
    for first in range(0, len(numbers), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        index = numbers[rows].view(torch.uint8).int().flatten()
        torch.index_select(table, 0, index, out=values[rows].view(-1))
    return values


@functools.cache
def _fp8_values() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def stacked_format(weights: Sequence[Weight]) -> WeightFormat | None:
    """Return the format that holds matrices above each other without loss; None if only full numbers do.

    Integers of several formats with scales for groups are held as int8. The name of that format has theirs, with "+"
    between.
    """
    first = weights[0].format
    ends = [sum(it.shape[0] for it in weights[:count]) for count in range(1, len(weights))]
    found = {it.format.divided(0, *ends) for it in weights}
    names = sorted({it.name for it in found})
    kinds = {(it.name, it.bits, it.float, it.offset, it.shifts, it.scales == "row") for it in found}
    has_order = any(it.order is not None for it in weights)
    if len(names) > 1 and not has_order and all(it.fits_int8 for it in found):
        shifts = any(it.shifts for it in found)
        found = {it.as_int8("+".join(names), shifts=shifts) for it in found}
        groups = [it.group for it in found]
        found = {dataclasses.replace(it, group=math.gcd(*groups)) for it in found}
    elif not first.is_quantized or len(kinds) > 1 or not _have_one_order(weights):
        return None
    if len({it.scale_dtype for it in found}) > 1:
        found = {dataclasses.replace(it, scale_dtype="float32") for it in found}
    if len(found) > 1:  # some have more scales than others
        inputs = [it.group for it in found]
        found = {it.divided(0, 1).divided(1, *inputs) for it in found}
    return found.pop()


def _have_one_order(weights: Sequence[Weight]) -> bool:
    first = weights[0].order
    return all(
        it.order is first
        or (it.order is not None and first is not None and torch.equal(it.order, first))
        for it in weights
    )


def _unpacked(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Return numbers with those of a byte in a new dimension, `dim`."""
    if bits >= 8:
        return packed.unsqueeze(dim)
    return torch.stack((packed & 15, packed >> 4), dim)


def _packed(numbers: Tensor, bits: int, dim: int = 1) -> Tensor:
    """Return numbers as they are stored, those of two indices of a dimension in a byte."""
    if bits >= 8:
        return numbers
    return (
        numbers[::2] | numbers[1::2] << 4 if dim == 0 else numbers[:, ::2] | numbers[:, 1::2] << 4
    )


def quantize(values: Tensor, form: WeightFormat) -> Weight:
    """Round a matrix to a format, which has scales.

    Args:
        values: [N, C], any float dtype; for `LIBRARY_FORMATS` C is a multiple of the format's group.
        form: the format; one with an order gets that of the inputs.

    Raises:
        ValueError: a scale would not be finite; the text is the end of a sentence.
    """
    outputs, inputs = values.shape
    if form.ordered:
        own = torch.arange(inputs, dtype=torch.int32, device=values.device)
        plain = quantize(values, dataclasses.replace(form, ordered=False))
        return dataclasses.replace(plain, format=form, order=own)
    quantizer = _QUANTIZERS.get(form, _float8_groups if form.float else _integers)
    numbers, *scales = quantizer(values, form)
    if not all(bool(scale.isfinite().all()) for scale in scales):
        raise ValueError(_overflow(values, form))
    return Weight(form, (outputs, inputs), numbers, *scales)


def _overflow(values: Tensor, form: WeightFormat) -> str:
    if not bool(values.isfinite().all()):
        return f"has weights that are not finite, which {form.name} cannot hold"
    largest = values.abs().max().item()
    return f"has weights up to {largest:.3g}, for which {form.name} has no finite scales"


def _integers(values: Tensor, form: WeightFormat) -> tuple[Tensor, ...]:
    """Round to whole numbers: with shifts, the range of a group to all numbers; else its largest magnitude."""
    shape = (outputs, inputs) = values.shape
    height, width = form.group if form.scales == "block" else 1, form.group or inputs
    wide = values.float()
    padded = functional.pad(wide, (0, -inputs % width, 0, -outputs % height))
    blocks = padded.unfold(0, height, height).unfold(1, width, width)
    lowest, highest = (-128, 127) if form.dtype == "int8" else (0, 2**form.bits - 1)
    dtype = getattr(torch, form.scale_dtype)
    low, high = blocks.amin((2, 3)), blocks.amax((2, 3))
    spans = (
        (high - low, highest - lowest)
        if form.shifts
        else (torch.maximum(-low, high), highest - form.offset)
    )
    scale = spans[0] / spans[1]
    scale = torch.where(scale > 0, scale, 1.0).to(dtype)
    made = [scale]
    if form.shifts:
        made.append((low - (lowest - form.offset) * scale.float()).to(dtype))
    spread = [
        it.float().repeat_interleave(height, 0).repeat_interleave(width, 1)[:outputs, :inputs]
        for it in made
    ]
    shifted = wide - spread[1] if form.shifts else wide
    numbers = (shifted / spread[0]).round_().add_(form.offset).clamp_(lowest, highest)
    packed = _packed(numbers.to(getattr(torch, form.dtype)), form.bits)
    return packed, *(it.reshape(form.scale_shape(shape)) for it in made)


def _float8_groups(values: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Round to 8 bits, the largest magnitude of each group or block to 448."""
    assert form.float, form
    outputs, inputs = values.shape
    height, width = form.group if form.scales == "block" else 1, form.group
    wide = values.float()
    padded = functional.pad(wide, (0, -inputs % width, 0, -outputs % height))
    blocks = padded.unfold(0, height, height).unfold(1, width, width)
    largest = blocks.abs().amax((2, 3))
    scale = torch.where(largest < SMALLEST_AMAX, 1.0, largest / LARGEST_E4M3)
    spread = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return (wide / spread[:outputs, :inputs]).to(torch.float8_e4m3fn), scale


def _int8_groups(values: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Round the largest magnitude of a group or row to 127, or a little less."""
    groups = values.float().view(len(values), -1, form.group or values.shape[1])
    # Rounded up, so that the largest number stays within 127.
    scale = _of_11_bits(groups.abs().amax(-1, keepdim=True) / 127, _LOW_BITS)
    inverse = torch.where(scale > 0, 1 / scale, 0)
    numbers = torch.round(groups * inverse).clamp_(-127, 127) + form.offset
    return numbers.flatten(1).to(torch.uint8), scale.view(form.scale_shape(values.shape))


def _int4_groups(values: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Of several scales for a group use the one with the least squared error, weighted by the magnitudes.

    Each candidate is the least-squares scale of the numbers that a rough scale results in. Without weights the error is
    smaller, but models lose more: large weights matter more than their share of the error.
    """
    groups = values.float().view(len(values), -1, form.group)
    unit = power_of_two(groups.abs().amax(-1, keepdim=True))  # squares of the values may overflow
    groups = groups / unit
    weights = groups.abs()
    extreme = groups.gather(-1, weights.argmax(-1, keepdim=True))
    best_scale, best_numbers = extreme, groups
    best_error = torch.full_like(extreme, torch.inf)
    for divisor in _DIVISORS:
        # -8 has no positive counterpart, so the largest number becomes about -8.
        rough = _int4_numbers(groups, extreme / -divisor)
        weighted = weights * rough
        norm = (weighted * rough).sum(-1, keepdim=True)
        scale = torch.where(norm > 0, (weighted * groups).sum(-1, keepdim=True) / norm, 0)
        scale = _of_11_bits(scale, _LOW_BITS // 2 + 1)
        numbers = _int4_numbers(groups, scale)
        error = (weights * (numbers * scale - groups).square()).sum(-1, keepdim=True)
        better = error < best_error
        best_scale = torch.where(better, scale, best_scale)
        best_numbers = torch.where(better, numbers, best_numbers)
        best_error = torch.where(better, error, best_error)
    packed = _packed((best_numbers + form.offset).to(torch.uint8).flatten(1), form.bits)
    return packed, (best_scale * unit)[..., 0]


def power_of_two(values: Tensor) -> Tensor:
    """Return for each value the next power of two above its magnitude; 1 for 0."""
    return torch.ldexp(torch.ones_like(values), torch.frexp(values).exponent)


def _int4_numbers(groups: Tensor, scale: Tensor) -> Tensor:
    inverse = torch.where(scale != 0, 1 / scale, 0)
    return torch.round(groups * inverse).clamp_(-8, 7)


def _of_11_bits(scale: Tensor, added: int) -> Tensor:
    """Return scales with 11 significant bits, as float16 has; `added` to the bits below decides the rounding."""
    return ((scale.view(torch.int32) + added) & ~_LOW_BITS).view(torch.float32)


_QUANTIZERS: Final[Mapping[WeightFormat, Callable[[Tensor, WeightFormat], tuple[Tensor, ...]]]] = {
    FP8_ROWS: lambda values, _: quantize_rows(values),
    INT8_ROWS: _int8_groups,
    INT8_GROUPS: _int8_groups,
    INT4_GROUPS: _int4_groups,
}
"""Of the formats to which weights are rounded when they are loaded, and of the bundled model's."""
