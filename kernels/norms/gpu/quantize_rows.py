"""Quantizes rows to FP8 (e4m3) with one scale each, optionally after an RMS norm, in one Triton launch.

The rows are inputs of an FP8 matrix product. The result of the norm is not rounded before it is quantized.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.fp8 import LARGEST_E4M3, SMALLEST_AMAX
from kernels.gpu.dependent_launch import dependent_launch

_LARGEST = tl.constexpr(LARGEST_E4M3)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)


@triton.jit
def quantize_row(
    x, gain, numbers, scales, x_stride, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantize one row; program (row)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < C
    if PDL:
        gdc_launch_dependents()
    gains = exists
    if NORM:
        gains = tl.load(gain + column, mask=exists, other=0.0)
    if PDL:
        gdc_wait()
    values = tl.load(x + row * x_stride + column, mask=exists, other=0.0).to(tl.float32)
    if NORM:
        values *= 1.0 / tl.sqrt(tl.sum(values * values) / C + eps)
        values *= gains.to(tl.float32)
    largest = tl.max(tl.abs(values))
    scale = tl.where(largest < _SMALLEST_AMAX, 1.0, largest / _LARGEST)
    rounded = (values * (1.0 / scale)).to(numbers.dtype.element_ty)
    tl.store(numbers + row * C + column, rounded, mask=exists)
    tl.store(scales + row, scale)


def quantize_rows(
    x: Tensor, gain: Tensor | None = None, eps: float = 0.0, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantize rows, or their RMS norm; on GPUs from sm_89 on.

    Args:
        x: [T, C], contiguous in C.
        gain: [C], the norm's weight; None for no norm.
        eps: added to the norm's mean square.
        pdl: use programmatic dependent launch.

    Returns:
        Numbers [T, C] float8_e4m3fn, and their scales [T, 1] float32.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, for the format.
    """
    rows, size = x.shape
    numbers = torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows == 0:
        return numbers, scales
    block = triton.next_power_of_2(size)
    quantize_row[(rows,)](
        x, gain, numbers, scales, x.stride(0), eps,
        C=size, BLOCK=block, NORM=gain is not None, num_warps=min(16, max(1, block // 256)),
        **dependent_launch(pdl),
    )  # fmt: skip
    return numbers, scales
