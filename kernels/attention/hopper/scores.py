"""Softmax on a tile of scores in the registers of a warp group: softcap, masks, exponentials and row sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.attention.hopper.pipeline import ROWS


@gluon.jit
def cap_scores(s, scale, softcap, c):
    """Apply the softcap, if there is one. Arguments as `exponents` returns them."""
    if c.SOFTCAP:
        s = softcap - 2.0 * softcap / (gl.exp2(s * scale) + 1.0)
    return s


@gluon.jit
def mask_scores(s, start, last_seen, num_keys, window, c):
    """Set the scores of keys that a row does not see to -inf; `start` is the tile's first key."""
    key = start + gl.arange(0, c.BLOCK_N, layout=gl.SliceLayout(0, c.S_LAYOUT))
    if c.CAUSAL:
        # The causal limit of every row lies within the sequence, so `num_keys` needs no test.
        distance = last_seen[:, None] - key[None, :]
        seen = distance >= 0
        if c.WINDOW:
            # The distance of a later key is negative, which as an unsigned number exceeds any window.
            seen = distance.to(gl.uint32, bitcast=True) < window.to(gl.uint32, bitcast=True)
    else:
        seen = key[None, :] < num_keys
        if c.WINDOW:
            seen = seen & (key[None, :] > last_seen[:, None] - window)
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def mask_tile(s, start, last_seen, num_keys, window, c):
    """Like `mask_scores`, with fewer instructions for a causal mask without a window."""
    if c.CAUSAL and not c.WINDOW:
        # Column 8 i + 2 t + j is register (i, j) of thread t. Each comparison is between 8 i + j, a compile-time
        # constant of the register, and one limit per row and thread.
        x = s.reshape([ROWS, c.BLOCK_N // 8, 4, 2])
        L: gl.constexpr = x.type.layout
        eight = gl.arange(
            0, c.BLOCK_N // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L)))
        )
        pair = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
        lane = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
        rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
        stop = gl.convert_layout(last_seen - start, rows, assert_trivial=True)
        column = 8 * eight[None, :, None, None] + pair[None, None, None, :]
        x = gl.where(
            column <= stop[:, None, None, None] - 2 * lane[None, None, :, None], x, float("-inf")
        )
        s = gl.convert_layout(x.reshape([ROWS, c.BLOCK_N]), c.S_LAYOUT, assert_trivial=True)
    else:
        s = mask_scores(s, start, last_seen, num_keys, window, c)
    return s


@gluon.jit
def softmax_step(s, m, factor):
    """Return a tile's exponentials relative to the new maximum, and the factor that rescales earlier ones."""
    new_m = gl.maximum(m, gl.max(s, 1) * factor)
    # A row that has seen no key has the maximum -inf, and -inf - -inf is NaN.
    base = gl.where(new_m == float("-inf"), 0.0, new_m)
    p = gl.exp2(s * factor - base[:, None])
    fade = gl.exp2(m - base)
    return p, fade, new_m


@gluon.jit
def softmax_tile(s, m, factor, c):
    """Like `softmax_step`, with the maximum computed in eight chains instead of two."""
    x = gl.max(gl.max(s.reshape([ROWS, c.BLOCK_N // 8, 8]), 1), 1)
    largest = gl.convert_layout(x, gl.SliceLayout(1, c.S_LAYOUT), assert_trivial=True)
    new_m = gl.maximum(m, largest * factor)
    base = gl.where(new_m == float("-inf"), 0.0, new_m)
    if c.PART_TILES:
        x = gl.fma(s, factor, -base[:, None])
    else:
        x = s * factor - base[:, None]
    return gl.exp2(x), gl.exp2(m - base), new_m


@gluon.jit
def row_sums(e, c):
    """Sum each thread's own elements of a row, [ROWS, 4]; the threads' sums are added at the end of an item."""
    return gl.sum(gl.sum(e.reshape([ROWS, c.BLOCK_N // 8, 4, 2]), 1), 2)


@gluon.jit
def add_sums(parts, fade, more, c):
    """Rescale the partial sums of `row_sums` by a factor per row, and add those of another tile."""
    layout: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
    fade = gl.convert_layout(fade, layout, assert_trivial=True)[:, None]
    if c.PART_TILES:
        sums = gl.fma(parts, fade, more)
    else:
        sums = parts * fade + more
    return sums


@gluon.jit
def all_of(parts, c):
    """Add up the partial sums of `row_sums`, [ROWS]."""
    return gl.convert_layout(gl.sum(parts, 1), gl.SliceLayout(1, c.S_LAYOUT))
