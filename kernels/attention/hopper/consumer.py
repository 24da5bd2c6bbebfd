"""Consumer warp group of the Hopper prefill kernel: computes attention for 64 query rows of every work item.

A consumer issues the score WGMMA (Q K^T) of the next key tile, then the output WGMMA (P V) of the current one, and
computes exponentials while the tensor cores run. Named barriers order the consumers (`ping_pong`), so that the
softmax of one warp group overlaps the WGMMAs of another. `pipeline` defines the buffers and mbarriers.

Source: Shah et al., "FlashAttention-3", 2024.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.attention.hopper.ping_pong import (
    barrier_arrive,
    barrier_sync,
    consumer_barrier,
    keep_rows,
)
from kernels.attention.hopper.pipeline import (
    ROWS,
    first_kept,
    key_range,
    next_item,
    output_row,
    own_tiles,
    row_exists,
)
from kernels.attention.hopper.scores import (
    add_sums,
    all_of,
    cap_scores,
    mask_tile,
    row_sums,
    softmax_tile,
)

_LN_2 = gl.constexpr(0.6931471805599453)
FIELDS = gl.constexpr(5)
"""Fields of an item: head, first row, first query token, query tokens, keys."""


@gluon.jit
def consume(pipe, o_desc, out, lse, scale, window, softcap, INDEX: gl.constexpr, c):
    """Compute attention for the rows of consumer `INDEX` of every item."""
    MINE: gl.constexpr = consumer_barrier(INDEX)
    NEXT: gl.constexpr = consumer_barrier((INDEX + 1) % c.CONSUMERS)
    if INDEX == c.CONSUMERS - 1:
        barrier_arrive(NEXT)
    done = 0
    consumed = 0
    queries = 0
    head, first_row, q_start, q_len, num_keys = next_item(pipe, done, FIELDS)
    while head >= 0:
        tiles = key_range(first_row, q_len, num_keys, window, c)
        my_row = first_row + INDEX * ROWS
        m, total, acc = attend_item(
            pipe, tiles, my_row, q_len, num_keys, consumed, queries, scale, window, softcap,
            INDEX, MINE, NEXT, c,
        )  # fmt: skip
        consumed += tiles[1]
        queries += (tiles[1] > 0).to(gl.int32)
        nothing = total == 0.0
        total = gl.where(nothing, 1.0, total)
        inverse = gl.where(nothing, 0.0, 1.0 / total)
        out_rows: gl.constexpr = gl.SliceLayout(1, c.O_LAYOUT)
        acc = acc * gl.convert_layout(inverse, out_rows, assert_trivial=True)[:, None]
        store_output(pipe, o_desc, out, acc, my_row, head, q_start, q_len, tiles[1], INDEX, c)
        if not c.OWN_OUTPUT:
            tma.store_wait(0)
            gl.thread_barrier()
            mbarrier.arrive(pipe.q_empty.index(0), count=1, pred=tiles[1] > 0)
        if c.LSE:
            log_sum = gl.where(nothing, float("-inf"), m + gl.log2(total)) * _LN_2
            row = my_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, c.S_LAYOUT))
            gl.store(
                lse + output_row(row, q_start, head, c), log_sum, mask=row_exists(row, q_len, c)
            )
        done += 1
        head, first_row, q_start, q_len, num_keys = next_item(pipe, done, FIELDS)
    tma.store_wait(0)
    if INDEX == 0:
        barrier_sync(MINE)


@gluon.jit
def attend_item(
    pipe, tiles, my_row, q_len, num_keys, consumed, queries, scale, window, softcap,
    INDEX: gl.constexpr, MINE: gl.constexpr, NEXT: gl.constexpr, c,
):  # fmt: skip
    """Compute attention of this consumer's rows of an item over all of its key tiles.

    Returns:
        (row maximum, row sum of exponentials, output before the division by that sum).
    """
    row_layout: gl.constexpr = gl.SliceLayout(1, c.S_LAYOUT)
    factor = scale
    if c.SOFTCAP:
        factor = 1.0
    q = pipe.q.index(INDEX)
    passed, left, last, count, edge, inside = own_tiles(tiles, my_row, q_len, num_keys, window, c)
    acc = gl.zeros([ROWS, c.D], gl.float32, layout=c.O_LAYOUT)
    total = gl.full([ROWS], 0.0, gl.float32, layout=row_layout)
    m = gl.full([ROWS], float("-inf"), gl.float32, layout=row_layout)
    if tiles[1] > 0:
        mbarrier.wait(pipe.q_full.index(0), queries & 1)
        for i in range(passed):
            pass_over(pipe, consumed + i, MINE, NEXT, c)
        consumed += passed
    if count > 0:
        token = (my_row + gl.arange(0, ROWS, layout=row_layout)) // c.BOX
        # Rows past the sequence's end use the causal limit of its last token, so that they need no extra mask.
        last_seen = num_keys - q_len + gl.minimum(token, q_len - 1)
        m, parts, p = start_item(
            q, pipe.q_empty.index(0), pipe, consumed, last, count, last_seen, num_keys, window, factor,
            scale, softcap, MINE, NEXT, c,
        )  # fmt: skip
        state = (m, parts, acc, p)
        for i in range(1, count):
            state = consume_tile(
                i, state, q, pipe.q_empty.index(0), pipe, consumed, last, count, edge, inside,
                last_seen, num_keys, window, factor, scale, softcap, MINE, NEXT, c,
            )  # fmt: skip
        m, parts, acc, p = state
        total = all_of(parts, c)
        consumed += count
        first = (last - count) * c.BLOCK_N
        acc = finish_item(pipe, p, acc, first, consumed - 1, q_len, num_keys, window, c)
    elif tiles[1] > 0:
        mbarrier.arrive(pipe.q_empty.index(0), count=1, pred=c.OWN_OUTPUT)
    for i in range(left):
        pass_over(pipe, consumed + i, MINE, NEXT, c)
    return m, total, acc


@gluon.jit
def finish_item(pipe, p, acc, first, used, q_len, num_keys, window, c):
    """Issue the output WGMMA of an item's last tile: tile number `used` of the ring, which begins at key `first`."""
    buffer = used % c.STAGES
    mbarrier.wait(pipe.v_full.index(buffer), (used // c.STAGES) & 1)
    if c.WINDOW:
        gone = first_kept(q_len, num_keys, window) - first
        if gone > 0:
            keep_rows(pipe.v.index(buffer), gone, c.BLOCK_N, c)
    acc = warpgroup_mma(p, pipe.v.index(buffer), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(pipe.v_empty.index(buffer), count=1)
    return acc


@gluon.jit
def pass_over(pipe, used, MINE: gl.constexpr, NEXT: gl.constexpr, c):
    """Release tile number `used` of the ring without reading it, because no row of this consumer sees its keys."""
    buffer = used % c.STAGES
    phase = (used // c.STAGES) & 1
    # An arrive counts toward the mbarrier's current phase, so wait until this tile's phase has begun. All warps of the
    # consumer have waited when one thread arrives: the compiler puts a barrier of the consumer before each arrive.
    mbarrier.wait(pipe.k_full.index(buffer), phase)
    barrier_sync(MINE)
    barrier_arrive(NEXT)
    mbarrier.wait(pipe.v_full.index(buffer), phase)
    mbarrier.arrive(pipe.k_empty.index(buffer), count=1)
    mbarrier.arrive(pipe.v_empty.index(buffer), count=1)


@gluon.jit
def start_item(
    q, q_empty, pipe, consumed, last, count, last_seen, num_keys, window, factor, scale, softcap,
    MINE: gl.constexpr, NEXT: gl.constexpr, c,
):  # fmt: skip
    """Compute the exponentials of the tile that an item visits first, which holds its last keys.

    `q_empty` is the mbarrier of the stage that holds the queries `q`.
    """
    dtype: gl.constexpr = pipe.q.dtype
    buffer = consumed % c.STAGES
    phase = (consumed // c.STAGES) & 1
    zeros = gl.zeros([ROWS, c.BLOCK_N], gl.float32, layout=c.S_LAYOUT)
    m = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, c.S_LAYOUT))
    mbarrier.wait(pipe.k_full.index(buffer), phase)
    barrier_sync(MINE)
    keys = pipe.k.index(buffer).permute((1, 0))
    s = warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)
    barrier_arrive(NEXT)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(pipe.k_empty.index(buffer), count=1)
    mbarrier.arrive(q_empty, count=1, pred=(count == 1) & c.OWN_OUTPUT)
    s = cap_scores(s, scale, softcap, c)
    s = mask_tile(s, (last - 1) * c.BLOCK_N, last_seen, num_keys, window, c)
    e, _, m = softmax_tile(s, m, factor, c)
    parts = row_sums(e, c)
    p = gl.convert_layout(e.to(dtype), c.P_LAYOUT, assert_trivial=True)
    if num_keys < last * c.BLOCK_N:
        mbarrier.wait(pipe.v_full.index(buffer), phase)
        keep_rows(pipe.v.index(buffer), 0, num_keys - (last - 1) * c.BLOCK_N, c)
    return m, parts, p


@gluon.jit
def consume_tile(
    i, state, q, q_empty, pipe, consumed, last, count, edge, inside, last_seen, num_keys, window,
    factor, scale, softcap, MINE: gl.constexpr, NEXT: gl.constexpr, c,
):  # fmt: skip
    """Issue the score WGMMA of tile i, then the output WGMMA of tile i - 1, and compute the exponentials of tile i."""
    dtype: gl.constexpr = pipe.q.dtype
    m, parts, acc, p = state
    k_buffer = (consumed + i) % c.STAGES
    v_buffer = (consumed + i - 1) % c.STAGES
    zeros = gl.zeros([ROWS, c.BLOCK_N], gl.float32, layout=c.S_LAYOUT)
    mbarrier.wait(pipe.k_full.index(k_buffer), ((consumed + i) // c.STAGES) & 1)
    barrier_sync(MINE)
    keys = pipe.k.index(k_buffer).permute((1, 0))
    s_async = warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)
    mbarrier.wait(pipe.v_full.index(v_buffer), ((consumed + i - 1) // c.STAGES) & 1)
    acc_async = warpgroup_mma(p, pipe.v.index(v_buffer), acc, is_async=True)
    barrier_arrive(NEXT)
    s = warpgroup_mma_wait(1, deps=(s_async,))
    mbarrier.arrive(pipe.k_empty.index(k_buffer), count=1)
    mbarrier.arrive(q_empty, count=1, pred=(i == count - 1) & c.OWN_OUTPUT)
    s = cap_scores(s, scale, softcap, c)
    if (i < edge) | (i >= inside):
        s = mask_tile(s, (last - 1 - i) * c.BLOCK_N, last_seen, num_keys, window, c)
    e, fade, m = softmax_tile(s, m, factor, c)
    parts = add_sums(parts, fade, row_sums(e, c), c)
    acc = warpgroup_mma_wait(0, deps=(acc_async,))
    mbarrier.arrive(pipe.v_empty.index(v_buffer), count=1)
    out_rows: gl.constexpr = gl.SliceLayout(1, c.O_LAYOUT)
    acc = acc * gl.convert_layout(fade, out_rows, assert_trivial=True)[:, None]
    p = gl.convert_layout(e.to(dtype), c.P_LAYOUT, assert_trivial=True)
    return m, parts, acc, p


@gluon.jit
def store_output(
    pipe, o_desc, out, acc, my_row, head, q_start, q_len, count, INDEX: gl.constexpr, c
):
    """Write 64 rows: with one TMA store, or with plain stores if some lie past the sequence or belong to no head.

    A single consumer, which has only decodes, always stores plainly.
    """
    dtype: gl.constexpr = pipe.o.dtype
    # Without OWN_OUTPUT the output is staged in the queries' buffer. An item without keys does not own that buffer:
    # it may already contain the next item's queries.
    whole: gl.constexpr = c.BOX == c.GROUP and c.CONSUMERS > 1
    if whole & (my_row + ROWS <= q_len * c.BOX) & ((count > 0) | c.OWN_OUTPUT):
        # The previous item's TMA store must have read the staging buffer; only the thread that issued it can wait.
        tma.store_wait(0)
        gl.thread_barrier()
        staged = pipe.o.index(INDEX)
        staged.store(acc.to(dtype))
        fence_async_shared()
        where = [q_start + my_row // c.BOX, head * c.GROUP, 0]
        shape: gl.constexpr = [ROWS // c.BOX, c.BOX, c.D]
        source = staged._reinterpret(dtype, shape, o_desc.layout)
        tma.async_copy_shared_to_global(o_desc, where, source)
    else:
        row = my_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, c.O_LAYOUT))
        column = gl.arange(0, c.D, layout=gl.SliceLayout(0, c.O_LAYOUT))
        place = output_row(row, q_start, head, c)[:, None] * c.HEAD_DIM + column[None, :]
        exists = row_exists(row, q_len, c)[:, None]
        if c.HEAD_DIM < c.D:
            exists &= (column < c.HEAD_DIM)[None, :]
        gl.store(out + place, acc.to(dtype), mask=exists)
