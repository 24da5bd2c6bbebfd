"""The float8_e4m3fn (FP8) format with a float32 scale for each row: its name, and its conversion in PyTorch.

Weights and activations are scaled so that the largest number of a row becomes 448. Keys and values are scaled by powers
of two, which lose no precision, since e4m3 is a floating-point format, and can be changed later without rounding again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.weight_format import FP8_ROWS

FP8 = FP8_ROWS.dtype
"""Name of the dtype. A KV cache has a scale for each key and each value of a head
(docs/decisions/0016-fp8-kv-cache.md); weights have a scale for each output (docs/decisions/0021-fp8-weights.md)."""
LARGEST_E4M3 = 448.0
SMALLEST_AMAX = 2.0**-100
"""No scale is below that of a row with this largest magnitude, so neither scales nor their inverses are subnormal."""
SCALE_ROUNDING = 0x1FFFFF
"""Added to the bits of a magnitude m: it carries to the next power of two if m > 1.75 * 2^n, of which 448 is one."""
SCALE_EXPONENT = 8
"""448 = 1.75 * 2^8."""


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows so that the largest magnitude of each becomes 448.

    Args:
        rows: [..., D], any float dtype.

    Returns:
        [..., D] float8_e4m3fn, and the scales [...] float32, which are 1 for rows of zeros, and not finite for rows
        that are not.
    """
    wide = rows.float()
    largest = wide.abs().amax(-1)
    scale = torch.where(largest < SMALLEST_AMAX, torch.ones_like(largest), largest / LARGEST_E4M3)
    return (wide / scale[..., None]).to(torch.float8_e4m3fn), scale


def quantize_kv_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize keys or values with the smallest power of two per row that brings all magnitudes to at most 448.

    Args:
        rows: [..., D], any float dtype.

    Returns:
        [..., D] float8_e4m3fn, and the scales [...] float32.
    """
    wide = rows.float()
    largest = wide.abs().nan_to_num(0.0, torch.inf).amax(-1).clamp(min=SMALLEST_AMAX)
    bits = (largest.view(torch.int32) + SCALE_ROUNDING) & 0x7F800000
    scale = (bits - (SCALE_EXPONENT << 23)).view(torch.float32)
    return (wide / scale[..., None]).to(torch.float8_e4m3fn), scale
