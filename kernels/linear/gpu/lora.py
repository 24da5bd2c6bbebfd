"""What low-rank adapters add to the outputs of linear layers on a GPU: two launches for any mix of adapters.

Rows are sorted by slot, so that a tile of rows reads the matrices of few adapters. A row's sums depend on its own
adapter alone: the other rows of its tile are multiplied as zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear.lora import LoraRows, LoraWeights

_ROWS: Final = 16
_COLUMNS: Final = 64
_FLOAT32_COLUMNS: Final = 32
"""Float32 is multiplied without tensor cores, in registers."""
_OUTPUTS: Final = 64
_MOST_SPLITS: Final = 8
_FEWEST_COLUMNS: Final = 512
"""Columns of the smallest part of the inner dimension of the first product."""
FEWEST_RANKS: Final = 16
"""Of a slot: a power of two from this number on."""


@triton.jit
def tile_slots(order, slots, num_rows, ROWS: tl.constexpr):
    """Return the rows of a tile, their slots (-1 for none), and the least and the largest of these."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = place < num_rows
    row = tl.load(order + place, mask=is_row, other=0)
    slot = tl.load(slots + row, mask=is_row, other=-1)
    least = tl.min(tl.where(slot < 0, 1 << 30, slot))
    return place, row, slot, least, tl.max(slot)


@triton.jit(do_not_specialize=["num_rows"])
def shrink(
    x, a, order, slots, out, num_rows, x_stride,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply some rows by A over one part of the columns; program (rows, part of the outputs, part of the columns).

    Args:
        x: [num_rows, K].
        a: [slots, P, R, K].
        order, slots: [num_rows].
        out: [SPLITS, P, num_rows, R] float32, rows in `order`.
    """
    CHUNKS: tl.constexpr = (K + COLUMNS * SPLITS - 1) // (COLUMNS * SPLITS)
    part = tl.program_id(1)
    split = tl.program_id(2)
    place, row, slot, least, largest = tile_slots(order, slots, num_rows, ROWS)
    rank = tl.arange(0, R)
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    acc = tl.zeros([ROWS, R], tl.float32)
    for now in range(least, largest + 1):
        own = slot == now
        if tl.max(own.to(tl.int32)) > 0:
            a_row = a + ((tl.cast(now, tl.int64) * P + part) * R + rank)[:, None] * K
            for i in range(CHUNKS):
                column = (split * CHUNKS + i) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
                left = tl.load(x_row + column, mask=own[:, None] & (column < K), other=0.0)
                right = tl.load(a_row + column, mask=column < K, other=0.0)
                acc = tl.dot(left, right.T, acc, input_precision="ieee")
    line = (split * P + part).to(tl.int64) * num_rows + place
    is_own = (slot >= 0)[:, None]
    tl.store(out + line[:, None] * R + rank[None, :], acc, mask=is_own)


@triton.jit(do_not_specialize=["num_rows"])
def expand(
    low, b, order, slots, y, num_rows, y_stride,
    FIRST: tl.constexpr, SECOND: tl.constexpr, N: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply the sums of `shrink` by B, and add them to some outputs; program (rows, outputs, part of the outputs).

    Args:
        low: [SPLITS, P, num_rows, R] float32, rows in `order`.
        b: [slots, R, N].
        order, slots: [num_rows].
        y: [num_rows, N]; added to.
        FIRST, SECOND: outputs before the second and the third part.
    """
    part = tl.program_id(2)
    start = tl.where(part == 0, 0, tl.where(part == 1, FIRST, SECOND))
    stop = tl.where(part == P - 1, N, tl.where(part == 0, FIRST, SECOND))
    output = start + tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < stop
    place, row, slot, least, largest = tile_slots(order, slots, num_rows, ROWS)
    if (largest >= 0) & (start + tl.program_id(1) * OUTPUTS < stop):
        rank = tl.arange(0, R)
        is_own = slot >= 0
        total = tl.zeros([ROWS, R], tl.float32)
        for split in range(SPLITS):
            line = (split * P + part).to(tl.int64) * num_rows + place
            found = low + line[:, None] * R + rank[None, :]
            total += tl.load(found, mask=is_own[:, None], other=0.0)
        total = total.to(b.dtype.element_ty)
        acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for now in range(least, largest + 1):
            own = slot == now
            if tl.max(own.to(tl.int32)) > 0:
                left = tl.where(own[:, None], total, 0.0).to(b.dtype.element_ty)
                b_row = b + (tl.cast(now, tl.int64) * R + rank)[:, None] * N
                right = tl.load(b_row + output[None, :], mask=is_output[None, :], other=0.0)
                acc = tl.dot(left, right, acc, input_precision="ieee")
        at = y + row.to(tl.int64)[:, None] * y_stride + output[None, :]
        mask = is_own[:, None] & is_output[None, :]
        before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, (before + acc).to(y.dtype.element_ty), mask=mask)


def add_lora(x: Tensor, y: Tensor, weights: LoraWeights, rows: LoraRows) -> Tensor:
    """Add to y; arguments as for `kernels.linear.lora.add_lora`, in one dtype, contiguous in C and N."""
    a, b, parts = weights
    _, count, rank, inputs = a.shape
    assert rows.order is not None
    assert len(parts) <= 3, "q, k and v"
    assert x.dtype is y.dtype is a.dtype is b.dtype
    num_rows = len(x)
    splits = max(1, min(_MOST_SPLITS, inputs // _FEWEST_COLUMNS))
    low = torch.empty((splits, count, num_rows, rank), dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(num_rows, _ROWS)
    columns = _FLOAT32_COLUMNS if x.dtype is torch.float32 else _COLUMNS
    shrink[tiles, count, splits](
        x, a, rows.order, rows.slots, low, num_rows, x.stride(0),
        K=inputs, P=count, R=rank, SPLITS=splits, ROWS=_ROWS, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    first = parts[0]
    second = first + parts[1] if len(parts) > 1 else first
    expand[tiles, triton.cdiv(max(parts), _OUTPUTS), count](
        low, b, rows.order, rows.slots, y, num_rows, y.stride(0),
        FIRST=first, SECOND=second, N=sum(parts), P=count, R=rank, SPLITS=splits, ROWS=_ROWS, OUTPUTS=_OUTPUTS,
        num_warps=4,
    )  # fmt: skip
    return y
