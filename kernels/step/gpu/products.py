"""The vectors of the whole-step kernel for one sequence: their way to shared memory, the norm, each program's rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.step.gpu.grid_barrier import received
from kernels.step.gpu.ring import COLUMNS, CONSUMER_WARPS, MOST_HELD, ROWS
from kernels.step.gpu.tensor_products import store_vector


@gluon.jit
def rows_of_tile(first, number, c):
    """Return the rows of a matrix in this program's tile `number`, [ROWS]; the first of its tiles is `first`."""
    tile = first + number * gl.num_programs(0)
    return tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, c.W))


@gluon.jit
def tiles_of_program(first, tiles):
    """Return how many of `tiles` tiles this program computes, the first of which is `first`."""
    return gl.maximum(tiles - first + gl.num_programs(0) - 1, 0) // gl.num_programs(0)


@gluon.constexpr_function
def lane_layout():
    """Return the register layout of vectors of 4 * COLUMNS elements, of which each thread has 4."""
    return gl.BlockedLayout([4], [32], [CONSUMER_WARPS.value], [0])


@gluon.constexpr_function
def vectors_of(inputs):
    """Return how many vectors of 4 * COLUMNS elements `inputs` elements take."""
    return -(-inputs // (4 * COLUMNS.value))


@gluon.jit
def load_gains(vector, c):
    """Load the gains of a norm, in the layout in which `normed` needs them."""
    parts = ()
    element = gl.arange(0, 4 * COLUMNS, layout=lane_layout())
    for i in gl.static_range(vectors_of(c.HIDDEN)):
        number = i * 4 * COLUMNS + element
        parts = parts + (gl.load(vector + number, mask=number < c.HIDDEN, other=0.0),)  # type: ignore[assignment]
    return parts


@gluon.jit
def held_rows(ring, first, c):
    """Load this program's rows of the hidden state in shared memory, as OWN tensors of [ROWS]."""
    rows = ring.x._reinterpret(
        ring.x.dtype, [c.INPUTS // ROWS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    found = ()
    for i in gl.static_range(c.OWN):
        tile = gl.minimum(first + i * gl.num_programs(0), c.HIDDEN // ROWS - 1)
        found = found + (rows.index(tile).load(gl.SliceLayout(1, c.W)),)  # type: ignore[assignment]
    return found


@gluon.jit
def share(
    ring, vector, INPUTS: gl.constexpr, PUBLISHED: gl.constexpr, MULTIPLIED: gl.constexpr, c
):  # fmt: skip
    """Copy a vector to shared memory, zeros behind it.

    PUBLISHED if programs publish it during this launch, MULTIPLIED if it is the input of a product as it is.
    """
    WIDTH: gl.constexpr = 4 * COLUMNS
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x = ring.x._reinterpret(ring.x.dtype, [ring.x.shape[0] // 4, WIDTH], flat)
    element = gl.arange(0, WIDTH, layout=lane_layout())
    loaded = ()
    for i in gl.static_range(vectors_of(INPUTS)):
        number = i * WIDTH + element
        if (i + 1) * WIDTH > INPUTS:
            exists = gl.max_constancy(number < INPUTS, 4)
            numbers = gl.load(vector + number, mask=exists, other=0.0, cache_modifier=".cg")
        else:
            numbers = gl.load(vector + number, cache_modifier=".cg")
        loaded = loaded + (numbers,)  # type: ignore[assignment]
    for i in gl.static_range(vectors_of(INPUTS)):
        numbers = loaded[i]
        if PUBLISHED:
            numbers = received(numbers, vector + i * WIDTH + element, 4, c)
        if MULTIPLIED:
            store_vector(ring, i, numbers, c.FP8_WEIGHTS, c)
        else:
            x.index(i).store(numbers)
    gl.thread_barrier()


@gluon.jit
def normed(ring, gains, eps, FP8: gl.constexpr, c):
    """Normalize the hidden state in shared memory; the weights by which it is multiplied are in FP8 or not."""
    raw = ()
    WIDTH: gl.constexpr = 4 * COLUMNS
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x = ring.x._reinterpret(ring.x.dtype, [ring.x.shape[0] // 4, WIDTH], flat)
    squares = gl.zeros([WIDTH], gl.float32, layout=lane_layout())
    for i in gl.static_range(vectors_of(c.HIDDEN)):
        part = x.index(i).load(lane_layout()).to(gl.float32)
        if c.HIDDEN > MOST_HELD:
            squares += part * part
        raw = raw + (part,)  # type: ignore[assignment]
    if c.HIDDEN <= MOST_HELD:
        # Each warp adds all squares, so that no warp waits for others.
        squares = gl.zeros([COLUMNS], gl.float32, layout=gl.SliceLayout(0, c.W))
        for j in gl.static_range((c.HIDDEN + COLUMNS - 1) // COLUMNS):
            part = ring.x.index(j).load(gl.SliceLayout(0, c.W)).to(gl.float32)
            squares += part * part
    inverse = 1.0 / gl.sqrt(gl.sum(squares, 0) / c.HIDDEN + eps)
    gl.thread_barrier()
    for i in gl.static_range(vectors_of(c.HIDDEN)):
        store_vector(ring, i, raw[i] * inverse * gains[i].to(gl.float32), FP8, c)
    gl.thread_barrier()
