"""A consumer of a Hopper prefill: a warp group that attends 64 query rows of every item.

It issues the scores of the next tile, then the values of this one, and computes exponentials while the
tensor cores work. Consumers take turns at issuing, so that one's exponentials run beside another's
products. Knows buffers and barriers from `hopper_pipeline`, nothing of where keys come from.

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

from kernels.attention.hopper_pipeline import (
    ROWS,
    first_kept,
    key_range,
    next_item,
    output_row,
    row_exists,
)

_LN_2 = gl.constexpr(0.6931471805599453)
FIELDS = gl.constexpr(5)
"""Of an item: head, first row, first query token, query tokens, keys."""
_CHUNK = gl.constexpr(16)
"""Rows of a value tile that are cleared at a time."""


@gluon.jit
def consume(pipe, o_desc, out, lse, scale, window, softcap, INDEX: gl.constexpr, c):
    """Attend the rows of every item that are those of consumer `INDEX`."""
    MINE: gl.constexpr = turn(INDEX)
    NEXT: gl.constexpr = turn((INDEX + 1) % c.CONSUMERS)
    if INDEX == c.CONSUMERS - 1:
        pass_turn(NEXT)
    done = 0
    consumed = 0
    queries = 0
    head, first_row, q_start, q_len, num_keys = next_item(pipe, done, FIELDS)
    while head >= 0:
        tiles = key_range(first_row, q_len, num_keys, window, c)
        my_row = first_row + INDEX * ROWS
        m, total, acc, consumed, queries = attend_item(
            pipe, tiles, my_row, q_len, num_keys, consumed, queries, scale, window, softcap,
            INDEX, MINE, NEXT, c,
        )  # fmt: skip
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
        take_turn(MINE)


@gluon.jit
def attend_item(
    pipe, tiles, my_row, q_len, num_keys, consumed, queries, scale, window, softcap,
    INDEX: gl.constexpr, MINE: gl.constexpr, NEXT: gl.constexpr, c,
):  # fmt: skip
    """Attend this consumer's rows of an item to all of its tiles.

    Returns:
        (maximum and sum of exponentials of each row, output before it is divided by that sum, tiles
        and items with keys that this consumer has used so far).
    """
    row_layout: gl.constexpr = gl.SliceLayout(1, c.S_LAYOUT)
    factor = scale
    if c.SOFTCAP:
        factor = 1.0
    q = pipe.q.index(INDEX)
    last, count, edge, inside = tiles
    acc = gl.zeros([ROWS, c.D], gl.float32, layout=c.O_LAYOUT)
    total = gl.full([ROWS], 0.0, gl.float32, layout=row_layout)
    m = gl.full([ROWS], float("-inf"), gl.float32, layout=row_layout)
    if count > 0:
        token = (my_row + gl.arange(0, ROWS, layout=row_layout)) // c.BOX
        # Rows past the sequence's end repeat its last, so that the tile has no masks on their account.
        last_seen = num_keys - q_len + gl.minimum(token, q_len - 1)
        mbarrier.wait(pipe.q_full.index(0), queries & 1)
        m, total, p = start_item(
            q, pipe, consumed, last, count, last_seen, num_keys, window, factor, scale, softcap,
            MINE, NEXT, c,
        )  # fmt: skip
        state = (m, total, acc, p)
        for i in range(1, count):
            state = consume_tile(
                i, state, q, pipe, consumed, last, count, edge, inside, last_seen, num_keys, window,
                factor, scale, softcap, MINE, NEXT, c,
            )  # fmt: skip
        m, total, acc, p = state
        queries += 1
        consumed += count
        buffer = (consumed - 1) % c.STAGES
        mbarrier.wait(pipe.v_full.index(buffer), ((consumed - 1) // c.STAGES) & 1)
        if c.WINDOW:
            gone = first_kept(q_len, num_keys, window) - (last - count) * c.BLOCK_N
            if gone > 0:
                keep_rows(pipe.v.index(buffer), gone, c.BLOCK_N, c)
        acc = warpgroup_mma(p, pipe.v.index(buffer), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(pipe.v_empty.index(buffer), count=1)
    return m, total, acc, consumed, queries


@gluon.jit
def start_item(
    q, pipe, consumed, last, count, last_seen, num_keys, window, factor, scale, softcap,
    MINE: gl.constexpr, NEXT: gl.constexpr, c,
):  # fmt: skip
    """Compute the exponentials of an item's first tile, the one at the end of its keys."""
    dtype: gl.constexpr = pipe.q.dtype
    buffer = consumed % c.STAGES
    phase = (consumed // c.STAGES) & 1
    zeros = gl.zeros([ROWS, c.BLOCK_N], gl.float32, layout=c.S_LAYOUT)
    m = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, c.S_LAYOUT))
    mbarrier.wait(pipe.k_full.index(buffer), phase)
    take_turn(MINE)
    keys = pipe.k.index(buffer).permute((1, 0))
    s = warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)
    pass_turn(NEXT)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(pipe.k_empty.index(buffer), count=1)
    mbarrier.arrive(pipe.q_empty.index(0), count=1, pred=(count == 1) & c.OWN_OUTPUT)
    s = cap_scores(s, scale, softcap, c)
    s = mask_scores(s, (last - 1) * c.BLOCK_N, last_seen, num_keys, window, c)
    e, _, m = softmax_step(s, m, factor)
    total = gl.sum(e, 1)
    p = gl.convert_layout(e.to(dtype), c.P_LAYOUT, assert_trivial=True)
    if num_keys < last * c.BLOCK_N:
        mbarrier.wait(pipe.v_full.index(buffer), phase)
        keep_rows(pipe.v.index(buffer), 0, num_keys - (last - 1) * c.BLOCK_N, c)
    return m, total, p


