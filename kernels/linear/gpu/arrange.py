"""Orders the columns of rows as `kernels.linear.gpu.matrix` multiplies them by 4-bit weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.dependent_launch import dependent_launch

_BLOCK = 1024


@triton.jit
def arrange_rows(x, out, stride, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Order columns of a row; program (row, columns).

    Of 32 columns, with their weights in 16 bytes, a thread of four has the weights of 4 bytes. It multiplies those in
    the lower halves of the bytes first, and in the order in which `kernels.gpu.unpack` returns them.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half, eight, thread, two = place // 16 % 2, place // 8 % 2, place // 2 % 4, place % 2
    column = place // 32 * 32 + 8 * thread + 4 * two + 2 * eight + half
    numbers = tl.load(x + row * stride + column, mask=place < K, other=0.0)
    tl.store(out + row * K + place, numbers, mask=place < K)


def arrange(x: Tensor, *, pdl: bool) -> Tensor:
    """Return rows [T, C], C a multiple of 32, with their columns in the order for 4-bit weights."""
    rows, inputs = x.shape
    out = torch.empty((rows, inputs), dtype=x.dtype, device=x.device)
    arrange_rows[(rows, -(-inputs // _BLOCK))](
        x, out, x.stride(0), K=inputs, BLOCK=_BLOCK, num_warps=4, **dependent_launch(pdl)
    )
    return out
