"""Rounds matrices to the numbers and scales of a `kernels.weight_format.WeightFormat`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from kernels.fp8 import LARGEST_E4M3, SMALLEST_AMAX, quantize_rows
from kernels.weight_format import FP8_ROWS, INT4_GROUPS, INT8_GROUPS, INT8_ROWS, WeightFormat

_DIVISORS: Final = tuple(7.0 + 0.25 * i for i in range(9))
"""Rough scales of a group in 4 bits are the largest magnitude divided by these."""
_LOW_BITS: Final = (1 << 13) - 1
"""Bits of a float32 number that float16 does not have."""


def rounded(values: Tensor, form: WeightFormat) -> tuple[Tensor, ...]:
    """Round a matrix to a format, which has scales and no order of inputs.

    Args:
        values: [N, C], any float dtype; for `LIBRARY_FORMATS` C is a multiple of the format's group.
        form: the format.

    Returns:
        The numbers, scales and shifts, as `kernels.weights.Weight` has them.

    Raises:
        ValueError: a scale would not be finite; the text is the end of a sentence.
    """
    quantizer = _QUANTIZERS.get(form, _float8_groups if form.float else _integers)
    numbers, *scales = quantizer(values, form)
    if not all(bool(scale.isfinite().all()) for scale in scales):
        raise ValueError(_overflow(values, form))
    return numbers, *scales


def unpack_bytes(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Return numbers with those of a byte in a new dimension, `dim`."""
    if bits >= 8:
        return packed.unsqueeze(dim)
    return torch.stack((packed & 15, packed >> 4), dim)


def pack_bytes(numbers: Tensor, bits: int, dim: int = 1) -> Tensor:
    """Return numbers as they are stored, those of two indices of a dimension in a byte."""
    if bits >= 8:
        return numbers
    return (
        numbers[::2] | numbers[1::2] << 4 if dim == 0 else numbers[:, ::2] | numbers[:, 1::2] << 4
    )


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
    packed = pack_bytes(numbers.to(getattr(torch, form.dtype)), form.bits)
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
    packed = pack_bytes((best_numbers + form.offset).to(torch.uint8).flatten(1), form.bits)
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
