"""Softmax group of the Blackwell prefill: turns the scores of 128 query rows of every work item into weights.

A thread holds a row of scores, so maxima and sums need no exchange between threads. Output stays in tensor memory. It
is rescaled only if the maximum of a row has grown by more than `exponentials.LAG`, which is rare after the first tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fence_async_shared, mbarrier, tma

from kernels.attention.blackwell.exponentials import (
    exponentials,
    lagging_maximum,
    largest_of_rows,
    sums_of_rows,
)
from kernels.attention.blackwell.pipeline import (
    OUT_COLUMNS,
    ROWS,
    fence_after_wait,
    fence_before_arrival,
    next_item,
    row_layout,
    tiles_of_group,
    weights_of,
)
from kernels.attention.hopper.ping_pong import keep_rows
from kernels.attention.hopper.pipeline import first_kept, key_range, output_row, row_exists

_LN_2 = gl.constexpr(0.6931471805599453)
_FEW_COLUMNS = gl.constexpr(32)
"""Columns of tensor memory that are changed in place at a time, while the registers hold a row of scores too."""


@gluon.jit
def soften_items(pipe, o_desc, out, lse, scale, window, softcap, INDEX: gl.constexpr, c):
    """Compute attention for the rows of softmax group `INDEX` of every item."""
    done = 0
    used = 0
    my_used = 0
    head, first_row, q_start, q_len, num_keys = next_item(pipe, done, 4)
    while head >= 0:
        tiles = key_range(first_row, q_len, num_keys, window, c)
        my_row = first_row + INDEX * ROWS
        m, total, count = soften_item(
            pipe, tiles, my_row, q_len, num_keys, used, my_used, scale, window, softcap, INDEX, c
        )
        used += tiles[1]
        my_used += count
        if count > 0:
            mbarrier.wait(pipe.o_full.index(INDEX), (my_used - 1) & 1)
            fence_after_wait()
        store_output(pipe, o_desc, out, total, my_row, head, q_start, q_len, INDEX, c)
        if c.LSE:
            nothing = total == 0.0
            log_sum = m + gl.log2(gl.where(nothing, 1.0, total))
            log_sum = gl.where(nothing, float("-inf"), log_sum) * _LN_2
            row = my_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, c.S_LAYOUT))
            gl.store(
                lse + output_row(row, q_start, head, c), log_sum, mask=row_exists(row, q_len, c)
            )
        done += 1
        head, first_row, q_start, q_len, num_keys = next_item(pipe, done, 4)
    tma.store_wait(0)


@gluon.jit
def soften_item(
    pipe, tiles, my_row, q_len, num_keys, used, my_used, scale, window, softcap,
    INDEX: gl.constexpr, c,
):  # fmt: skip
    """Turn the scores of a group's rows of an item into weights, tile by tile.

    Returns:
        (row maximum, row sum of the weights, number of tiles).
    """
    rows: gl.constexpr = gl.SliceLayout(1, c.S_LAYOUT)
    passed, last, count, edge, inside = tiles_of_group(tiles, my_row, q_len, num_keys, window, c)
    token = (my_row + gl.arange(0, ROWS, layout=rows)) // c.BOX
    # Rows past the sequence's end use the causal limit of its last token, so that they need no extra mask.
    last_seen = num_keys - q_len + gl.minimum(token, q_len - 1)
    total = gl.full([ROWS], 0.0, gl.float32, layout=rows)
    m = gl.full([ROWS], float("-inf"), gl.float32, layout=rows)
    factor = scale
    if c.SOFTCAP:
        factor = 1.0
    for i in range(count):
        start = (last - 1 - i) * c.BLOCK_N
        drop_values(pipe, used + passed + i, i, count, start, q_len, num_keys, window, c)
        mbarrier.wait(pipe.s_full.index(INDEX), (my_used + i) & 1)
        fence_after_wait()
        if c.SOFTCAP:
            cap_scores(pipe.scores.index(INDEX), scale, softcap, c)
        s = pipe.scores.index(INDEX).load(c.S_LAYOUT)
        if (i < edge) | (i >= inside):
            s = mask_scores(s, last_seen - start, num_keys - start, window, c)
        new_m = lagging_maximum(m, largest_of_rows(s, c) * factor)
        # A row that has seen no key has the maximum -inf, and -inf - -inf is NaN.
        base = gl.where(new_m == float("-inf"), 0.0, new_m)
        fade = gl.exp2(m - base)
        # The first product of an item overwrites the output, so the first tile has nothing to rescale.
        if (i > 0) & any_row(pipe.votes.index(INDEX), new_m > m):
            mbarrier.wait(pipe.o_full.index(INDEX), (my_used + i - 1) & 1)
            fence_after_wait()
            rescale_output(pipe.outputs.index(INDEX), fade, c)
        m = new_m
        e = exponentials(s * factor - base[:, None], c)
        weights_of(pipe.scores.index(INDEX), pipe.q.dtype).store(e.to(pipe.q.dtype))
        fence_before_arrival()
        gl.thread_barrier()
        mbarrier.arrive(pipe.p_full.index(INDEX), count=1)
        total = total * fade + sums_of_rows(e, c)
    return m, total, count


@gluon.jit
def cap_scores(scores, scale, softcap, c):
    """Apply the softcap to scores in tensor memory, a few columns at a time, since a whole row's would spill.

    Arguments as `exponents` of the Hopper kernel returns them.
    """
    layout: gl.constexpr = row_layout(_FEW_COLUMNS)
    for j in gl.static_range(c.BLOCK_N // _FEW_COLUMNS):
        part = scores.slice(j * _FEW_COLUMNS, _FEW_COLUMNS)
        s = part.load(layout)
        part.store(softcap - 2.0 * softcap / (gl.exp2(s * scale) + 1.0))


@gluon.jit
def mask_scores(s, last_seen, num_keys, window, c):
    """Set the scores of keys that a row does not see to -inf; both limits count from the tile's first key.

    Each comparison is between a constant of the register and a limit of the row: differences of a row's limit and each
    column would be computed ahead of the loop, and do not fit in registers.
    """
    column = gl.arange(0, c.BLOCK_N, layout=gl.SliceLayout(0, c.S_LAYOUT))[None, :]
    if c.CAUSAL:
        # The causal limit of every row lies within the sequence, so `num_keys` needs no test.
        seen = column <= last_seen[:, None]
    else:
        seen = column < num_keys
    if c.WINDOW:
        seen = seen & (column > (last_seen - window)[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def drop_values(pipe, tile, i, count, start, q_len, num_keys, window, c):
    """Zero the values of a tile that lie outside the sequence or before every window: 0 * NaN is NaN.

    `tile` is the tile's number in the ring. Both groups write the same zeros before their own weights are multiplied.
    """
    first = 0
    stop = c.BLOCK_N
    if i == 0:
        stop = num_keys - start
    if c.WINDOW:
        first = gl.where(i == count - 1, first_kept(q_len, num_keys, window) - start, 0)
    if (first > 0) | (stop < c.BLOCK_N):
        buffer = tile % c.STAGES
        mbarrier.wait(pipe.v_full.index(buffer), (tile // c.STAGES) & 1)
        keep_rows(pipe.v.index(buffer), first, stop, c)


@gluon.jit
def any_row(votes, condition):
    """Whether a condition holds for any of a group's rows: reduced in each warp, then exchanged in shared memory."""
    of_warps = gl.max(condition.to(gl.int32).reshape([4, ROWS // 4]), 1)
    votes.store(of_warps)
    everywhere: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    return gl.max(votes.load(everywhere), 0) > 0


@gluon.jit
def rescale_output(output, fade, c):
    """Multiply a group's rows of output in tensor memory by a factor per row."""
    layout: gl.constexpr = row_layout(_FEW_COLUMNS)
    factor = gl.convert_layout(fade, gl.SliceLayout(1, layout), assert_trivial=True)
    for j in gl.static_range(c.D // _FEW_COLUMNS):
        part = output.slice(j * _FEW_COLUMNS, _FEW_COLUMNS)
        part.store(part.load(layout) * factor[:, None])


@gluon.jit
def store_output(
    pipe, o_desc, out, total, my_row, head, q_start, q_len, INDEX: gl.constexpr, c
):  # fmt: skip
    """Write 128 rows: with TMA stores, or with plain stores if some lie past the sequence or belong to no head."""
    dtype: gl.constexpr = pipe.o.dtype
    layout: gl.constexpr = row_layout(OUT_COLUMNS)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    total = gl.convert_layout(total, rows, assert_trivial=True)
    # A row that has seen no key may have an output that was never written.
    nothing = total == 0.0
    inverse = 1.0 / gl.where(nothing, 1.0, total)
    whole: gl.constexpr = c.BOX == c.GROUP
    for j in gl.static_range(c.D // OUT_COLUMNS):
        o = pipe.outputs.index(INDEX).slice(j * OUT_COLUMNS, OUT_COLUMNS).load(layout)
        o = gl.where(nothing[:, None], 0.0, o * inverse[:, None]).to(dtype)
        if whole & (my_row + ROWS <= q_len * c.BOX):
            # The previous TMA store must have read the staging buffer; only the thread that issued it can wait.
            tma.store_wait(0)
            gl.thread_barrier()
            staged = pipe.o.index(INDEX)
            staged.store(o)
            fence_async_shared()
            gl.thread_barrier()
            where = [q_start + my_row // c.BOX, head * c.GROUP, j * OUT_COLUMNS]
            shape: gl.constexpr = [ROWS // c.BOX, c.BOX, OUT_COLUMNS]
            source = staged._reinterpret(dtype, shape, o_desc.layout)
            tma.async_copy_shared_to_global(o_desc, where, source)
        else:
            row = my_row + gl.arange(0, ROWS, layout=rows)
            column = j * OUT_COLUMNS + gl.arange(0, OUT_COLUMNS, layout=gl.SliceLayout(0, layout))
            place = output_row(row, q_start, head, c)[:, None] * c.HEAD_DIM + column[None, :]
            gl.store(out + place, o, mask=row_exists(row, q_len, c)[:, None])
