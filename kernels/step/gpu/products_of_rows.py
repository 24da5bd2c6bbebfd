"""Products of the whole-step kernel for several sequences, on tensor cores.

A stage holds 1024 columns of 8 rows of weights, which are multiplied by those columns of 8 sequences; of FP8 weights,
which are converted to the model's dtype, it holds up to twice as many. The eight warps divide 1024 columns, 128 each,
and a warp divides its own into two halves, so that a product has 16 rows and 16 columns:

    first half of 8 sequences    x    first half of 8 rows of weights | second half        used | not used
    second half                                                                        not used | used

Warps add their sums in a fixed order, so a sequence has the same bits whatever the others are. Where a step has fewer
than 8 sequences, the other rows of the products are undefined and not read.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.gpu.widen import widen
from kernels.step.gpu.grid_barrier import received
from kernels.step.gpu.ring import (
    COLUMNS,
    CONSUMER_WARPS,
    MOST_TILES,
    MULTIPLIED,
    PARTS,
    ROWS,
    SUMS,
    part_columns_log2,
    parts_in,
    parts_per_stage,
    release,
    stages_of,
    stored_dtype,
    wait_full,
)

WIDTH = gl.constexpr(PARTS.value * COLUMNS.value)
"""Columns that are multiplied at once."""


@gluon.constexpr_function
def row_layout(batch):
    """Return the register layout of [batch, WIDTH]: 8 warps divide the rows, then the columns."""
    warps = CONSUMER_WARPS.value // batch
    return gl.BlockedLayout([1, 8], [1, 32], [batch, warps], [1, 0])


@gluon.constexpr_function
def sum_layout():
    """Return the register layout of each warp's sums [ROWS, SUMS]: a warp has the sums of one sequence."""
    return gl.BlockedLayout([1, 2], [8, 4], [1, CONSUMER_WARPS.value], [1, 0])


