"""What low-rank adapters add to the outputs of linear layers on a GPU: two launches for any mix of adapters.

Rows are sorted by slot. In a step of few rows a tile has rows of one slot, so that programs compute all adapters at the
same time, and `find_tiles` lists the tiles once for all layers. In a step of many rows a tile has the next rows
whatever their slots, and computes these one after the other. A row's sums depend on its adapter alone, and their
order is the same in both: the other rows of its tile are multiplied as zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.dependent_launch import dependent_launch
from kernels.linear.lora import LoraRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kernels.linear.lora import LoraWeights

_ROWS: Final = 16
_THREADS: Final = 128
_TILE_BYTES: Final = 8192
"""Of A or B that a program multiplies at once, within these limits."""
_COLUMNS: Final = (64, 128)
_OUTPUTS: Final = (64, 256)
_MOST_UNROLLED = tl.constexpr(64)
"""The largest rank with which a thread loads the sums of all parts of the columns at once, to registers."""
_FLOAT32_COLUMNS: Final = 32
"""Float32 is multiplied without tensor cores, in registers."""
_MOST_SPLITS: Final = 16
_FEWEST_COLUMNS: Final = 256
"""Columns of the smallest part of the inner dimension of the first product."""
_AHEAD_BYTES: Final = 256
"""Of A that a thread may load to registers before it waits: a quarter of its registers."""
MOST_LISTED_ROWS: Final = 256
"""Of a step whose tiles are listed."""


@triton.jit(do_not_specialize=["num_rows"])
def find_tiles(order, slots, tiles, num_rows, ROWS: tl.constexpr, PLACES: tl.constexpr):
    """List the tiles of a step: up to ROWS rows of one slot that are neighbours in `order`; one program.

    Args:
        order, slots: [num_rows].
        tiles: [3, num_rows] int32; written, see `LoraRows`.
        PLACES: a power of two, at least `num_rows`.
    """
    place = tl.arange(0, PLACES)
    slot = slot_at(order, slots, place, num_rows)
    is_first = (slot >= 0) & (
        (place % ROWS == 0) | (slot != slot_at(order, slots, place - 1, num_rows))
    )
    is_last = (slot >= 0) & (
        ((place + 1) % ROWS == 0) | (slot != slot_at(order, slots, place + 1, num_rows))
    )
    tile = tl.cumsum(is_first.to(tl.int32), 0) - 1
    tl.store(tiles + tile, place, mask=is_first)
    tl.store(tiles + num_rows + tile, place + 1, mask=is_last)
    tl.store(tiles + 2 * num_rows + tile, slot, mask=is_first)
    # Not the lines of tiles, which other threads write.
    is_unused = (place >= tl.sum(is_first.to(tl.int32))) & (place < num_rows)
    tl.store(tiles + place, 0, mask=is_unused)
    tl.store(tiles + num_rows + place, 0, mask=is_unused)
    tl.store(tiles + 2 * num_rows + place, -1, mask=is_unused)


@triton.jit
def slot_at(order, slots, place, num_rows):
    """Return the slots of the rows at some places of `order`; -1 for none and for places outside."""
    exists = (place >= 0) & (place < num_rows)
    row = tl.load(order + place, mask=exists, other=0)
    return tl.load(slots + row, mask=exists, other=-1)


@triton.jit
def rows_of_tile(order, slots, tiles, num_rows, ROWS: tl.constexpr, LISTED: tl.constexpr):
    """Return the rows of a tile, their slots (-1 for none), and the least and the largest of these."""
    tile = tl.program_id(0)
    if LISTED:
        first = tl.load(tiles + tile)
        stop = tl.load(tiles + num_rows + tile)
        least = tl.load(tiles + 2 * num_rows + tile)
        largest = least
        place = first + tl.arange(0, ROWS)
        is_row = place < stop
        row = tl.load(order + place, mask=is_row, other=0)
        slot = tl.where(is_row, least, -1)
    else:
        place = tile * ROWS + tl.arange(0, ROWS)
        is_row = place < num_rows
        row = tl.load(order + place, mask=is_row, other=0)
        slot = tl.load(slots + row, mask=is_row, other=-1)
        least = tl.min(tl.where(slot < 0, 1 << 30, slot))
        largest = tl.max(slot)
    return place, row, slot, least, largest


@triton.jit
def load_columns(base, is_row, number, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Load COLUMNS columns from `number` * COLUMNS on of some rows; 0 where they do not exist.

    Args:
        is_row: [rows, 1], the rows that exist; True for all.
    """
    column = number * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return tl.load(base + column, mask=is_row & (column < K), other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def shrink(
    x, a, order, slots, tiles, out, num_rows, x_stride,
    K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, AHEAD: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply some rows by A over one part of the columns; program (rows, part of the outputs, part of the columns).

    Args:
        x: [num_rows, K].
        a: [slots, P, R, K].
        order, slots: [num_rows].
        tiles: as in `LoraRows`; where LISTED.
        out: [SPLITS, P, num_rows, R] float32, rows in `order`.
        AHEAD: chunks of COLUMNS columns of A that are loaded to registers before the wait; where LISTED.
    """
    CHUNKS: tl.constexpr = (K + COLUMNS * SPLITS - 1) // (COLUMNS * SPLITS)
    CHUNKS_AHEAD: tl.constexpr = AHEAD if AHEAD < CHUNKS else CHUNKS
    part = tl.program_id(1)
    split = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    place, row, slot, least, largest = rows_of_tile(order, slots, tiles, num_rows, ROWS, LISTED)
    rank = tl.arange(0, R)
    # The first program always waits, see `kernels.gpu.dependent_launch`.
    if (largest >= 0) | (tl.program_id(0) == 0):
        x_row = x + row.to(tl.int64)[:, None] * x_stride
        acc = tl.zeros([ROWS, R], tl.float32)
        chunk = split * CHUNKS
        if LISTED:
            now = tl.maximum(least, 0).to(tl.int64)
            a_row = a + ((now * P + part) * R + rank)[:, None] * K
            ahead = ()  # grows in a loop that Triton unrolls; mypy takes it to be empty
            for i in tl.static_range(CHUNKS_AHEAD):
                ahead = ahead + (load_columns(a_row, True, chunk + i, K, COLUMNS),)  # type: ignore[assignment]
            if PDL:
                gdc_wait()
            has_slot = (slot >= 0)[:, None]
            for i in tl.static_range(CHUNKS_AHEAD):
                left = load_columns(x_row, has_slot, chunk + i, K, COLUMNS)
                acc = tl.dot(left, ahead[i].T, acc, input_precision="ieee")
            for i in range(CHUNKS_AHEAD, CHUNKS):
                left = load_columns(x_row, has_slot, chunk + i, K, COLUMNS)
                right = load_columns(a_row, True, chunk + i, K, COLUMNS)
                acc = tl.dot(left, right.T, acc, input_precision="ieee")
        else:
            if PDL:
                gdc_wait()
            for now in range(least, largest + 1):
                in_slot = slot == now
                if tl.max(in_slot.to(tl.int32)) > 0:
                    a_row = a + ((tl.cast(now, tl.int64) * P + part) * R + rank)[:, None] * K
                    for i in range(CHUNKS):
                        left = load_columns(x_row, in_slot[:, None], chunk + i, K, COLUMNS)
                        right = load_columns(a_row, True, chunk + i, K, COLUMNS)
                        acc = tl.dot(left, right.T, acc, input_precision="ieee")
        line = (split * P + part).to(tl.int64) * num_rows + place
        tl.store(out + line[:, None] * R + rank[None, :], acc, mask=(slot >= 0)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def expand(
    low, b, order, slots, tiles, y, num_rows, y_stride,
    FIRST: tl.constexpr, SECOND: tl.constexpr, N: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply the sums of `shrink` by B, and add them to some outputs of one part; program (rows, outputs).

    Args:
        low: [SPLITS, P, num_rows, R] float32, rows in `order`.
        b: [slots, R, N].
        order, slots: [num_rows].
        tiles: as in `LoraRows`; where LISTED.
        y: [num_rows, N]; added to.
        FIRST, SECOND: outputs before the second and the third part; N if there is none.
    """
    SECOND_TILE: tl.constexpr = (FIRST + OUTPUTS - 1) // OUTPUTS
    THIRD_TILE: tl.constexpr = SECOND_TILE + (SECOND - FIRST + OUTPUTS - 1) // OUTPUTS
    number = tl.program_id(1)
    part = (number >= SECOND_TILE).to(tl.int32) + (number >= THIRD_TILE).to(tl.int32)
    start = tl.where(part == 0, 0, tl.where(part == 1, FIRST, SECOND))
    stop = tl.where(part == 0, FIRST, tl.where(part == 1, SECOND, N))
    number -= tl.where(part == 0, 0, tl.where(part == 1, SECOND_TILE, THIRD_TILE))
    output = start + number * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = (output < stop)[None, :]
    if PDL:
        gdc_launch_dependents()
    place, row, slot, least, largest = rows_of_tile(order, slots, tiles, num_rows, ROWS, LISTED)
    # The first program always waits, see `kernels.gpu.dependent_launch`.
    if (largest >= 0) | (tl.program_id(0) == 0):
        rank = tl.arange(0, R)
        early = tl.zeros(
            [R, OUTPUTS], b.dtype.element_ty
        )  # for mypy and Triton; not read unless LISTED
        if LISTED:
            b_row = b + (tl.maximum(least, 0).to(tl.int64) * R + rank)[:, None] * N
            early = tl.load(b_row + output[None, :], mask=is_output, other=0.0)
        if PDL:
            gdc_wait()
        has_slot = (slot >= 0)[:, None]
        at = y + row.to(tl.int64)[:, None] * y_stride + output[None, :]
        # The sum begins with y in both cases. Triton replaces `y + dot(a, b, 0)` by `dot(a, b, y)`, which rounds
        # differently, but not where the product is in a loop.
        acc = tl.load(at, mask=has_slot & is_output, other=0.0).to(tl.float32)
        total = tl.zeros([ROWS, R], tl.float32)
        line = part.to(tl.int64) * num_rows + place
        found = low + line[:, None] * R + rank[None, :]
        stride = tl.cast(num_rows, tl.int64) * (P * R)
        if LISTED and R <= _MOST_UNROLLED:
            for split in tl.static_range(SPLITS):
                total += tl.load(found + split * stride, mask=has_slot, other=0.0)
        else:
            for split in range(SPLITS):
                total += tl.load(found + split * stride, mask=has_slot, other=0.0)
        total = total.to(b.dtype.element_ty)
        if LISTED:
            acc = tl.dot(total, early, acc, input_precision="ieee")
        else:
            for now in range(least, largest + 1):
                in_slot = slot == now
                if tl.max(in_slot.to(tl.int32)) > 0:
                    b_row = b + (tl.cast(now, tl.int64) * R + rank)[:, None] * N
                    right = tl.load(b_row + output[None, :], mask=is_output, other=0.0)
                    left = tl.where(in_slot[:, None], total, 0.0).to(b.dtype.element_ty)
                    acc = tl.dot(left, right, acc, input_precision="ieee")
        tl.store(at, acc.to(y.dtype.element_ty), mask=has_slot & is_output)


def sorted_rows(slots: Tensor) -> LoraRows:
    """Sort the rows of a step by slot, and list their tiles if there are few; `slots` as in `LoraRows`.

    The layers read the result in kernels that start early, so a launch that is not programmatic must follow this one.
    """
    order, count = slots.argsort(stable=True), len(slots)
    if not 0 < count <= MOST_LISTED_ROWS:
        return LoraRows(slots, order)
    tiles = torch.empty((3, count), dtype=torch.int32, device=slots.device)
    find_tiles[(1,)](order, slots, tiles, count, ROWS=_ROWS, PLACES=MOST_LISTED_ROWS, num_warps=4)
    return LoraRows(slots, order, tiles=tiles)


def begin_lora(
    x: Tensor, weights: LoraWeights, rows: LoraRows, *, pdl: bool = False
) -> Callable[[Tensor], Tensor]:
    """Multiply x by A; the returned function adds the product with B to its argument, [T, N], and returns that.

    Args:
        x: [T, C], contiguous in C, in the dtype of the weights and of the outputs.
        weights: of all slots.
        rows: from `sorted_rows`.
        pdl: use programmatic dependent launch.
    """
    a, b, parts = weights
    slots, count, rank, inputs = a.shape
    assert rows.order is not None
    assert len(parts) <= 3, "q, k and v"
    assert x.dtype is a.dtype is b.dtype
    num_rows, tiles = len(x), rows.tiles
    num_tiles = triton.cdiv(num_rows, _ROWS)
    if tiles is not None:
        num_tiles = min(num_rows, num_tiles + slots)
    splits = max(1, min(_MOST_SPLITS, inputs // _FEWEST_COLUMNS))
    low = torch.empty((splits, count, num_rows, rank), dtype=torch.float32, device=x.device)
    fit = _TILE_BYTES // (rank * x.itemsize)
    columns, outputs = (min(max(fit, least), most) for least, most in (_COLUMNS, _OUTPUTS))
    if x.dtype is torch.float32:
        columns = _FLOAT32_COLUMNS
    shared = {"P": count, "R": rank, "SPLITS": splits, "ROWS": _ROWS, "num_warps": _THREADS // 32}
    shared |= {"LISTED": tiles is not None, **dependent_launch(pdl)}
    shrink[num_tiles, count, splits](
        x, a, rows.order, rows.slots, tiles, low, num_rows, x.stride(0),
        K=inputs, COLUMNS=columns, AHEAD=_AHEAD_BYTES * _THREADS // (rank * columns * x.itemsize), **shared,
    )  # fmt: skip
    first, second, *_ = (*(stop for _, stop in weights.bounds), sum(parts))

    def add_expanded(y: Tensor) -> Tensor:
        assert y.dtype is b.dtype
        expand[num_tiles, sum(triton.cdiv(it, outputs) for it in parts)](
            low, b, rows.order, rows.slots, tiles, y, num_rows, y.stride(0),
            FIRST=first, SECOND=second, N=sum(parts), OUTPUTS=outputs, **shared,
        )  # fmt: skip
        return y

    return add_expanded
