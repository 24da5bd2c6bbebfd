"""Ping-pong scheduling of the consumer warp groups with named barriers, and zeroing of unused value rows.

Each consumer has a named barrier. It waits at its own barrier before it issues WGMMAs, and afterwards arrives at the
barrier of the next consumer, so that the consumers issue in a fixed order.

Source: Shah et al., "FlashAttention-3", 2024, section 3.1.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

_CHUNK = gl.constexpr(16)
"""Rows of a value tile that are zeroed at a time."""


@gluon.constexpr_function
def consumer_barrier(index):
    """Return the id of a consumer's named barrier; the compiler uses the low ids."""
    return str(9 + index)


@gluon.jit
def barrier_sync(ID: gl.constexpr):
    """Wait at this consumer's named barrier until the previous consumer has issued its WGMMAs; nothing if ID is ""."""
    if ID != "":
        code: gl.constexpr = "bar.sync " + ID + ", 256; mov.u32 $0, 0;"
        gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_arrive(ID: gl.constexpr):
    """Arrive at the next consumer's named barrier, which lets it issue its WGMMAs; nothing if ID is ""."""
    if ID != "":
        code: gl.constexpr = "bar.arrive " + ID + ", 256; mov.u32 $0, 0;"
        gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def keep_rows(v_tile, first, stop, c):
    """Zero the value rows outside `first` to `stop`: their weight is 0, but 0 * NaN is NaN.

    Every consumer writes the same zeros before it reads the tile.
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