@gluon.constexpr_function
def accumulators():
    """Return the register layout of products [warp, 16, 16]."""
    return gl.NVMMADistributedLayout([2, 0], [CONSUMER_WARPS.value, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def shared_rows(batch):
    """Return the layout of [batch, WIDTH] in shared memory: chunk i of 8 columns of row r is at place i ^ r."""
    columns = [[0, 1 << i] for i in range(10)]
    return gl.SharedLinearLayout(
        [*columns, *([1 << i, 8 << i] for i in range(batch.bit_length() - 1))]
    )


@gluon.constexpr_function
def columns_divided(row_at, inner_at):
    """Return the coordinates [warp, ...] that an element has by the bits of its column, from bit 0 on.

    `row_at` is the dimension of the rows of a product, `inner_at` the one over which it adds.
    """
    at = [(inner_at, 1 << i) for i in range(6)] + [(row_at, 8)] + [(0, 1 << i) for i in range(3)]
    return [[size if i == dimension else 0 for i in range(3)] for dimension, size in at]


@gluon.constexpr_function
def rows_divided(row_at, inner_at, fp8=False):
    """Like `columns_divided`, by the bits of a row's number: chunks of 16 bytes are exchanged with it."""
    columns = columns_divided(row_at, inner_at)
    first = part_columns_log2(fp8)
    rows = []
    for i in range(3):
        basis = columns[first + i]
        rows.append([basis[at] + (1 << i if at == row_at else 0) for at in range(3)])
    return rows


@gluon.constexpr_function
def rows_operand():
    """Return the layout in which shared rows, [8, WIDTH], are the first operand [warp, 16, 64]."""
    return gl.SharedLinearLayout([*columns_divided(1, 2), *rows_divided(1, 2)])


@gluon.constexpr_function
def weights_operand(fp8):
    """Return the layout in which [PARTS, ROWS, COLUMNS] of a stage are the second operand [warp, 64, 16]."""
    columns, rows = columns_divided(2, 1), rows_divided(2, 1, fp8)
    return gl.SharedLinearLayout([*columns[:8], *rows, *columns[8:]])


@gluon.constexpr_function
def chunks_in(inputs, stage, fp8):
    """Return how many chunks of WIDTH columns of ROWS rows of weights are in one of their stages."""
    return -(-parts_in(inputs, stage, fp8) // PARTS.value)


@gluon.jit
def chunk_of_rows(ring, number, c):
    """View columns `number` * WIDTH and those after them of all sequences, [BATCH, WIDTH]."""
    dtype: gl.constexpr = ring.x.dtype
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    chunks = ring.x._reinterpret(dtype, [c.INPUTS // MULTIPLIED, MULTIPLIED], flat)
    layout: gl.constexpr = shared_rows(c.BATCH)
    return chunks.index(number)._reinterpret(dtype, [c.BATCH, WIDTH], layout)


@gluon.jit
def row_offsets(size, c):
    """Return where each sequence's vector of `size` elements begins, [BATCH, 1]."""
    row = gl.arange(0, c.BATCH, layout=gl.SliceLayout(1, row_layout(c.BATCH)))
    return (row * size)[:, None]


@gluon.jit
def share_rows(ring, vectors, offsets, INPUTS: gl.constexpr, PUBLISHED: gl.constexpr, c):
    """Copy the vectors at `vectors` + `offsets` to shared memory, zeros behind them.

    PUBLISHED if programs publish them during this launch.
    """
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, row_layout(c.BATCH)))[None, :]
    loaded = ()
    for i in gl.static_range(stages_of(INPUTS)):
        place = row_places(vectors, offsets, i * WIDTH + column)
        if (i + 1) * WIDTH > INPUTS:
            exists = (i * WIDTH + column < INPUTS) & (offsets >= 0)
            exists = gl.max_constancy(exists, [1, 8])
            numbers = gl.load(place, mask=exists, other=0.0, cache_modifier=".cg")
        else:
            numbers = gl.load(place, cache_modifier=".cg")
        loaded = loaded + (numbers,)  # type: ignore[assignment]
    for i in gl.static_range(stages_of(INPUTS)):
        numbers = loaded[i]
        if PUBLISHED:
            place = row_places(vectors, offsets, i * WIDTH + column)
            numbers = received(numbers, place, 4, c)
        chunk_of_rows(ring, i, c).store(numbers)
    gl.thread_barrier()


@gluon.jit
def row_places(vectors, offsets, column):
    """Return the addresses of elements of vectors, for loads of 16 bytes."""
    place = vectors + (offsets + column)
    return gl.multiple_of(gl.max_contiguous(place, [1, 8]), [1, 16])


@gluon.jit
def row_gains(vector, c):
    """Load the gains of a norm, in the layout in which `norm_rows` needs them."""
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, row_layout(c.BATCH)))
    parts = ()
    for i in gl.static_range(stages_of(c.HIDDEN)):
        number = i * WIDTH + column
        place = gl.multiple_of(gl.max_contiguous(vector + number, 8), 16)
        if (i + 1) * WIDTH > c.HIDDEN:
            exists = gl.max_constancy(number < c.HIDDEN, 8)
            parts = parts + (gl.load(place, mask=exists, other=0.0),)  # type: ignore[assignment]
        else:
            parts = parts + (gl.load(place),)  # type: ignore[assignment]
    return parts


@gluon.jit
def norm_rows(ring, gains, eps, c):
    """Normalize the hidden states in shared memory; `gains` are a result of `row_gains`."""
    layout: gl.constexpr = row_layout(c.BATCH)
    squares = gl.zeros([c.BATCH, WIDTH], gl.float32, layout=layout)
    raw = ()
    for i in gl.static_range(stages_of(c.HIDDEN)):
        part = chunk_of_rows(ring, i, c).load(layout).to(gl.float32)
        squares += part * part
        raw = raw + (part,)  # type: ignore[assignment]
    inverse = 1.0 / gl.sqrt(gl.sum(squares, 1) / c.HIDDEN + eps)
    for i in gl.static_range(stages_of(c.HIDDEN)):
        normal = raw[i] * inverse[:, None] * gains[i].to(gl.float32)[None, :]
        chunk_of_rows(ring, i, c).store(normal.to(ring.x.dtype))
    gl.thread_barrier()


@gluon.jit
def outputs_of_tile():
    """Return sequence and row of weights of each sum of a tile, [SUMS] each."""
    number = gl.arange(0, SUMS, layout=gl.SliceLayout(0, sum_layout()))
    return number // ROWS, number % ROWS


@gluon.jit
def multiply(ring, used, INPUTS: gl.constexpr, TILES: gl.constexpr, FP8: gl.constexpr, c):
    """Multiply the next tiles of weights by the vectors in shared memory; returns TILES tensors of [SUMS] float32.

    The stages of all tiles are in the ring at once.
    """
    EACH: gl.constexpr = stages_of(INPUTS, FP8)
    for i in gl.static_range(TILES * EACH):
        wait_full(ring, used + i, c)
    products = ()
    for _ in gl.static_range(TILES):
        products = products + (no_products(),)  # type: ignore[assignment]
    for i in gl.static_range(EACH):
        products = add_stages(ring, products, i, used + i, EACH, chunks_in(INPUTS, i, FP8), FP8, c)
    return sums_of_warps(ring, products, used, EACH, FP8, c), used + TILES * EACH


@gluon.jit
def multiply_long(ring, used, INPUTS: gl.constexpr, FP8: gl.constexpr, c):
    """Multiply the next tile of weights by the vectors in shared memory; returns [SUMS] float32."""
    AT_ONCE: gl.constexpr = min(4, c.STAGES // 2)
    TIMES: gl.constexpr = (stages_of(INPUTS, FP8) - 1) // AT_ONCE
    REST: gl.constexpr = stages_of(INPUTS, FP8) - TIMES * AT_ONCE
    FULL: gl.constexpr = chunks_in(INPUTS, 0, FP8)
    products = (no_products(),)
    for n in range(TIMES):
        for i in gl.static_range(AT_ONCE):
            wait_full(ring, used + i, c)
        for i in gl.static_range(AT_ONCE):
            products = add_stages(ring, products, n * AT_ONCE + i, used + i, 1, FULL, FP8, c)
        release(ring, used, AT_ONCE, c)
        used += AT_ONCE
    for i in gl.static_range(REST):
        wait_full(ring, used + i, c)
    for i in gl.static_range(REST):
        products = add_stages(
            ring, products, TIMES * AT_ONCE + i, used + i, 1, chunks_in(INPUTS, TIMES * AT_ONCE + i, FP8), FP8, c
        )  # fmt: skip
    sums = sums_of_warps(ring, products, used, REST, FP8, c)
    return sums[0], used + REST


@gluon.jit
def tile_scales(ring, used, FP8: gl.constexpr, c):
    """Return the scale of each sum of the tile in use number `used` of the ring, which has arrived; 1 without FP8."""
    scales = 1.0
    if FP8:
        layout: gl.constexpr = gl.SliceLayout(0, sum_layout())
        sums = gl.reshape(gl.zeros([SUMS], gl.float32, layout=layout), [ROWS, ROWS])
        of_rows = ring.scales.index(used % c.STAGES).load(gl.SliceLayout(0, sums.type.layout))
        scales = gl.convert_layout(gl.reshape(sums + of_rows[None, :], [SUMS]), layout)
    return scales


@gluon.jit
def no_products():
    """Return zeros [warp, 16, 16] float32."""
    layout: gl.constexpr = accumulators()
    return gl.zeros([CONSUMER_WARPS, 16, 16], gl.float32, layout=layout)


@gluon.jit
def add_stages(
    ring, products, number, used, STRIDE: gl.constexpr, CHUNKS: gl.constexpr, FP8: gl.constexpr, c
):
    """Add the products of stage `number` of each tile, CHUNKS chunks of WIDTH columns.

    The tiles' stages are STRIDE uses apart, from `used` on.
    """
    dtype: gl.constexpr = ring.x.dtype
    stored: gl.constexpr = stored_dtype(dtype, FP8)
    AT_ONCE: gl.constexpr = parts_per_stage(FP8) // PARTS
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    of_rows: gl.constexpr = gl.DotOperandLayout(0, accumulators(), 2)
    of_weights: gl.constexpr = gl.DotOperandLayout(1, accumulators(), 2)
    rows_shape: gl.constexpr = [CONSUMER_WARPS, 16, WIDTH // CONSUMER_WARPS // 2]
    weights_shape: gl.constexpr = [CONSUMER_WARPS, WIDTH // CONSUMER_WARPS // 2, 16]
    chunks = ring.x._reinterpret(dtype, [c.INPUTS // MULTIPLIED, MULTIPLIED], flat)
    sums = products
    for k in gl.static_range(CHUNKS):
        rows = chunks.index(number * AT_ONCE + k)
        rows = rows._reinterpret(dtype, rows_shape, rows_operand()).load(of_rows)
        added = ()
        for t in gl.static_range(len(products)):
            stage = ring.data.index((used + t * STRIDE) % c.STAGES)
            part = stage._reinterpret(stored, [AT_ONCE, PARTS * ROWS * COLUMNS], flat).index(k)
            weights = part._reinterpret(stored, weights_shape, weights_operand(FP8)).load(
                of_weights
            )
            if FP8:
                weights = widen(weights, dtype)
            added = added + (mma_v2(rows, weights, sums[t]),)  # type: ignore[assignment]
        sums = added
    return sums


@gluon.jit
def sums_of_warps(ring, products, used, EACH: gl.constexpr, FP8: gl.constexpr, c):
    """Add the warps' products of each tile, [SUMS] each, and release EACH stages a tile from use number `used` on."""
    # All have read the sums before.
    gl.thread_barrier()
    for t in gl.static_range(len(products)):
        halves = gl.reshape(products[t], [CONSUMER_WARPS, 2, ROWS, 2, ROWS])
        left, right = gl.split(gl.permute(halves, [0, 2, 4, 1, 3]))
        first, _ = gl.split(left)
        _, second = gl.split(right)
        ring.sums.index(t).store(gl.reshape(first + second, [CONSUMER_WARPS, SUMS]))
    scales = ()
    for t in gl.static_range(len(products)):
        scales = scales + (tile_scales(ring, used + t * EACH, FP8, c),)  # type: ignore[assignment]
    release(ring, used, len(products) * EACH, c)
    totals = ()
    for t in gl.static_range(len(products)):
        total = gl.sum(ring.sums.index(t).load(sum_layout()), 0) * scales[t]
        totals = totals + (total,)  # type: ignore[assignment]
    return totals


@gluon.constexpr_function
def row_tiles_at_once(hidden, stages, fp8=False):
    """Return how many tiles the next call of `multiply` multiplies: half of the ring at most, if one tile allows it."""
    return max(1, min(MOST_TILES.value, stages // 2 // stages_of(hidden, fp8)))
