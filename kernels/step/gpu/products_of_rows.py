"""Products of the whole-step kernel for one or several rows, on tensor cores.

A stage holds 1024 columns of 8 rows of weights, which are multiplied by those columns of 8 rows; of FP8 weights,
which are converted to the model's dtype, it holds up to twice as many. Of each part of 256 columns a warp multiplies
32, in two halves, so that a product (m16n8k16) has 16 rows and 16 columns:

    first half of 8 rows    x    first half of 8 rows of weights | second half        used | not used
    second half                                                                   not used | used

A part's products are added to those of the part before, and warps add their sums in a fixed order. So a row has the
same bits whatever the others are, and however many. A step of fewer than 8 rows has each of them several times.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.gpu.widen import widen
from kernels.step.gpu.grid_barrier import received
from kernels.step.gpu.ring import release, wait_full
from kernels.step.gpu.step_constants import (
    COLUMNS,
    CONSUMER_WARPS,
    MOST_TILES,
    PARTS,
    ROWS,
    SUMS,
    part_columns_log2,
    parts_in,
    parts_per_stage,
    stages_of,
    stored_dtype,
)

WIDTH = gl.constexpr(PARTS.value * COLUMNS.value)
"""Columns that are multiplied at once."""


@gluon.constexpr_function
def part_width(batch):
    """Return how many elements of a row's 1024 columns a thread has next to each other."""
    return 8 if batch > 1 else 4


@gluon.constexpr_function
def row_layout(batch):
    """Return the register layout of [batch, WIDTH]: 8 warps divide the rows, then the columns."""
    warps = CONSUMER_WARPS.value // batch
    return gl.BlockedLayout([1, part_width(batch)], [1, 32], [batch, warps], [1, 0])


@gluon.constexpr_function
def whole_row_layout(batch):
    """Return a register layout of [batch, WIDTH] in which a warp has a whole row, that of its rows in `row_layout`.

    So a sum over a row has the same order for any number of rows, and no warp waits for others.
    """
    rows = batch.bit_length() - 1
    warps = [[0, 0]] * (3 - rows) + [[1 << i, 0] for i in range(rows)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 32], [0, 64], [0, 256], [0, 512]],
        [[0, 2], [0, 4], [0, 8], [0, 16], [0, 128]],
        warps,
        [],
        [batch, WIDTH.value],
    )


@gluon.constexpr_function
def sum_layout():
    """Return the register layout of each warp's sums [ROWS, SUMS]: a warp has the sums of one sequence."""
    return gl.BlockedLayout([1, 2], [8, 4], [1, CONSUMER_WARPS.value], [1, 0])


