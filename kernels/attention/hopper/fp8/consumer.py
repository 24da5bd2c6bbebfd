"""Consumer warp group of the FP8 Hopper prefill kernel: computes attention for 64 query rows of every work item.

It differs from `consumer` as follows:

    scales       each query row, each tile of keys and each tile of values has a scale
    sums         an FP8 WGMMA accumulates with about 14 bits, so it accumulates over one tile only; the outputs
                 of the tiles (P V) are added in float32
    weights      the softmax weights go up to 448, the largest e4m3 number, instead of 1; they stay in the
                 registers of the scores, since `tiles` stores the values in the matching order

Source: Shah et al., "FlashAttention-3", 2024, for the warp roles and for FP8 with block scales; the
"DeepSeek-V3 Technical Report", 2024, section 3.3, for the accumulator's precision and the remedy.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.attention.hopper.consumer import store_output
from kernels.attention.hopper.ping_pong import barrier_arrive, barrier_sync, consumer_barrier
from kernels.attention.hopper.pipeline import ROWS, key_range, next_item, output_row, row_exists
from kernels.attention.hopper.scores import mask_scores

FIELDS = gl.constexpr(6)
"""Fields of an item: head, first row, first query token, query tokens, keys, first tile of keys."""
_LN_2 = gl.constexpr(0.6931471805599453)
_OFFSET = gl.constexpr(8.807354922057604)
"""log2(448): scales the largest weight of a row to the largest e4m3 number."""


@gluon.jit
def consume(pipe, o_desc, out, lse, q_factors, scales, num_scales, INDEX: gl.constexpr, c):
    """Compute attention for the rows of consumer `INDEX` of every item."""
    MINE: gl.constexpr = consumer_barrier(INDEX)
    NEXT: gl.constexpr = consumer_barrier((INDEX + 1) % c.CONSUMERS)
    if INDEX == c.CONSUMERS - 1:
        barrier_arrive(NEXT)
    done = 0
    consumed = 0
    queries = 0
    head, first_row, q_start, q_len, num_keys, first_tile = next_item(pipe, done, FIELDS)
    while head >= 0:
        tiles = key_range(first_row, q_len, num_keys, 0, c)
        my_row = first_row + INDEX * ROWS
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, c.S_LAYOUT)) + my_row
        # Rows past the sequence's end use the scale and the causal limit of its last row.
        seen = gl.minimum(rows, q_len * c.BOX - 1)
        factors = gl.load(q_factors + output_row(seen, q_start, head, c))
        m, total, acc, consumed, queries = attend_item(
            pipe, tiles, seen // c.BOX, q_len, num_keys, consumed, queries, factors,
            scales + first_tile, num_scales, INDEX, MINE, NEXT, c,
        )  # fmt: skip
        nothing = m == float("-inf")
        total = gl.where(nothing, 1.0, total)
        inverse = gl.where(nothing, 0.0, 1.0 / total)
        out_rows: gl.constexpr = gl.SliceLayout(1, c.O_LAYOUT)
        acc = acc * gl.convert_layout(inverse, out_rows, assert_trivial=True)[:, None]
        store_output(pipe, o_desc, out, acc, my_row, head, q_start, q_len, tiles[1], INDEX, c)
        if c.LSE:
            log_sum = gl.where(nothing, float("-inf"), m + gl.log2(total) - _OFFSET) * _LN_2
            gl.store(
                lse + output_row(rows, q_start, head, c), log_sum, mask=row_exists(rows, q_len, c)
            )
        done += 1
        head, first_row, q_start, q_len, num_keys, first_tile = next_item(pipe, done, FIELDS)
    tma.store_wait(0)
    if INDEX == 0:
        barrier_sync(MINE)


@gluon.jit
def attend_item(
    pipe, tiles, token, q_len, num_keys, consumed, queries, factors, scales, num_scales,
    INDEX: gl.constexpr, MINE: gl.constexpr, NEXT: gl.constexpr, c,
):  # fmt: skip
    """Compute attention of this consumer's rows of an item over all of its key tiles.

    Returns:
        (row maximum, row sum of exponentials, output before the division by that sum, tiles consumed so far,
        query stages consumed so far).
    """
    row_layout: gl.constexpr = gl.SliceLayout(1, c.S_LAYOUT)
    buffer = queries % c.QUERY_STAGES
    q = pipe.q.index(buffer * c.CONSUMERS + INDEX)
    last, count, edge, _ = tiles
    acc = gl.zeros([ROWS, c.D], gl.float32, layout=c.O_LAYOUT)
    m = gl.full([ROWS], float("-inf"), gl.float32, layout=row_layout)
    parts = partial_sums(gl.zeros([ROWS, c.BLOCK_N], gl.float32, layout=c.S_LAYOUT), c)
    if count > 0:
        last_seen = num_keys - q_len + token
        scales += last - 1
        k_scale = gl.load(scales)
        v_scale = gl.load(scales + num_scales)
        mbarrier.wait(pipe.q_full.index(buffer), (queries // c.QUERY_STAGES) & 1)
        s = scores(pipe, q, consumed, MINE, NEXT, c)
        s = mask_scores(s, (last - 1) * c.BLOCK_N, last_seen, num_keys, 0, c)
        e, fade, m = softmax_step(s, m, factors * k_scale, c)
        parts = partial_sums(e, c)
        fade = gl.zeros_like(fade)
        mbarrier.wait(pipe.v_full.index(consumed % c.STAGES), (consumed // c.STAGES) & 1)
        state = (m, parts, acc, pack_weights(e, c), fade, v_scale)
        for i in range(1, count):
            state = consume_tile(
                i, state, q, pipe, consumed, last, edge, last_seen, num_keys, factors, scales,
                num_scales, MINE, NEXT, c,
            )  # fmt: skip
        m, parts, acc, packed, fade, v_scale = state
        mbarrier.arrive(pipe.q_empty.index(buffer), count=1)
        pv = weigh(pipe, to_operand(packed, c), consumed + count - 1, c)
        acc = add_tile(acc, fade, pv, c) * v_scale
        queries += 1
        consumed += count
    total = gl.convert_layout(gl.sum(parts, 1), row_layout)
    return m, total, acc, consumed, queries


@gluon.jit
def consume_tile(
    i, state, q, pipe, consumed, last, edge, last_seen, num_keys, factors, scales,
    num_scales, MINE: gl.constexpr, NEXT: gl.constexpr, c,
):  # fmt: skip
    """Issue the score WGMMA of tile i, then the output WGMMA of tile i - 1, and compute the exponentials of tile i.

    The accumulator is relative to the value scale and the row maximum of the tile added last.
    """
    m, parts, acc, packed, fade, v_scale = state
    k_buffer = (consumed + i) % c.STAGES
    v_buffer = (consumed + i - 1) % c.STAGES
    k_scale = gl.load(scales - i)
    new_v_scale = gl.load(scales + num_scales - i)
    v_inverse = gl.load(scales + 2 * num_scales - i)
    zeros = gl.zeros([ROWS, c.BLOCK_N], gl.float32, layout=c.S_LAYOUT)
    no_values = gl.zeros([ROWS, c.D], gl.float32, layout=c.O_LAYOUT)
    p = to_operand(packed, c)
    mbarrier.wait(pipe.k_full.index(k_buffer), ((consumed + i) // c.STAGES) & 1)
    barrier_sync(MINE)
    keys = pipe.k.index(k_buffer).permute((1, 0))
    s_async = warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)
    values = pipe.v.index(v_buffer).permute((1, 0))
    pv_async = warpgroup_mma(p, values, no_values, use_acc=False, is_async=True)
    barrier_arrive(NEXT)
    s = warpgroup_mma_wait(1, deps=(s_async,))
    mbarrier.arrive(pipe.k_empty.index(k_buffer), count=1)
    if i < edge:
        s = mask_scores(s, (last - 1 - i) * c.BLOCK_N, last_seen, num_keys, 0, c)
    e, new_fade, m = softmax_step(s, m, factors * k_scale, c)
    parts = parts * spread(new_fade, parts)[:, None] + partial_sums(e, c)
    mbarrier.wait(pipe.v_full.index(k_buffer), ((consumed + i) // c.STAGES) & 1)
    pv = warpgroup_mma_wait(0, deps=(pv_async,))
    mbarrier.arrive(pipe.v_empty.index(v_buffer), count=1)
    acc = add_tile(acc, fade, pv, c)
    return m, parts, acc, pack_weights(e, c), new_fade * (v_scale * v_inverse), new_v_scale


@gluon.jit
def scores(pipe, q, used, MINE: gl.constexpr, NEXT: gl.constexpr, c):
    """Issue the score WGMMA of tile number `used` of the ring, and wait for the result."""
    buffer = used % c.STAGES
    mbarrier.wait(pipe.k_full.index(buffer), (used // c.STAGES) & 1)
    barrier_sync(MINE)
    zeros = gl.zeros([ROWS, c.BLOCK_N], gl.float32, layout=c.S_LAYOUT)
    s = warpgroup_mma(q, pipe.k.index(buffer).permute((1, 0)), zeros, use_acc=False, is_async=True)
    barrier_arrive(NEXT)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(pipe.k_empty.index(buffer), count=1)
    return s


@gluon.jit
def weigh(pipe, p, used, c):
    """Issue the output WGMMA of tile number `used` of the ring, and wait for the result."""
    buffer = used % c.STAGES
    zeros = gl.zeros([ROWS, c.D], gl.float32, layout=c.O_LAYOUT)
    values = pipe.v.index(buffer).permute((1, 0))
    pv = warpgroup_mma(p, values, zeros, use_acc=False, is_async=True)
    pv = warpgroup_mma_wait(0, deps=(pv,))
    mbarrier.arrive(pipe.v_empty.index(buffer), count=1)
    return pv


@gluon.jit
def add_tile(acc, fade, pv, c):
    """Rescale the accumulator by `fade`, and add a tile's output in float32."""
    out_rows: gl.constexpr = gl.SliceLayout(1, c.O_LAYOUT)
    return acc * gl.convert_layout(fade, out_rows, assert_trivial=True)[:, None] + pv


