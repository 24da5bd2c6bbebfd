"""Warp roles of the one-pass backward: a warp copies tiles to shared memory, two warp groups compute.

For each tile of queries the consumers compute, with keys as rows,

    S = K Q^T        P = exp2(scale S - lse)      dV += P dO
    dP = V dO^T      dS = P (dP - delta)          dK += dS Q       dQ = dS^T K

P and dS are operands in registers. Only dQ, which sums over the keys of both warp groups, needs dS in shared memory; it
is added to float32 sums in global memory. Products are issued before the results of earlier ones are awaited: dP runs
beside the exponentials, dV beside dS, and dK beside the additions and the next tile's S.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from kernels.attention.training.hopper.backward_tiles import (
    STATS,
    THREADS,
    seeing_tiles,
    tile_of_program,
)

_FIRST_BARRIER = gl.constexpr(9)
"""Named barrier of the first stage; the compiler uses the low ones."""
_ZEROED_ROWS = gl.constexpr(16)
"""Rows that are zeroed at a time."""


@gluon.jit
def produce(
    buffers, cu_seqlens_q, cu_seqlens_k, q_desc, k_desc, v_desc, do_desc, stats_desc, window, c
):  # fmt: skip
    """Issue the copies of keys and values, then those of each tile of queries once its stage is free."""
    tile = tile_of_program(cu_seqlens_q, cu_seqlens_k, c)
    if tile.first < tile.num_k:
        row = tile.start_k + tile.first
        k_full, v_full = buffers.kv_full.index(0), buffers.kv_full.index(1)
        _copy(k_desc, row, tile.kv_head, k_full, buffers.k.index(0), c.BLOCK_N, 0, c)
        begin, count, _, _ = seeing_tiles(tile, window, c)
        for used in range(count * c.GROUP):
            m, head = begin + used // c.GROUP, tile.kv_head * c.GROUP + used % c.GROUP
            stage = used % c.STAGES
            if used >= c.STAGES:
                _await_release(stage)
            first_row = tile.start_q + m * c.BLOCK_M
            numbers: gl.constexpr = STATS * c.BLOCK_M
            q_full, do_full = buffers.q_full.index(stage), buffers.do_full.index(stage)
            _copy(
                q_desc, first_row, head, q_full, buffers.q.index(stage), c.BLOCK_M, 4 * numbers, c
            )
            first = ((tile.scratch + m) * c.HEADS + head) * numbers
            tma.async_copy_global_to_shared(stats_desc, [first], q_full, buffers.stats.index(stage))
            if used == 0:
                # The scores of the first tile need no values.
                _copy(v_desc, row, tile.kv_head, v_full, buffers.v.index(0), c.BLOCK_N, 0, c)
            _copy(do_desc, first_row, head, do_full, buffers.do.index(stage), c.BLOCK_M, 0, c)
        # No arrival may be left at a barrier when the thread block ends.
        for last in range(gl.maximum(count * c.GROUP - c.STAGES, 0), count * c.GROUP):
            _await_release(last % c.STAGES)


@gluon.jit
def _copy(desc, row, head, full, target, rows: gl.constexpr, more_bytes: gl.constexpr, c):
    """Issue the copy of some rows of a head; `full` waits for `more_bytes` of other copies too."""
    mbarrier.expect(full, rows * c.D * 2 + more_bytes)
    box = target._reinterpret(desc.dtype, [rows, 1, c.D], desc.layout)
    tma.async_copy_global_to_shared(desc, [row, head, 0], full, box)


@gluon.jit
def _release(stage):
    """Let the producer overwrite a stage of the ring once every thread of the consumers has come here.

    An mbarrier would need all threads of the consumers to meet before one of them arrives.
    """
    gl.inline_asm_elementwise(
        "bar.arrive $1, 288; mov.u32 $0, 0;", "=r,r", [stage + _FIRST_BARRIER], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _await_release(stage):
    """Wait until the last use of a stage is released."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 288; mov.u32 $0, 0;", "=r,r", [stage + _FIRST_BARRIER], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def consume(buffers, cu_seqlens_q, cu_seqlens_k, sums, dk, dv, scale_log2, scale, window, c):
    """Compute the gradients of a tile of keys and values, and add its part of the gradients of queries to `sums`."""
    tile = tile_of_program(cu_seqlens_q, cu_seqlens_k, c)
    if tile.first < tile.num_k:
        mbarrier.wait(buffers.kv_full.index(0), 0)
        begin, count, edge, inside = seeing_tiles(tile, window, c)
        keys = tile.num_k - tile.first
        if (keys < c.BLOCK_N) & (count > 0):
            mbarrier.wait(buffers.kv_full.index(1), 0)
            _keep_rows(buffers.k.index(0), keys, c.BLOCK_N)
            _keep_rows(buffers.v.index(0), keys, c.BLOCK_N)
        zeros = gl.zeros([c.BLOCK_N, c.D], gl.float32, layout=c.KV_LAYOUT)
        grads = warpgroup_mma_init(zeros), zeros
        # From the first query of the first tile on: queries of the sequence, and that in the place of the first key.
        queries = tile.num_q - begin * c.BLOCK_M
        diagonal = tile.first - (tile.num_k - tile.num_q) - begin * c.BLOCK_M
        entry = (tile.scratch + begin) * c.HEADS + tile.kv_head * c.GROUP
        for used in range(count * c.GROUP):
            # The heads of a tile of queries, then the next tile.
            i, member = used // c.GROUP, used % c.GROUP
            first = i * c.BLOCK_M
            is_masked = i < edge
            if c.WINDOW:
                is_masked = is_masked | (i >= inside)
            place = (entry + i * c.HEADS + member).to(gl.int64) * (c.BLOCK_M * c.D)
            grads = _add_queries(
                buffers, grads, sums + place, used, queries - first, diagonal - first, keys, is_masked, scale_log2,
                window, c,
            )  # fmt: skip
        dkey = warpgroup_mma_wait(0, deps=(grads[0],))
        if count > 0:
            _release((count * c.GROUP + c.STAGES - 1) % c.STAGES)
        gl.thread_barrier()
        # Read again, since registers lack in the loop.
        tile = tile_of_program(cu_seqlens_q, cu_seqlens_k, c)
        _store(dk, buffers.k.index(0), dkey * scale, tile, c)
        _store(dv, buffers.v.index(0), grads[1], tile, c)


