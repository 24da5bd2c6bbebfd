"""References of int8 and int4 weights on a CPU: how weights and activations are rounded, and the product of both.

Activations have a float32 scale for each group of a row: x ~ scale * q, q in -127..127. Every rounding is to the
nearest integer, half to even. `kernels.weights.quantize` rounds weights faster, and those of 4 bits a little less
exactly.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
from torch import Tensor

from kernels import weight_format
from kernels.weights import Weight

LARGEST_INT8: Final = 127
ZERO_INT4: Final = 8
"""The int4 number that stands for 0."""
LARGEST_INT4: Final = 15
ACTIVATION_GROUP: Final = 32
"""Inputs whose activations share a scale."""
INT4_GROUPS: Final = (32, 64)
SMALLEST_AMAX: Final = 2.0**-100
"""Numbers whose magnitudes are all smaller are quantized as zeros; thus no inverse of a scale overflows."""
_DIVISORS: Final = tuple(7.0 + 0.25 * i for i in range(9))
"""Candidates of an int4 scale are the largest magnitude of a group divided by these."""


def quantize_int8(rows: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantize rows of weights or activations symmetrically.

    The numbers are the values multiplied by 127 / (largest magnitude), computed in float32.

    Args:
        rows: [..., C], any float dtype.
        group: values that share a scale, a divisor of C; None for whole rows.

    Returns:
        [..., C] int8 and the scales [..., C / group] float32, largest magnitude / 127, which are 1 where all are 0.
    """
    parts = _groups(rows.float(), group or rows.shape[-1])
    largest = parts.abs().amax(-1, keepdim=True)
    is_zero = largest < SMALLEST_AMAX
    inverse = torch.where(is_zero, 0.0, LARGEST_INT8 / largest)
    scale = torch.where(is_zero, 1.0, largest / LARGEST_INT8)
    return (parts * inverse).round().to(torch.int8).flatten(-2), scale.squeeze(-1)


def dequantize_int8(numbers: Tensor, scale: Tensor) -> Tensor:
    """Multiply numbers [..., C] by their scales [..., C / group]; returns float32."""
    parts = _groups(numbers.float(), numbers.shape[-1] // scale.shape[-1])
    return (parts * scale[..., None]).flatten(-2)


def quantize_int4(weight: Tensor, group: int = 32, *, refined: bool = True) -> Weight:
    """Quantize a matrix in groups of its rows.

    A candidate scale is the value of largest magnitude divided by a number around -8, which makes that value about the
    smallest number, 0. Each is replaced by the least-squares scale of the numbers that it results in, and rounded to
    float16; the numbers are made anew with that. The candidate with the smallest squared error is used. Errors are
    weighted by the magnitudes of the values.

    Args:
        weight: [N, C], any float dtype.
        group: inputs that share a scale, a divisor of C.
        refined: False uses the first candidate, largest / -8, as it is.

    Returns:
        The matrix in `INT4_GROUPS`, or its like with other groups. Scales may be negative, and are 0 where float16
        cannot hold them.
    """
    parts = _groups(weight.float(), group)
    extreme = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))
    best = (extreme / -ZERO_INT4).half()
    numbers = _int4_numbers(parts, best)
    if not refined:
        return _int4(numbers, best)
    smallest = _squared_error(parts, numbers, best)
    for divisor in _DIVISORS:
        rough = _int4_numbers(parts, extreme / -divisor).float() - ZERO_INT4
        weighted = parts.abs() * rough
        norm = (weighted * rough).sum(-1, keepdim=True)
        scale = torch.where(norm > 0, (weighted * parts).sum(-1, keepdim=True) / norm, 0).half()
        found = _int4_numbers(parts, scale)
        error = _squared_error(parts, found, scale)
        is_better = error < smallest
        smallest = torch.where(is_better, error, smallest)
        numbers = torch.where(is_better, found, numbers)
        best = torch.where(is_better, scale, best)
    return _int4(numbers, best)


def round_activations(x: Tensor, group: int) -> Tensor:
    """Quantize and dequantize activations [..., C] in groups; returns float32."""
    return dequantize_int8(*quantize_int8(x, group))


def multiply(x: Tensor, weight: Weight, group: int = ACTIVATION_GROUP) -> Tensor:
    """Compute x W^T with quantized activations, in float64.

    Args:
        x: [..., C], quantized in groups.
        weight: [N, C].
        group: inputs of an activation's scale.

    Returns:
        [..., N] float64.
    """
    return round_activations(x, group).double() @ weight.dequantize().double().T


def _groups(rows: Tensor, group: int) -> Tensor:
    """Return [..., C] as [..., C / group, group]."""
    assert rows.shape[-1] % group == 0, f"{rows.shape[-1]} is no multiple of {group}"
    return rows.reshape(*rows.shape[:-1], -1, group)


def _int4(numbers: Tensor, scale: Tensor) -> Weight:
    outputs, groups, group = numbers.shape
    form = dataclasses.replace(weight_format.INT4_GROUPS, group=group)
    flat = numbers.flatten(1)
    packed = flat[:, ::2] | flat[:, 1::2] << 4
    return Weight(form, (outputs, groups * group), packed, scale.squeeze(-1).float())


def _int4_numbers(parts: Tensor, scale: Tensor) -> Tensor:
    wide = scale.float()
    inverse = torch.where(wide.abs() < SMALLEST_AMAX, 0.0, 1.0 / wide)
    return ((parts * inverse).round() + ZERO_INT4).clamp(0, LARGEST_INT4).to(torch.uint8)


def _squared_error(parts: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    rounded = (numbers.float() - ZERO_INT4) * scale.float()
    return (parts.abs() * (rounded - parts).square()).sum(-1, keepdim=True)
