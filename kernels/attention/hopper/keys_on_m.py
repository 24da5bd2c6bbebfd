"""One tile of a Hopper decode with the keys on the M dimension of WGMMA and the query heads of a group on N.

    S^T [keys, queries] = K Q^T        O^T [D, queries] += V^T P^T

M is always 64 rows, N may be 8. A decode has 1 to 16 query heads per key-value head, so with queries on M most scores,
exponentials and conversions are of rows that are never stored. With keys on M a thread of four warps has 4 scores of a
tile of 64 keys and 8 queries instead of 32, and 4 accumulators of head dim 64 instead of 32.

Maxima are then taken over M: over a thread's own keys and the lanes of its warp, and over the four warps through
shared memory. Sums of exponentials stay in the threads that computed them until the end of a split. P^T passes through
shared memory, since the second operand of WGMMA is always there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.attention.hopper.ping_pong import keep_rows
from kernels.attention.hopper.scores import cap_scores

_WARPS = gl.constexpr(4)
_WARP_KEYS = gl.constexpr(16)
"""Rows of a warp in a WGMMA."""


@gluon.jit
def initial_state(c):
    """Return (maxima [QUERIES], sums [BLOCK_N, QUERIES] of which each key has its part, accumulator [D, QUERIES])."""
    m = gl.full([c.QUERIES], float("-inf"), gl.float32, layout=gl.SliceLayout(0, c.S_LAYOUT))
    sums = gl.zeros([c.BLOCK_N, c.QUERIES], gl.float32, layout=c.S_LAYOUT)
    acc = gl.zeros([c.D, c.QUERIES], gl.float32, layout=c.O_LAYOUT)
    return m, sums, acc


@gluon.jit
def make_scratch(dtype: gl.constexpr, c):
    """Allocate shared memory for P, [QUERIES, BLOCK_N], and for the maxima of each warp, [4, QUERIES] float32."""
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.QUERIES, c.BLOCK_N], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    p = gl.allocate_shared_memory(dtype, [c.QUERIES, c.BLOCK_N], p_layout)
    return p, gl.allocate_shared_memory(gl.float32, [_WARPS, c.QUERIES], plain)


@gluon.jit
def attend_tile(
    state, q, tile, scratch, phase, start, last_seen, kept, scale, window, softcap, c
):  # fmt: skip
    """Process one tile of keys and values, (K, V, mbarrier of K, mbarrier of V), once its mbarriers complete.

    `last_seen` is the last key of the sequence, which its single query token sees.
    """
    k, v, k_full, v_full = tile
    p, warp_maxima = scratch
    m, sums, acc = state
    factor = scale
    if c.SOFTCAP:
        factor = 1.0
    zeros = gl.zeros([c.BLOCK_N, c.QUERIES], gl.float32, layout=c.S_LAYOUT)
    mbarrier.wait(k_full, phase)
    s = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    s = cap_scores(s, scale, softcap, c)
    key = start + gl.arange(0, c.BLOCK_N, layout=gl.SliceLayout(1, c.S_LAYOUT))
    seen = key <= last_seen
    if c.WINDOW:
        seen = seen & (key > last_seen - window)
    s = gl.where(seen[:, None], s, float("-inf"))
    new_m = gl.maximum(m, maxima(s, warp_maxima, c) * factor)
    # A query that has seen no key has the maximum -inf, and -inf - -inf is NaN.
    base = gl.where(new_m == float("-inf"), 0.0, new_m)
    e = gl.exp2(s * factor - base[None, :])
    fade = gl.exp2(m - base)
    sums = sums * fade[None, :] + e
    p.permute((1, 0)).store(e.to(p.dtype))
    fence_async_shared()
    gl.thread_barrier()
    acc = acc * fade[None, :]
    mbarrier.wait(v_full, phase)
    if (start + c.BLOCK_N > last_seen + 1) | (start < kept):
        keep_rows(v, kept - start, last_seen + 1 - start, c)
    acc = warpgroup_mma(v.permute((1, 0)), p.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    return new_m, sums, acc


@gluon.jit
def maxima(s, warp_maxima, c):
    """Return the maxima over the keys of a tile of scores, [QUERIES]."""
    x = s.reshape([c.BLOCK_N // (_WARPS * _WARP_KEYS), _WARPS, _WARP_KEYS, c.QUERIES])
    warp_maxima.store(gl.max(gl.max(x, 0), 1))
    # A thread reads the four maxima of its own columns of the accumulator.
    read: gl.constexpr = gl.BlockedLayout([_WARPS, 2], [8, 4], [_WARPS, 1], [1, 0])
    largest = gl.max(warp_maxima.load(read), 0)
    return gl.convert_layout(largest, gl.SliceLayout(0, c.S_LAYOUT), assert_trivial=True)


@gluon.jit
def by_query(sums, acc):
    """Return the sums of all keys, [QUERIES], and the accumulator with queries as rows, [QUERIES, D]."""
    return gl.sum(sums, 0), acc.permute((1, 0))
