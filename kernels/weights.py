"""The matrices of linear layers, in any `kernels.weight_format.WeightFormat`.

`Weight.dequantize` defines what a format means: it is the reference of every kernel, and what a kernel falls back to
that does not read a format itself.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kernels.quantizers import pack_bytes, rounded, unpack_bytes
from kernels.weight_format import WeightFormat, unquantized

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
        order: [C] int32, the column of the matrix that each stored column is; None where that is their place.
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

    def gather(self, index: Tensor) -> Weight:
        """Return the outputs with any indices, [M] int64 on its device, as a copy, without waiting for the device."""
        form = self.format.divided(0, 1)
        place = index // self.format.group if self.format.scales == "block" else index
        scales = {name: scale[place] for name, scale in self.scales.items()}
        shape = (len(index), self.shape[1])
        return Weight(form, shape, self.numbers[index], **scales, order=self.order)

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
            turned = unpack_bytes(self.numbers[rows].t().contiguous(), self.format.bits, dim=1)
            turned = turned.flatten(0, 1).index_select(0, index)
            numbers[rows] = pack_bytes(turned, self.format.bits, dim=0).t()
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
        return unpack_bytes(self.numbers, self.format.bits, dim=-1).flatten(1)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values, [N, C], computed in float32 and then rounded to `dtype`.

        Args:
            dtype: of the result; None for that of full numbers, or float32.
        """
        form = self.format
        if not form.is_quantized:
            return self.numbers if dtype is None else self.numbers.to(dtype)
        if self.order is not None:
            places = self.order.to(self.numbers.device).argsort()
            return self.in_stored_order().dequantize(dtype).index_select(1, places)
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
        order = torch.arange(inputs, dtype=torch.int32, device=values.device)
        plain = quantize(values, dataclasses.replace(form, ordered=False))
        return dataclasses.replace(plain, format=form, order=order)
    return Weight(form, (outputs, inputs), *rounded(values, form))