@gluon.jit
def softmax_step(s, m, factor, c):
    """Return a tile's exponentials relative to the new maximum, and the factor that rescales earlier ones."""
    new_m = gl.maximum(m, row_maximum(s, c) * factor)
    # A row that has seen no key has the maximum -inf, and -inf - -inf is NaN.
    base = gl.where(new_m == float("-inf"), 0.0, new_m)
    e = gl.exp2(s * factor[:, None] - (base - _OFFSET)[:, None])
    fade = gl.exp2(m - base)
    return e, fade, new_m


@gluon.jit
def row_maximum(s, c):
    """Return the largest score of each row; each thread reduces its own scores in eight chains instead of two."""
    x = gl.max(s.reshape([ROWS, c.BLOCK_N // 8, 8]), 1)
    return gl.convert_layout(gl.max(x, 1), gl.SliceLayout(1, c.S_LAYOUT), assert_trivial=True)


@gluon.jit
def partial_sums(e, c):
    """Sum each thread's own elements of a row, [ROWS, 4]; the threads' sums are added at the end of an item."""
    return gl.sum(gl.sum(e.reshape([ROWS, c.BLOCK_N // 8, 4, 2]), 1), 2)


@gluon.jit
def spread(row_values, parts):
    """Convert a value per row to the layout of the row's partial sums; it stays in the same thread."""
    layout: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
    return gl.convert_layout(row_values, layout, assert_trivial=True)


@gluon.jit
def pack_weights(e, c):
    """Round weights to e4m3 and pack four into each register, [ROWS, BLOCK_N / 4] int32.

    No weight moves to another thread. In the accumulator of the scores, thread t holds columns 2 t and 2 t + 1 of
    every 8; in an FP8 operand it holds columns 4 t to 4 t + 3 of every 16. So every 16 columns are renumbered, in the
    order in which `tiles` stores the values.
    """
    x = e.reshape([ROWS, c.BLOCK_N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    x = gl.convert_layout(x.reshape([ROWS, c.BLOCK_N]), c.P_LAYOUT)
    even, odd = gl.split(x.reshape([ROWS, c.BLOCK_N // 4, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    # Two instructions for four weights; the compiler's own conversion takes nine.
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,r,r,r,r", [first, second, third, fourth], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def to_operand(packed, c):
    """Convert packed weights to the layout of a WGMMA operand; every byte stays in its register.

    The assembly takes four registers at a time: rows r and r + 8 of columns n and n + 4. Its output k is register k,
    read as four bytes that Triton assigns to the positions of the four inputs.
    """
    b0, b1, b2, b3 = gl.inline_asm_elementwise(
        "mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;",
        "=r,=r,=r,=r,r,r,r,r", [packed],
        dtype=(gl.float8e4nv, gl.float8e4nv, gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4,
    )  # fmt: skip
    x = gl.join(gl.join(b0, b2), gl.join(b1, b3))
    # Rows 16 w + 8 r + l; columns 8 h + 4 n + t; then the register as (r, n); bytes lie at (n, r).
    x = x.reshape([ROWS // 16, 2, 8, c.BLOCK_N // 32, 2, 4, 2, 2])
    x = x.permute((0, 7, 2, 3, 6, 5, 4, 1)).reshape([ROWS, c.BLOCK_N])
    return gl.convert_layout(x, c.P_LAYOUT, assert_trivial=True)