@gluon.jit
def _add_queries(buffers, grads, sums, used, queries, diagonal, keys, is_masked, scale_log2, window, c):  # fmt: skip
    """Add a tile of a head's queries, use number `used` of the ring, to the gradients of keys and values.

    Args:
        grads: of keys, whose last product may be in flight, and of values; [BLOCK_N, D].
        sums: of the tile's gradient of queries.
        queries: queries of the sequence from the tile's first one on.
        diagonal: index of the query in the tile that has the position of the first key.
        keys: keys of the sequence from the first one on.
        is_masked: whether some of the queries do not see some of the keys.
    """
    dkey, dvalue = grads
    dtype: gl.constexpr = buffers.k.dtype
    columns: gl.constexpr = gl.SliceLayout(0, c.S_LAYOUT)
    stage = used % c.STAGES
    phase = (used // c.STAGES) & 1
    k, v, ds = buffers.k.index(0), buffers.v.index(0), buffers.ds.index(0)
    q, do, stats = buffers.q.index(stage), buffers.do.index(stage), buffers.stats.index(stage)
    mbarrier.wait(buffers.q_full.index(stage), phase)
    if queries < c.BLOCK_M:
        mbarrier.wait(buffers.do_full.index(stage), phase)
        _keep_rows(q, queries, c.BLOCK_M)
        _keep_rows(do, queries, c.BLOCK_M)
    zeros = gl.zeros([c.BLOCK_N, c.BLOCK_M], gl.float32, layout=c.S_LAYOUT)
    s_async = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if used == 0:
        mbarrier.wait(buffers.kv_full.index(1), 0)
    mbarrier.wait(buffers.do_full.index(stage), phase)
    dp_async = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s, dkey = warpgroup_mma_wait(1, deps=(s_async, dkey))
    # All products of the previous tile have ended.
    if used > 0:
        _release((used + c.STAGES - 1) % c.STAGES)
    log_sum = stats.slice(0, c.BLOCK_M).load(columns)
    if is_masked:
        s = _mask(s, diagonal, keys, window, c)
    p = gl.exp2(s * scale_log2 - log_sum[None, :])
    weights = gl.convert_layout(p.to(dtype), c.P_LAYOUT, assert_trivial=True)
    dv_async = warpgroup_mma(weights, do, dvalue, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp_async,))
    delta = stats.slice(c.BLOCK_M, c.BLOCK_M).load(columns)
    dscores = (p * (dp - delta[None, :])).to(dtype)
    # In all warps, the product that reads the previous tile's dS has ended.
    gl.thread_barrier()
    ds.store(dscores)
    fence_async_shared()
    gl.thread_barrier()
    nothing = gl.zeros([c.BLOCK_M, c.D], gl.float32, layout=c.Q_LAYOUT)
    dq_async = warpgroup_mma(ds.permute((1, 0)), k, nothing, use_acc=False, is_async=True)
    operand = gl.convert_layout(dscores, c.P_LAYOUT, assert_trivial=True)
    dk_async = warpgroup_mma(operand, q, dkey, is_async=True)
    dquery, dvalue = warpgroup_mma_wait(1, deps=(dq_async, dv_async))
    _add_to_sums(sums, dquery, c)
    return dk_async, dvalue


