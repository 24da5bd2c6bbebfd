"""Multiplication by a weight matrix, in the layout that suits the processor.

On a CPU a step with few tokens is bound by reading weights, so how they lie in memory decides its
speed. Two cores of an AMD EPYC (Zen 5), all matrices of the bundled model, float32 activations, ms:

    rows of the step                    1      8     64
    row-major, general multiplication   2.97   4.47  -
    float32 in oneDNN's blocks          0.89   1.32  4.0
    float16 in FBGEMM's blocks          0.49   0.71  3.7

docs/decisions/0004-cpu-dtype.md has more. Knows matrices, not what they mean.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from kernels.fp8 import dequantise_rows
from kernels.torch_private import fbgemm_half_linear, onednn_has_bfloat16, onednn_linear

Linear: TypeAlias = Callable[[Tensor], Tensor]
"""[..., in] -> [..., out]"""

_HALF_ERROR: Final = 2.0**-20


def plain_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Bind a row-major weight; differentiable, for every device.

    Args:
        weight: [out, in].
        bias: [out] or None.
    """
    return functools.partial(functional.linear, weight=weight, bias=bias)


def quantised_linear(weight: Tensor, bias: Tensor | None, scale: Tensor) -> Linear:
    """Bind a weight in float8, which is converted at each call; for every device.

    Args:
        weight: [out, in] float8_e4m3fn.
        bias: [out] or None.
        scale: [out] float32.
    """

    def multiply(x: Tensor) -> Tensor:
        return functional.linear(x, dequantise_rows(weight, scale, x.dtype), bias)

    return multiply


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Say whether `packed_linear` knows a better layout: on x86, for float32 and bfloat16."""
    if device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16:
        return onednn_has_bfloat16()
    return dtype is torch.float32


def packed_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Copy a weight into blocks and bind it; not differentiable.

    Float32 weights that float16 can hold, such as those of a bfloat16 checkpoint, are stored as
    float16; activations and sums stay float32, so the result is that of float32 weights.

    Args:
        weight: [out, in] row-major, of a dtype and device that `can_pack` accepts.
        bias: [out] or None.
    """
    weight = weight.detach()
    if weight.dtype is torch.float32 and fits_half(weight):
        return fbgemm_half_linear(weight, bias)
    return onednn_linear(weight, bias)


def fits_half(weight: Tensor) -> bool:
    """Say whether float16 holds a float32 weight as well as float32 sums can tell.

    A bfloat16 number has fewer digits than float16, but more range: those below 2^-17 lose digits.
    An error of 2^-20 of the largest weight is lost among the rounding of a sum over a row.
    """
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return False
    error = (weight - weight.half().float()).abs().max()
    return bool(error <= _HALF_ERROR * weight.abs().max())
