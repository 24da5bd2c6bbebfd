"""Matrix-vector products of the whole-step kernel: each program multiplies its own rows of weights by the same vector.

The vector lies in shared memory or, normalized, in registers; weights arrive in the ring. Sums are added in a fixed
order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.step.gpu.grid_barrier import (
    received,
)
from kernels.step.gpu.ring import (
    COLUMNS,
    CONSUMER_WARPS,
    ROWS,
    parts_of,
    release,
    wait_full,
)


@gluon.jit
def rows_of_tile(number, c):
    """Return the rows of a matrix in this program's tile `number`, [ROWS]."""
    tile = gl.program_id(0) + number * gl.num_programs(0)
    return tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, c.W))


@gluon.jit
def tiles_of_program(tiles):
    """Return how many of `tiles` tiles this program computes."""
    return (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def load_parts(vector, INPUTS: gl.constexpr, c):
    """Load a vector into every warp, as tensors of COLUMNS elements."""
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, c.W))
    parts = ()
    for j in gl.static_range(INPUTS // COLUMNS):
        place = gl.multiple_of(gl.max_contiguous(vector + (j * COLUMNS + column), 8), 16)
        parts = parts + (gl.load(place),)  # type: ignore[assignment]
    return parts


@gluon.jit
def load_own(x, c):
    """Load the residual for this program's rows of the hidden state, as OWN tensors of [ROWS]."""
    before = ()
    for i in gl.static_range(c.OWN):
        tile = gl.program_id(0) + i * gl.num_programs(0)
        row = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, c.W))
        before = before + (gl.load(x + row, mask=row < c.HIDDEN, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
    return before


@gluon.jit
def share(ring, vector, INPUTS: gl.constexpr, PUBLISHED: gl.constexpr, c):
    """Copy a vector to shared memory; PUBLISHED if programs publish it during this launch."""
    WIDTH: gl.constexpr = 4 * COLUMNS
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [CONSUMER_WARPS], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x = ring.x._reinterpret(ring.x.dtype, [ring.x.shape[0] // 4, WIDTH], flat)
    element = gl.arange(0, WIDTH, layout=layout)
    loaded = ()
    for i in gl.static_range(INPUTS // WIDTH):
        loaded = loaded + (gl.load(vector + i * WIDTH + element, cache_modifier=".cg"),)  # type: ignore[assignment]
    for i in gl.static_range(INPUTS // WIDTH):
        if PUBLISHED:
            x.index(i).store(received(loaded[i], vector + i * WIDTH + element, 4, c))
        else:
            x.index(i).store(loaded[i])
    gl.thread_barrier()


@gluon.jit
def normed(ring, gains, eps, c):
    """Load the hidden state from shared memory into every warp and normalize it in float32."""
    squares = gl.zeros([COLUMNS], gl.float32, layout=gl.SliceLayout(0, c.W))
    raw = ()
    for j in gl.static_range(c.HIDDEN // COLUMNS):
        part = ring.x.index(j).load(gl.SliceLayout(0, c.W)).to(gl.float32)
        squares += part * part
        raw = raw + (part,)  # type: ignore[assignment]
    inverse = 1.0 / gl.sqrt(gl.sum(squares, 0) / c.HIDDEN + eps)
    xs = ()
    for j in gl.static_range(c.HIDDEN // COLUMNS):
        xs = xs + (raw[j] * inverse * gains[j].to(gl.float32),)  # type: ignore[assignment]
    return xs


@gluon.jit
def dot_held(ring, xs, used, TILES: gl.constexpr, c):
    """Multiply the next tiles of weights by a vector held in registers; returns TILES tensors of [ROWS] float32."""
    EACH: gl.constexpr = len(xs) // c.PARTS
    ALL: gl.constexpr = TILES * EACH
    AT_ONCE: gl.constexpr = 2 if ALL % 2 == 0 else 1
    tiles = ()
    sums = gl.zeros([ROWS, COLUMNS], gl.float32, layout=c.W)
    for i in gl.static_range(ALL):
        if i % AT_ONCE == 0:
            for k in gl.static_range(AT_ONCE):
                wait_full(ring, used + i + k, c)
        parts = parts_of(ring, (used + i) % c.STAGES, c)
        for j in gl.static_range(c.PARTS):
            weights = parts.index(j).load(c.W).to(gl.float32)
            sums += weights * xs[i % EACH * c.PARTS + j][None, :]
        if i % EACH == EACH - 1:
            tiles = tiles + (sums,)  # type: ignore[assignment]
            sums = gl.zeros([ROWS, COLUMNS], gl.float32, layout=c.W)
    release(ring, used, ALL, c)
    totals = ()
    for t in gl.static_range(TILES):
        totals = totals + (gl.sum(tiles[t], 1),)  # type: ignore[assignment]
    return totals, used + ALL


@gluon.jit
def dot_shared(ring, used, INPUTS: gl.constexpr, c):
    """Multiply the next ROWS rows of weights by the vector in shared memory; returns [ROWS] float32."""
    BATCH: gl.constexpr = stages_at_once(INPUTS // (COLUMNS * c.PARTS))
    sums = gl.zeros([ROWS, COLUMNS], gl.float32, layout=c.W)
    for i in range(INPUTS // (COLUMNS * c.PARTS * BATCH)):
        for b in gl.static_range(BATCH):
            wait_full(ring, used + b, c)
        for b in gl.static_range(BATCH):
            parts = parts_of(ring, (used + b) % c.STAGES, c)
            for j in gl.static_range(c.PARTS):
                weights = parts.index(j).load(c.W).to(gl.float32)
                part = (i * BATCH + b) * c.PARTS + j
                x = ring.x.index(part).load(gl.SliceLayout(0, c.W)).to(gl.float32)
                sums += weights * x[None, :]
        release(ring, used, BATCH, c)
        used += BATCH
    return gl.sum(sums, 1), used


@gluon.constexpr_function
def stages_at_once(stages):
    """Return how many stages to read between two barriers: the largest divisor of `stages` up to 4."""
    return next(n for n in (4, 3, 2, 1) if stages % n == 0)