@gluon.constexpr_function
def accumulators():
    """Return the register layout of products [warp, 16, 16]."""
    return gl.NVMMADistributedLayout([2, 0], [CONSUMER_WARPS.value, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def places_of_rows(batch):
    """Return the (row, column) at places 1, 2, 4 and so on of WIDTH columns of all rows in shared memory.

    A thread reads the 8 columns of a part that it multiplies at once. Three bits are added to others, so that what
    programs exchange is stored without bank conflicts.
    """
    rows = [(1 << i, 0) for i in range(batch.bit_length() - 1)]
    found = [(0, 1), (0, 8), (0, 16), (0, 2), (0, 4), *rows]
    for i, column in enumerate((32, 64, 128)):
        row, other = found[3 + i] if 3 + i < len(found) else (0, 0)
        found.append((row, column ^ other))
    return [*found, (0, 256), (0, 512)]


@gluon.constexpr_function
def shared_rows(batch):
    """Return the layout of [batch, WIDTH] in shared memory."""
    return gl.SharedLinearLayout([list(it) for it in places_of_rows(batch)])


@gluon.constexpr_function
def shared_part(batch):
    """Return the layout in which a part of all rows in shared memory is [warp, half, batch, 16]."""
    return gl.SharedLinearLayout(
        [[it >> 5, it >> 4 & 1, row, it & 15] for row, it in places_of_rows(batch)[:-2]]
    )


@gluon.constexpr_function
def operand_layout(batch):
    """Return the register layout of the first operand as [warp, half, 8 / batch, batch, 16]."""
    rows = [
        [0, 0, 0, 1 << i, 0] if 1 << i < batch else [0, 0, (1 << i) // batch, 0, 0]
        for i in range(3)
    ]
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0, 0, 0, 0, 8]],
        [[0, 0, 0, 0, 2], [0, 0, 0, 0, 4], *rows],
        [[1 << i, 0, 0, 0, 0] for i in range(3)],
        [],
        [CONSUMER_WARPS.value, 2, ROWS.value // batch, batch, 16],
    )


@gluon.constexpr_function
def weights_operand(fp8):
    """Return the layout in which a part [ROWS, COLUMNS] of a stage is the second operand [warp, 16, 16].

    Chunks of 16 bytes are exchanged with the row's number.
    """
    columns = [[0, 1 << i, 0] for i in range(4)] + [[0, 0, 8]] + [[1 << i, 0, 0] for i in range(3)]
    first = part_columns_log2(fp8)
    rows = []
    for i in range(3):
        warp, inner, row = columns[first + i]
        rows.append([warp, inner, row + (1 << i)])
    return gl.SharedLinearLayout([*columns, *rows])


@gluon.constexpr_function
def chunks_in(inputs, stage, fp8):
    """Return how many chunks of WIDTH columns of ROWS rows of weights are in one of their stages."""
    return -(-parts_in(inputs, stage, fp8) // PARTS.value)


@gluon.jit
def chunk_of_rows(ring, number, c):
    """View columns `number` * WIDTH and those after them of all sequences, [BATCH, WIDTH]."""
    dtype: gl.constexpr = ring.x.dtype
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    chunks = ring.x._reinterpret(dtype, [c.INPUTS // c.CHUNK, c.CHUNK], flat)
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
            exists = gl.max_constancy(exists, [1, part_width(c.BATCH)])
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
            exists = gl.max_constancy(number < c.HIDDEN, part_width(c.BATCH))
            parts = parts + (gl.load(place, mask=exists, other=0.0),)  # type: ignore[assignment]
        else:
            parts = parts + (gl.load(place),)  # type: ignore[assignment]
    return parts


@gluon.jit
def norm_rows(ring, gains, eps, c):
    """Normalize the hidden states in shared memory; `gains` are a result of `row_gains`."""
    layout: gl.constexpr = row_layout(c.BATCH)
    whole: gl.constexpr = whole_row_layout(c.BATCH)
    squares = gl.zeros([c.BATCH, WIDTH], gl.float32, layout=whole)
    raw = ()
    for i in gl.static_range(stages_of(c.HIDDEN)):
        part = chunk_of_rows(ring, i, c).load(whole).to(gl.float32)
        squares = gl.fma(part, part, squares)
        raw = raw + (chunk_of_rows(ring, i, c).load(layout).to(gl.float32),)  # type: ignore[assignment]
    inverse = 1.0 / gl.sqrt(gl.sum(squares, 1) / c.HIDDEN + eps)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, layout), assert_trivial=True)
    # All have read the raw rows before.
    gl.thread_barrier()
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
    of_weights: gl.constexpr = gl.DotOperandLayout(1, accumulators(), 2)
    shape: gl.constexpr = [CONSUMER_WARPS, 16, 16]
    sums = products
    for k in gl.static_range(CHUNKS):
        rows = ()
        for j in gl.static_range(PARTS):
            rows = rows + (part_of_rows(ring, (number * AT_ONCE + k) * PARTS + j, c),)  # type: ignore[assignment]
        added = ()
        for t in gl.static_range(len(products)):
            stage = ring.data.index((used + t * STRIDE) % c.STAGES)
            parts = stage._reinterpret(stored, [AT_ONCE * PARTS, ROWS * COLUMNS], flat)
            total = sums[t]
            for j in gl.static_range(PARTS):
                part = parts.index(k * PARTS + j)._reinterpret(stored, shape, weights_operand(FP8))
                weights = part.load(of_weights)
                if FP8:
                    weights = widen(weights, dtype)
                total = mma_v2(rows[j], weights, total)
            added = added + (total,)  # type: ignore[assignment]
        sums = added
    return sums


@gluon.jit
def part_of_rows(ring, number, c):
    """Load columns `number` * COLUMNS and those after them of all rows as the first operand [warp, 16, 16]."""
    dtype: gl.constexpr = ring.x.dtype
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SIZE: gl.constexpr = c.BATCH * COLUMNS
    layout: gl.constexpr = operand_layout(c.BATCH)
    part = ring.x._reinterpret(dtype, [c.INPUTS // SIZE, SIZE], flat).index(number)
    part = part._reinterpret(dtype, [CONSUMER_WARPS, 2, c.BATCH, 16], shared_part(c.BATCH))
    once = gl.expand_dims(part.load(gl.SliceLayout(2, layout)), 2)
    all_rows: gl.constexpr = [CONSUMER_WARPS, 2, ROWS // c.BATCH, c.BATCH, 16]
    rows, _ = gl.broadcast(once, gl.zeros(all_rows, dtype, layout=layout))
    rows = gl.reshape(rows, [CONSUMER_WARPS, 16, 16])
    return gl.convert_layout(rows, gl.DotOperandLayout(0, accumulators(), 2))


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
