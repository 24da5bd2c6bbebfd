"""The product of attention's result and the sigmoid of its gate, in one launch, in Triton.

It computes in float32 and rounds where PyTorch's operations round.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.dependent_launch import dependent_launch

_BLOCK: Final = 1024


@triton.jit
def output_gate(
    x, gate, x_stride, gate_stride, F: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Multiply BLOCK columns of one row by the sigmoid of their gates in place; program (row, columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < F
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = x + row * x_stride + column
    value = tl.load(place, mask=exists, other=0.0).to(tl.float32)
    by = tl.load(gate + row * gate_stride + column, mask=exists, other=0.0).to(tl.float32)
    factor = (1.0 / (1.0 + tl.exp(-by))).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(place, (value * factor).to(x.dtype.element_ty), mask=exists)


def multiply_by_sigmoid(x: Tensor, gate: Tensor, *, pdl: bool = False) -> Tensor:
    """Multiply `x` by the sigmoid of its gate in place.

    Args:
        x: [T, F], contiguous in its rows; written.
        gate: likewise, of its dtype.
        pdl: use programmatic dependent launch.

    Returns:
        `x`.
    """
    rows, size = x.shape
    if rows == 0:
        return x
    block = min(_BLOCK, triton.next_power_of_2(size))
    output_gate[(rows, triton.cdiv(size, block))](
        x, gate, x.stride(0), gate.stride(0),
        F=size, BLOCK=block, num_warps=max(1, block // 256), **dependent_launch(pdl),
    )  # fmt: skip
    return x
