"""Rows of numbers in float8_e4m3fn with a float32 scale for each row, in PyTorch: those of a cache, those of weights.

Knows nothing of what the numbers are.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_E4M3 = 448.0
SMALLEST_AMAX = 2.0**-100
"""Rows without a larger number count as zeros; with it no scale, nor its inverse, is subnormal."""


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows [..., D] to float8_e4m3fn, the largest of each to 448; also return their scales [...] float32."""
    wide = rows.float()
    largest = wide.abs().amax(-1)
    scale = torch.where(largest >= SMALLEST_AMAX, largest / LARGEST_E4M3, torch.ones_like(largest))
    return (wide / scale[..., None]).to(torch.float8_e4m3fn), scale


def dequantise_rows(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply rows [..., D] by their scales [...], in float32, and round to a dtype."""
    return (numbers.float() * scale[..., None]).to(dtype)
