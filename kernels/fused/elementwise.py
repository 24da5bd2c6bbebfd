"""RMS norm with the residual addition before it, and the gated activation, one launch each, in Triton.

For steps of so many rows that the linear layers leave them to others. The arithmetic is float32
and is rounded where PyTorch's operations would round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.fused.dependent import dependent_launch
from kernels.fused.device import silu

if TYPE_CHECKING:
    from torch import Tensor

_GATE_BLOCK = 1024


@triton.jit
def add_norm(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    eps,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add one row to its residual and normalise the sum; program (row)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < C
    if PDL:
        gdc_launch_dependents()
    factor = tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    values = tl.load(x + row * x_stride + column, mask=exists, other=0.0)
    if ADD:
        place = residual + row * residual_stride + column
        before = tl.load(place, mask=exists, other=0.0).to(tl.float32)
        values = (values.to(tl.float32) + before).to(values.dtype)
        tl.store(place, values, mask=exists)
    values = values.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / C + eps)
    result = values * scale * factor
    tl.store(out + row * C + column, result.to(out.dtype.element_ty), mask=exists)


@triton.jit
def gate(x, out, x_stride, F: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Gate some columns of one row; program (row, columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < F
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.load(x + row * x_stride + column, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(x + row * x_stride + F + column, mask=exists, other=0.0).to(tl.float32)
    gated = silu(first).to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row * F + column, (gated * second).to(out.dtype.element_ty), mask=exists)


def add_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """Add `x` to the residual in place and normalise the sum; without a residual, normalise `x`.

    Args:
        x: [T, C], contiguous in C.
        weight: [C].
        eps: added to the mean square.
        residual: [T, C], contiguous in C; becomes the rounded sum.
        out: [T, C] contiguous; None allocates it. It may be `x`.
        pdl: launch before the kernel before has ended.

    Returns:
        `out`.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device) if out is None else out
    if rows == 0:
        return out
    block = triton.next_power_of_2(size)
    add_norm[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        C=size,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=min(16, max(1, block // 256)),
        **dependent_launch(pdl),
    )
    return out


def silu_and_mul(x: Tensor, *, out: Tensor | None = None, pdl: bool = False) -> Tensor:
    """Gate the second half of each row by the SiLU of the first.

    Args:
        x: [T, 2 * F], contiguous in its rows.
        out: [T, F] contiguous; None allocates it.
        pdl: launch before the kernel before has ended.

    Returns:
        `out`.

    Source: Shazeer, GLU Variants Improve Transformer, 2020 (SwiGLU).
    """
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device) if out is None else out
    if rows == 0:
        return out
    block = min(_GATE_BLOCK, triton.next_power_of_2(size))
    gate[(rows, triton.cdiv(size, block))](
        x,
        out,
        x.stride(0),
        F=size,
        BLOCK=block,
        num_warps=max(1, block // 256),
        **dependent_launch(pdl),
    )
    return out
