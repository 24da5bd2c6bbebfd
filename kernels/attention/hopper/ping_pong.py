"""Ping-pong scheduling of a Hopper kernel's consumers on the tensor cores, and clearing of values without a key."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

_CHUNK = gl.constexpr(16)
"""Rows of a value tile that are cleared at a time."""


@gluon.constexpr_function
def turn(index):
    """Return the hardware barrier that a consumer waits at; the compiler uses the low ones."""
    return str(9 + index)


@gluon.jit
def take_turn(ID: gl.constexpr):
    """Wait until the consumer before this one has issued its products."""
    code: gl.constexpr = "bar.sync " + ID + ", 256; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(ID: gl.constexpr):
    """Let the consumer after this one issue its products."""
    code: gl.constexpr = "bar.arrive " + ID + ", 256; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def keep_rows(v_tile, first, stop, c):
    """Set the values outside rows `first` to `stop` to 0: their weight is 0, and 0 * NaN is NaN.

    Every consumer writes the same zeros before it reads them.
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