@gluon.jit
def consume_tile(
    i, state, q, pipe, consumed, last, count, edge, inside, last_seen, num_keys, window,
    factor, scale, softcap, MINE: gl.constexpr, NEXT: gl.constexpr, c,
):  # fmt: skip
    """Issue the scores of tile i, then the values of tile i - 1; exponentials of i meanwhile."""
    dtype: gl.constexpr = pipe.q.dtype
    m, total, acc, p = state
    k_buffer = (consumed + i) % c.STAGES
    v_buffer = (consumed + i - 1) % c.STAGES
    zeros = gl.zeros([ROWS, c.BLOCK_N], gl.float32, layout=c.S_LAYOUT)
    mbarrier.wait(pipe.k_full.index(k_buffer), ((consumed + i) // c.STAGES) & 1)
    take_turn(MINE)
    keys = pipe.k.index(k_buffer).permute((1, 0))
    s_async = warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)
    mbarrier.wait(pipe.v_full.index(v_buffer), ((consumed + i - 1) // c.STAGES) & 1)
    acc_async = warpgroup_mma(p, pipe.v.index(v_buffer), acc, is_async=True)
    pass_turn(NEXT)
    s = warpgroup_mma_wait(1, deps=(s_async,))
    mbarrier.arrive(pipe.k_empty.index(k_buffer), count=1)
    mbarrier.arrive(pipe.q_empty.index(0), count=1, pred=(i == count - 1) & c.OWN_OUTPUT)
    s = cap_scores(s, scale, softcap, c)
    if (i < edge) | (i >= inside):
        s = mask_scores(s, (last - 1 - i) * c.BLOCK_N, last_seen, num_keys, window, c)
    e, fade, m = softmax_step(s, m, factor)
    total = total * fade + gl.sum(e, 1)
    acc = warpgroup_mma_wait(0, deps=(acc_async,))
    mbarrier.arrive(pipe.v_empty.index(v_buffer), count=1)
    out_rows: gl.constexpr = gl.SliceLayout(1, c.O_LAYOUT)
    acc = acc * gl.convert_layout(fade, out_rows, assert_trivial=True)[:, None]
    p = gl.convert_layout(e.to(dtype), c.P_LAYOUT, assert_trivial=True)
    return m, total, acc, p


@gluon.constexpr_function
def turn(index):
    """Name of the hardware barrier that a consumer waits at; the compiler takes the low ones."""
    return str(9 + index)


@gluon.jit
def take_turn(ID: gl.constexpr):
    """Wait for the consumer before this one to be done with issuing to the tensor cores."""
    code: gl.constexpr = "bar.sync " + ID + ", 256; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(ID: gl.constexpr):
    """Let the consumer after this one issue."""
    code: gl.constexpr = "bar.arrive " + ID + ", 256; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def cap_scores(s, scale, softcap, c):
    """Apply the softcap; without one, scores stay as they are. Arguments as `exponents` makes them."""
    if c.SOFTCAP:
        s = softcap - 2.0 * softcap / (gl.exp2(s * scale) + 1.0)
    return s


@gluon.jit
def mask_scores(s, start, last_seen, num_keys, window, c):
    """Put -inf where a row does not see a key; `start` is the tile's first key."""
    key = start + gl.arange(0, c.BLOCK_N, layout=gl.SliceLayout(0, c.S_LAYOUT))
    if c.CAUSAL:
        # No row sees past the sequence's end, so that end needs no test of its own.
        distance = last_seen[:, None] - key[None, :]
        seen = distance >= 0
        if c.WINDOW:
            # Keys after the row's own are negative, and as unsigned numbers further than any window.
            seen = distance.to(gl.uint32, bitcast=True) < window.to(gl.uint32, bitcast=True)
    else:
        seen = key[None, :] < num_keys
        if c.WINDOW:
            seen = seen & (key[None, :] > last_seen[:, None] - window)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def softmax_step(s, m, factor):
    """Exponentials of a tile against the new maximum, and what earlier ones fade by."""
    new_m = gl.maximum(m, gl.max(s, 1) * factor)
    # A row that has seen nothing yet has the maximum -inf, and -inf - -inf is not a number.
    base = gl.where(new_m == float("-inf"), 0.0, new_m)
    p = gl.exp2(s * factor - base[:, None])
    fade = gl.exp2(m - base)
    return p, fade, new_m


@gluon.jit
def keep_rows(v_tile, first, stop, c):
    """Set the values outside rows `first` to `stop` to 0: their weight is 0, and 0 * NaN is NaN.

    Every consumer writes the same zeros, each before it reads them.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for chunk in gl.static_range(c.BLOCK_N // _CHUNK):
        if (first > chunk * _CHUNK) | (stop < (chunk + 1) * _CHUNK):
            part = v_tile.slice(chunk * _CHUNK, _CHUNK, dim=0)
            row = chunk * _CHUNK + gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, layout))
            kept = (row >= first) & (row < stop)
            values = part.load(layout)
            part.store(gl.where(kept[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def store_output(
    pipe, o_desc, out, acc, my_row, head, q_start, q_len, count, INDEX: gl.constexpr, c
):
    """Write 64 rows: in one bulk copy, or one by one at the sequence's end and where some stand for no head."""
    dtype: gl.constexpr = pipe.o.dtype
    # The room of the queries is this item's only if it had any keys; else the next item's are there.
    whole: gl.constexpr = c.BOX == c.GROUP
    if whole & (my_row + ROWS <= q_len * c.BOX) & ((count > 0) | c.OWN_OUTPUT):
        # The copy of the item before has to be done with reading; only its issuer can wait for it.
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
        place = output_row(row, q_start, head, c)[:, None] * c.D + column[None, :]
        gl.store(out + place, acc.to(dtype), mask=row_exists(row, q_len, c)[:, None])