@gluon.jit
def _mask(s, diagonal, keys, window, c):
    """Set the scores of keys that a query does not see to -inf.

    Queries past the end of the sequence need no mask, since their log-sum-exps are infinite.
    """
    key = gl.arange(0, c.BLOCK_N, layout=gl.SliceLayout(1, c.S_LAYOUT))
    if c.CAUSAL:
        # Column 8 i + 2 t + j is register (i, j) of thread t. Each comparison is between 8 i + j, a compile-time
        # constant of the register, and one limit per row and thread.
        x = s.reshape([c.BLOCK_N, c.BLOCK_M // 8, 4, 2])
        L: gl.constexpr = x.type.layout
        eight = gl.arange(
            0, c.BLOCK_M // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
        )
        lane = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
        pair = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
        rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
        # The first column whose query is not before the key.
        start = gl.convert_layout(key + diagonal, rows, assert_trivial=True)
        start = start[:, None, None, None] - 2 * lane[None, None, :, None]
        column = 8 * eight[None, :, None, None] + pair[None, None, None, :]
        if c.WINDOW:
            # The distance of a later key is negative, which as an unsigned number exceeds any window.
            distance = (column - start).to(gl.uint32, bitcast=True)
            seen = distance < window.to(gl.uint32, bitcast=True)
        else:
            seen = column >= start
        x = gl.where(seen, x, float("-inf"))
        s = gl.convert_layout(x.reshape([c.BLOCK_N, c.BLOCK_M]), c.S_LAYOUT, assert_trivial=True)
    else:
        s = gl.where((key < keys)[:, None], s, float("-inf"))
    return s


@gluon.jit
def _add_to_sums(sums, part, c):
    """Add a tile's gradient of queries, [BLOCK_M, D], to its sums in the order of the registers that hold it.

    An addition of a thread is four numbers, two columns of rows r and r + 8; that of a warp is 512 bytes in a row.
    """
    # Rows are (warp, upper or lower half, row), columns are (warp group, 8 columns, thread, pair).
    x = part.reshape([4, 2, 8, 2, c.D // 16, 4, 2]).permute((4, 3, 0, 2, 5, 1, 6))
    x = x.reshape([c.D // 16, THREADS, 4])
    L: gl.constexpr = x.type.layout
    eight = gl.arange(0, c.D // 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))
    thread = gl.arange(0, THREADS, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    number = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    # Added last, the offsets of the registers are constants in the instructions.
    place = sums + (4 * thread[None, :, None] + number[None, None, :])
    gl.atomic_add(place + (4 * THREADS) * eight[:, None, None], x, sem="relaxed")


@gluon.jit
def _keep_rows(target, kept, rows: gl.constexpr):
    """Zero the rows from `kept` on: they belong to another sequence, and 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    for chunk in gl.static_range(rows // _ZEROED_ROWS):
        if kept < (chunk + 1) * _ZEROED_ROWS:
            part = target.slice(chunk * _ZEROED_ROWS, _ZEROED_ROWS, dim=0)
            row = chunk * _ZEROED_ROWS + gl.arange(
                0, _ZEROED_ROWS, layout=gl.SliceLayout(1, layout)
            )
            values = part.load(layout)
            part.store(gl.where((row < kept)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _store(out, staging, grad, tile, c):
    """Store a gradient of keys or values, [BLOCK_N, D], through shared memory."""
    staging.store(grad.to(out.dtype.element_ty))
    gl.thread_barrier()
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // c.D, c.D // 8], [8, 1], [1, 0])
    row = tile.first + gl.arange(0, c.BLOCK_N, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, c.D, layout=gl.SliceLayout(0, layout))
    place = (tile.start_k + row).to(gl.int64) * (c.HEADS // c.GROUP) + tile.kv_head
    place = place[:, None] * c.D + column[None, :]
    gl.store(out + place, staging.load(layout), mask=(row < tile.num_k)[:, None])
