"""Replaces PyTorch's FP8 matrix product on CPUs where PyTorch has it only for GPUs (2.11)."""

from __future__ import annotations

import functools

import torch


@functools.cache
def is_there() -> bool:
    """Whether PyTorch multiplies FP8 matrices on this CPU."""
    x, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(x, x.t(), scale, scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


def multiply(x, weight, rows, columns, *, out_dtype, use_fast_accum, out):
    """Multiply x [R, C] and weight [C, N] in FP8; rows [R, 1] and columns [1, N] are their scales."""
    assert not use_fast_accum
    assert out.dtype is out_dtype
    return out.copy_((x.float() @ weight.float()) * rows * columns)


def provide(monkeypatch):
    """Replace the product by its formula where it is missing."""
    if not is_there():
        monkeypatch.setattr(torch, "_scaled_mm", multiply)
