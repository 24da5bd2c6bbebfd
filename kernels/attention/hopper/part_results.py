"""Results of parts of the keys in batch-invariant attention on Hopper: kept in memory, and merged in a fixed order.

The result of a part is its unnormalized output, row maxima and row sums. Parts are merged one after the other, from
the last one down. A tile that visits all of its parts keeps the merge of those before in memory of its own, written and
read back by the same threads. A tile with a single part writes its result for the tile that finishes last, which
merges all. Both use `merge_part`, and a part whose keys a row does not see changes nothing but the sign of a zero.

Source: Dao et al., "Flash-Decoding", 2023.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.attention.hopper.pipeline import ROWS, output_row, row_exists

_MERGE_ROWS = gl.constexpr(8)
"""Rows that are merged at a time: most decodes have no more."""
_LOADED = gl.constexpr(4)
"""Parts that are loaded at once, so that their latencies overlap."""


@gluon.jit
def merge_part(acc, m, total, part, part_m, part_total):
    """Merge the result of the next part into that of the parts before it.

    Args:
        acc: [rows, D] float32, unnormalized output of the parts before.
        m: [rows] float32, their row maxima in units of log2; -inf for none.
        total: [rows] float32, their row sums of exponentials relative to `m`.
        part: as `acc`, of the next part; `part_m` and `part_total` likewise.

    Returns:
        (acc, m, total) of all of them.
    """
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    new_m = gl.maximum(m, part_m)
    # A row that has seen no key has the maximum -inf, and -inf - -inf is NaN.
    base = gl.where(new_m == float("-inf"), 0.0, new_m)
    fade = gl.exp2(m - base)
    weight = gl.exp2(part_m - base)
    wide_fade = gl.convert_layout(fade, rows, assert_trivial=True)[:, None]
    wide_weight = gl.convert_layout(weight, rows, assert_trivial=True)[:, None]
    acc = gl.fma(acc, wide_fade, part * wide_weight)
    return acc, new_m, gl.fma(total, fade, part_total * weight)


@gluon.jit
def normalized(acc, total):
    """Divide the output by the row sums; rows that see no key become 0.

    The sum with 0 is always +0 where the output is 0, whose sign depends on the other rows of the tile.
    """
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    nothing = total == 0.0
    inverse = gl.where(nothing, 0.0, 1.0 / gl.where(nothing, 1.0, total))
    inverse = gl.convert_layout(inverse, rows, assert_trivial=True)[:, None]
    return gl.fma(acc, inverse, 0.0)


@gluon.jit
def keep(running, acc, m, total, INDEX: gl.constexpr, c):
    """Write the result of the parts so far to this consumer's memory.

    Each output is read back by the thread that wrote it. Maxima and sums are read by four threads of the same warp,
    which pass a barrier of the consumer first: the compiler puts one before it waits for the next key tile.
    """
    # All of them must have read the values that this one replaces.
    gl.thread_barrier()
    running = _own_memory(running, INDEX, c)
    sums = running + ROWS * c.D + gl.arange(0, ROWS, layout=m.type.layout)
    gl.store(sums, m)
    gl.store(sums + ROWS, total)
    x = _by_thread(acc)
    gl.store(_places(running, x), x)


@gluon.jit
def merge_kept(running, acc, m, total, INDEX: gl.constexpr, c):
    """Merge the result of the next part into the one that `keep` wrote."""
    running = _own_memory(running, INDEX, c)
    sums = running + ROWS * c.D + gl.arange(0, ROWS, layout=m.type.layout)
    before_m = gl.load(sums, cache_modifier=".cg")
    before_total = gl.load(sums + ROWS, cache_modifier=".cg")
    if c.D > 128:
        # All columns at once do not fit in the registers beside those of this part.
        low, high = _halves(acc)
        low = _merge_halves(running, low, before_m, before_total, m, total)[0]
        high, m, total = _merge_halves(
            running + ROWS * c.D // 2, high, before_m, before_total, m, total
        )
        acc = _joined(low, high, c.O_LAYOUT)
    else:
        acc, m, total = _merge_columns(running, acc, before_m, before_total, m, total)
    return acc, m, total


@gluon.jit
def _merge_halves(running, acc, before_m, before_total, m, total):
    """Merge some columns, half of them at a time."""
    layout: gl.constexpr = acc.type.layout
    COLUMNS: gl.constexpr = acc.shape[1]
    low, high = _halves(acc)
    low = _merge_and_wait(running, low, before_m, before_total, m, total)[0]
    high, m, total = _merge_and_wait(
        running + ROWS * COLUMNS // 2, high, before_m, before_total, m, total
    )
    return _joined(low, high, layout), m, total


@gluon.jit
def _merge_and_wait(running, acc, before_m, before_total, m, total):
    """Merge some columns before any later load.

    The store is for the barrier, which it must precede; else the compiler loads all columns first, and spills them.
    """
    acc, m, total = _merge_columns(running, acc, before_m, before_total, m, total)
    x = _by_thread(acc)
    gl.store(_places(running, x), x)
    gl.thread_barrier()
    return acc, m, total


@gluon.jit
def _halves(acc):
    """Return the first and the second half of the columns."""
    return acc.reshape([ROWS, 2, acc.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _joined(low, high, layout: gl.constexpr):
    """Return all columns of two halves."""
    acc = gl.join(low, high).permute((0, 2, 1)).reshape([ROWS, 2 * low.shape[1]])
    return gl.convert_layout(acc, layout, assert_trivial=True)


@gluon.jit
def _merge_columns(running, acc, before_m, before_total, m, total):
    """Merge some columns of the result of the next part into those at `running`."""
    COLUMNS: gl.constexpr = acc.shape[1]
    x = gl.load(_places(running, _by_thread(acc)), cache_modifier=".cg")
    x = x.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    before = gl.convert_layout(x.reshape([ROWS, COLUMNS]), acc.type.layout, assert_trivial=True)
    return merge_part(before, before_m, before_total, acc, m, total)


@gluon.jit
def _own_memory(running, INDEX: gl.constexpr, c):
    """Return the memory of consumer `INDEX` of this program: ROWS * (D + 4) elements."""
    # Opaque to the compiler, which would read the register outside of the warp roles, and spill it.
    code: gl.constexpr = "mov.u32 $0, %ctaid.x;"
    program = gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return running + (program * c.CONSUMERS + INDEX) * (ROWS * (c.D + 4))


@gluon.jit
def _by_thread(acc):
    """Order [ROWS, columns] accumulators by thread, [elements / 4, 4]: each four are of one thread."""
    # Of row 16 w + 8 h + r and column 8 j + 2 p + e, register (j, h, e) of thread (w, r, p).
    COLUMNS: gl.constexpr = acc.shape[1]
    x = acc.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return x.reshape([ROWS * COLUMNS // 4, 4])


@gluon.jit
def _places(base, x):
    layout: gl.constexpr = x.type.layout
    quad = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))
    element = gl.arange(0, 4, layout=gl.SliceLayout(0, layout))
    return base + (quad[:, None] * 4 + element[None, :])


@gluon.jit
def store_part(partial_out, partial_sums, line, acc, m, total, my_row, q_len, c):
    """Write the rows of a part's result that exist, from row `line` of the step's results on.

    partial_out is [rows, HEAD_DIM] float32, partial_sums [rows, 2] float32: maximum and sum.
    """
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc.type.layout))
    column = gl.arange(0, c.D, layout=gl.SliceLayout(0, acc.type.layout))
    exists = row_exists(my_row + row, q_len, c)[:, None] & (column < c.HEAD_DIM)[None, :]
    place = (line + row)[:, None] * c.HEAD_DIM + column[None, :]
    gl.store(partial_out + place, acc, mask=exists)
    row = gl.arange(0, ROWS, layout=m.type.layout)
    exists = row_exists(my_row + row, q_len, c)
    gl.store(partial_sums + 2 * (line + row), m, mask=exists)
    gl.store(partial_sums + 2 * (line + row) + 1, total, mask=exists)


@gluon.jit
def merge_parts(
    out, partial_out, partial_sums, line, stride, parts, my_row, head, q_start, q_len, c
):  # fmt: skip
    """Merge the results of a tile's parts and write the output of this consumer's rows.

    Row 0 of the first part is row `line` of the step's results; those of the next part come `stride` rows later.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    rows = gl.minimum(q_len * c.BOX - my_row, ROWS)
    column = gl.arange(0, c.D, layout=gl.SliceLayout(0, layout))
    for first in range(0, rows, _MERGE_ROWS):
        row = first + gl.arange(0, _MERGE_ROWS, layout=lines)
        exists = row_exists(my_row + row, q_len, c)
        acc = gl.zeros([_MERGE_ROWS, c.D], gl.float32, layout=layout)
        m = gl.full([_MERGE_ROWS], float("-inf"), gl.float32, layout=lines)
        total = gl.zeros([_MERGE_ROWS], gl.float32, layout=lines)
        for i in range(0, parts, _LOADED):
            loaded = ()
            for j in gl.static_range(_LOADED):
                number = parts - 1 - (i + j)
                results = _load_part(
                    partial_out, partial_sums, line + number * stride + row, column,
                    exists & (number >= 0), c,
                )  # fmt: skip
                loaded = loaded + (results,)  # type: ignore[assignment]  # Gluon cannot unpack
            for j in gl.static_range(_LOADED):
                acc, m, total = merge_part(acc, m, total, loaded[j][0], loaded[j][1], loaded[j][2])
        acc = normalized(acc, total)
        place = output_row(my_row + row, q_start, head, c)[:, None] * c.HEAD_DIM + column[None, :]
        mask = exists[:, None] & (column < c.HEAD_DIM)[None, :]
        gl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _load_part(partial_out, partial_sums, line, column, mask, c):
    """Load some rows of a part's result: (output, maximum, sum); a row outside of `mask` has seen no key."""
    # Other programs wrote these, so the loads must bypass the L1 cache.
    m = gl.load(partial_sums + 2 * line, mask=mask, other=float("-inf"), cache_modifier=".cg")
    total = gl.load(partial_sums + 2 * line + 1, mask=mask, other=0.0, cache_modifier=".cg")
    acc = gl.load(
        partial_out + line[:, None] * c.HEAD_DIM + column[None, :],
        mask=mask[:, None] & (column < c.HEAD_DIM)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    return acc, m, total
