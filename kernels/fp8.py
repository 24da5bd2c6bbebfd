"""The float8_e4m3fn (FP8) format with a float32 scale for each row: its name, and its conversion in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = "float8_e4m3fn"
"""Name of the dtype. A KV cache has a scale for each key and each value of a head
(docs/decisions/0016-fp8-kv-cache.md); weights have a scale for each output
(docs/decisions/0021-fp8-weights.md)."""
SCALE_BYTES = 4
"""Bytes of a scale."""
LARGEST_E4M3 = 448.0
SMALLEST_AMAX = 2.0**-100
"""A row whose magnitudes are all smaller is quantized as zeros; thus no scale and no inverse of one is subnormal."""


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows so that the largest magnitude of each becomes 448.

    Args:
        rows: [..., D], any float dtype.

    Returns:
        [..., D] float8_e4m3fn, and the scales [...] float32, which are 1 for rows of zeros.
    """
    wide = rows.float()
    largest = wide.abs().amax(-1)
    scale = torch.where(largest >= SMALLEST_AMAX, largest / LARGEST_E4M3, torch.ones_like(largest))
    return (wide / scale[..., None]).to(torch.float8_e4m3fn), scale


def dequantize_rows(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply rows [..., D] by their scales [...] in float32, and convert the result to `dtype`."""
    return (numbers.float() * scale[..., None]).to(dtype)
