"""Computes the values of a quantized matrix on a GPU in one launch, as `Weight.dequantize` does in several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.linear.gpu.vector import widen

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.weights import Weight

_ROWS = 4
_BYTES = 512


@triton.jit
def dequantize_rows(
    numbers, scales, shifts, out, num_rows,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr,
    FLOAT: tl.constexpr, OFFSET: tl.constexpr, SHIFTED: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Compute some columns of ROWS rows; program (rows, columns).

    Args:
        numbers: [num_rows, WIDTH], two in a uint8 where BITS is 4; uint8 holds float8_e4m3fn too, where FLOAT.
        scales: [num_rows / TALL, COUNT], rounded up; of TALL rows and WIDE columns each.
        shifts: as `scales`; where SHIFTED.
        out: [num_rows, inputs], inputs WIDTH or twice as many.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    place = (tl.program_id(1) * BYTES + tl.arange(0, BYTES))[None, :]
    exists = (row < num_rows) & (place < WIDTH)
    line = row.to(tl.int64)
    stored = tl.load(numbers + line * WIDTH + place, mask=exists, other=0.0)
    column = place * (8 // BITS)
    group = (line // TALL) * COUNT + column // WIDE
    scale = tl.load(scales + group, mask=exists, other=0.0).to(tl.float32)
    if BITS == 4:
        low = (stored & 15).to(tl.float32) - OFFSET
        high = (stored >> 4).to(tl.float32) - OFFSET
        low *= scale
        high *= scale
        if SHIFTED:
            shift = tl.load(shifts + group, mask=exists, other=0.0).to(tl.float32)
            low += shift
            high += shift
        both = tl.interleave(low.to(out.dtype.element_ty), high.to(out.dtype.element_ty))
        target = (tl.program_id(1) * (2 * BYTES) + tl.arange(0, 2 * BYTES))[None, :]
        place = out + line * (2 * WIDTH) + target
        tl.store(place, both, mask=(row < num_rows) & (target < 2 * WIDTH))
    else:
        if FLOAT:
            value = widen(stored)
        else:
            value = stored.to(tl.float32) - OFFSET
        value *= scale
        if SHIFTED:
            value += tl.load(shifts + group, mask=exists, other=0.0).to(tl.float32)
        tl.store(out + line * WIDTH + place, value.to(out.dtype.element_ty), mask=exists)


def dequantize(weight: Weight, dtype: torch.dtype, *, unpacks: bool = False) -> Tensor:
    """Return the values of a quantized matrix, [N, C].

    Args:
        weight: of 4 or 8 bits, contiguous.
        dtype: of the result, to which values are rounded from float32.
        unpacks: whether FP8 is converted by bit operations, for GPUs without an instruction; NaN becomes 480.
    """
    form, (outputs, inputs) = weight.format, weight.shape
    assert form.is_quantized
    assert weight.scale is not None
    out = torch.empty((outputs, inputs), dtype=dtype, device=weight.numbers.device)
    numbers = weight.numbers
    width = numbers.shape[1]
    grid = (-(-outputs // _ROWS), -(-width // _BYTES))
    dequantize_rows[grid](
        numbers.view(torch.uint8) if unpacks and form.float else numbers, weight.scale, weight.shift, out, outputs,
        WIDTH=width, COUNT=weight.scale.shape[1] if weight.scale.ndim > 1 else 1,
        TALL=form.group if form.scales == "block" else 1, WIDE=form.group or inputs, BITS=form.bits,
        FLOAT=form.float, OFFSET=float(form.offset), SHIFTED=form.shifts, ROWS=_ROWS, BYTES=_BYTES, num_warps=4,
    )  # fmt: skip
    return out
