"""Matrix-vector products of the whole-step kernel: each program multiplies its own rows of weights by the same vector.

The vector lies in shared memory or, normalized, in registers; weights arrive in the ring. Sums are added in a fixed
order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.step.gpu.grid_barrier import received
from kernels.step.gpu.ring import (
    COLUMNS,
    CONSUMER_WARPS,
    MOST_HELD,
    PARTS,
    ROWS,
    parts_in,
    parts_of,
    release,
    stages_of,
    wait_full,
)
from kernels.step.gpu.tensor_products import multiply, store_vector, tensor_tiles_at_once


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
    if c.TENSOR_CORES:
        element = gl.arange(0, 4 * COLUMNS, layout=lane_layout())
        for i in gl.static_range(vectors_of(c.HIDDEN)):
            number = i * 4 * COLUMNS + element
            parts = parts + (gl.load(vector + number, mask=number < c.HIDDEN, other=0.0),)  # type: ignore[assignment]
    else:
        column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, c.W))
        for j in gl.static_range((c.HIDDEN + COLUMNS - 1) // COLUMNS):
            number = j * COLUMNS + column
            place = gl.multiple_of(gl.max_contiguous(vector + number, 8), 16)
            if (j + 1) * COLUMNS > c.HIDDEN:
                exists = gl.max_constancy(number < c.HIDDEN, 8)
                parts = parts + (gl.load(place, mask=exists, other=0.0),)  # type: ignore[assignment]
            else:
                parts = parts + (gl.load(place),)  # type: ignore[assignment]
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
        if MULTIPLIED and c.TENSOR_CORES:
            store_vector(ring, i, numbers, c.FP8_WEIGHTS, c)
        else:
            x.index(i).store(numbers)
    gl.thread_barrier()


@gluon.jit
def normed(ring, gains, eps, FP8: gl.constexpr, c):
    """Normalize the hidden state in shared memory.

    For ordinary cores every warp gets all of it in registers, in float32 and without the factor of the norm: the sums
    are multiplied by it instead (`dot_normed`), which need not wait for it. For tensor cores it is normalized in shared
    memory; the weights by which it is multiplied are in FP8 or not.

    Returns:
        (the hidden state times the gains, as tensors of COLUMNS elements, and the factor).
    """
    raw = ()
    xs = ()
    factor = 1.0
    if c.TENSOR_CORES:
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
    else:
        squares = gl.zeros([COLUMNS], gl.float32, layout=gl.SliceLayout(0, c.W))
        for j in gl.static_range((c.HIDDEN + COLUMNS - 1) // COLUMNS):
            part = ring.x.index(j).load(gl.SliceLayout(0, c.W)).to(gl.float32)
            squares += part * part
            xs = xs + (part * gains[j].to(gl.float32),)  # type: ignore[assignment]
        factor = 1.0 / gl.sqrt(gl.sum(squares, 0) / c.HIDDEN + eps)
    return xs, factor


@gluon.constexpr_function
def tiles_at_once(hidden, stages, wanted, fp8, on_tensor_cores):
    """Return how many tiles of ROWS rows the next call of `dot_normed` multiplies.

    At most `wanted` stages (on tensor cores tiles) and half of the ring, so that the producer can copy the others.
    """
    if on_tensor_cores:
        return tensor_tiles_at_once(hidden, fp8, stages, wanted)
    return max(1, min(wanted, stages // 2) // stages_of(hidden))


@gluon.jit
def dot_normed(ring, xs, factor, used, TILES: gl.constexpr, FP8: gl.constexpr, c):
    """Multiply the next tiles of weights by the normalized hidden state; returns TILES tensors of [ROWS] float32.

    `xs` and `factor` are the result of `normed`; the weights are in FP8 or not.
    """
    totals = ()
    if c.TENSOR_CORES:
        totals, used = multiply(ring, used, c.HIDDEN, TILES, FP8, c)
    else:
        sums, used = dot_held(ring, xs, used, TILES, c)
        for t in gl.static_range(TILES):
            totals = totals + (sums[t] * factor,)  # type: ignore[assignment]
    return totals, used


@gluon.jit
def dot_held(ring, xs, used, TILES: gl.constexpr, c):
    """Multiply the next tiles of weights by a vector held in registers; returns TILES tensors of [ROWS] float32."""
    EACH: gl.constexpr = stages_of(c.HIDDEN)
    ALL: gl.constexpr = TILES * EACH
    AT_ONCE: gl.constexpr = 2 if ALL % 2 == 0 else 1
    tiles = ()
    sums = gl.zeros([ROWS, COLUMNS], gl.float32, layout=c.W)
    for i in gl.static_range(ALL):
        if i % AT_ONCE == 0:
            for k in gl.static_range(AT_ONCE):
                wait_full(ring, used + i + k, c)
        parts = parts_of(ring, (used + i) % c.STAGES, gl.constexpr(False), c)
        for j in gl.static_range(parts_in(c.HIDDEN, i % EACH)):
            weights = parts.index(j).load(c.W).to(gl.float32)
            sums += weights * xs[i % EACH * PARTS + j][None, :]
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
    BATCH: gl.constexpr = min(4, c.STAGES // 2)
    BATCHES: gl.constexpr = INPUTS // (COLUMNS * PARTS * BATCH)
    REST: gl.constexpr = stages_of(INPUTS) - BATCHES * BATCH
    LAST: gl.constexpr = parts_in(INPUTS, stages_of(INPUTS) - 1)
    sums = gl.zeros([ROWS, COLUMNS], gl.float32, layout=c.W)
    for i in range(BATCHES):
        sums = add_stages(ring, sums, i * BATCH, used, BATCH, PARTS, c)
        used += BATCH
    if REST > 0:
        sums = add_stages(ring, sums, BATCHES * BATCH, used, REST, LAST, c)
        used += REST
    return gl.sum(sums, 1), used


@gluon.jit
def add_stages(ring, sums, number, used, COUNT: gl.constexpr, LAST: gl.constexpr, c):
    """Add the products of COUNT stages, those of the rows' stage `number` on; the last one has LAST parts."""
    for b in gl.static_range(COUNT):
        wait_full(ring, used + b, c)
    for b in gl.static_range(COUNT):
        parts = parts_of(ring, (used + b) % c.STAGES, gl.constexpr(False), c)
        for j in gl.static_range(PARTS if b + 1 < COUNT else LAST):
            weights = parts.index(j).load(c.W).to(gl.float32)
            x = ring.x.index((number + b) * PARTS + j).load(gl.SliceLayout(0, c.W)).to(gl.float32)
            sums += weights * x[None, :]
    release(ring, used, COUNT, c)
    return sums
