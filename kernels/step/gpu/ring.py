"""The shared memory of the whole-step kernel: the ring between producer and consumers, and what lies beside it.

A stage of the ring holds `PARTS` parts of 8 rows by 256 columns of weights, or keys and values that have the same size
in the model's dtype. The last stage of 8 rows is filled as far as the rows go; columns past their end are zeros. Of FP8
weights it holds twice as many parts, and the rows' scales lie beside the ring. FP8 keys and values fill half a stage,
and their scales follow them. A stage has two barriers:
`full` completes when its bytes have arrived, `empty` when they have been read. Producer and consumers each count the
stages they have used; the count gives stage and phase:

    use n of a ring of S stages    stage n % S, phase (n // S) & 1
"""
# An aggregate reads its annotations when its class is created, so they cannot be postponed to strings.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from kernels.step.gpu.step_constants import (
    COLUMNS,
    MOST_TENSOR_TILES,
    MOST_TILES,
    PARTS,
    PRODUCER_WARPS,
    ROWS,
    SUMS,
    WARP_SUMS,
    part_columns_log2,
    parts_per_stage,
    stored_dtype,
)


@aggregate
class Ring:
    """The kernel's shared memory and its barriers.

    Attributes:
        data: [STAGES, PARTS * ROWS * COLUMNS].
        full: [STAGES, 1], as is `empty`.
        x: [INPUTS / 256, 256], the inputs of a linear layer, of all rows.
        sums: float32, each consumer warp's sums of a tile. In a step of rows [MOST_TILES, ROWS, SUMS], else
            [MOST_TENSOR_TILES, ROWS, WARP_SUMS]. During attention the heads of several rows lie there, or the
            log-sum-exps of the splits of one row.
        scales: [STAGES, ROWS] float32, of the rows of weights in a stage, of FP8 weights; of weights in groups int32,
            [STAGES, 2 * PARTS * ROWS * PART_SCALES].
        heads: [HEAD_ROWS, DP], HELD queries, then BATCH keys and BATCH values: of the tokens of the step that the row
            follows, and of the row.
        maxima: [HELD_P, LINES] float32, of each line's scores, as are `totals` of its weights.
    """

    data: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    heads: gl.shared_memory_descriptor
    maxima: gl.shared_memory_descriptor
    totals: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, data, full, empty, x, heads, maxima, totals, sums, scales) -> None:
        self.data = data
        self.full = full
        self.empty = empty
        self.x = x
        self.heads = heads
        self.maxima = maxima
        self.totals = totals
        self.sums = sums
        self.scales = scales


@gluon.jit
def make_ring(dtype: gl.constexpr, c):
    """Allocate the ring and set up its barriers."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    data = gl.allocate_shared_memory(dtype, [c.STAGES, PARTS * ROWS * COLUMNS], flat)
    x = gl.allocate_shared_memory(dtype, [c.INPUTS // COLUMNS, COLUMNS], flat)
    plane: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    maxima = gl.allocate_shared_memory(gl.float32, [c.HELD_P, c.LINES], plane)
    totals = gl.allocate_shared_memory(gl.float32, [c.HELD_P, c.LINES], plane)
    if c.OF_ROWS:
        # Warps write a row each and read a column each, both without bank conflicts.
        apart: gl.constexpr = gl.SwizzledSharedLayout(8, 1, ROWS, [1, 0])
        sums = gl.allocate_shared_memory(gl.float32, [MOST_TILES, ROWS, SUMS], apart)
    else:
        in_fours: gl.constexpr = gl.SwizzledSharedLayout(4, 1, ROWS, [1, 0])
        sums = gl.allocate_shared_memory(gl.float32, [MOST_TENSOR_TILES, ROWS, WARP_SUMS], in_fours)
    if c.HEADS_IN_SUMS:
        heads = sums._reinterpret(dtype, [c.HEAD_ROWS, c.DP], flat)
    else:
        heads = gl.allocate_shared_memory(dtype, [c.HEAD_ROWS, c.DP], flat)
    scales = totals
    if c.PART_SCALES > 0:
        scales = gl.allocate_shared_memory(
            gl.int32, [c.STAGES, 2 * PARTS * ROWS * c.PART_SCALES], flat
        )
    elif c.FP8_WEIGHTS:
        scales = gl.allocate_shared_memory(gl.float32, [c.STAGES, ROWS], flat)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [c.STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [c.STAGES, 1], bar)
    for i in gl.static_range(c.STAGES):
        # Each producer thread arrives when its own copies are complete.
        mbarrier.init(full.index(i), count=PRODUCER_WARPS * 32)
        mbarrier.init(empty.index(i), count=1)
    gl.thread_barrier()
    return Ring(data, full, empty, x, heads, maxima, totals, sums, scales)


@gluon.constexpr_function
def part_layout(fp8):
    """Return the layout of a part, in which the same columns of its rows are in different banks."""
    return gl.SwizzledSharedLayout(1 << part_columns_log2(fp8), 1, ROWS.value, [1, 0])


@gluon.jit
def parts_of(ring, stage, FP8: gl.constexpr):
    """View a stage as parts of weights, [PARTS, ROWS, COLUMNS]; of FP8 weights, twice as many parts."""
    dtype: gl.constexpr = stored_dtype(ring.data.dtype, FP8)
    shape: gl.constexpr = [parts_per_stage(FP8), ROWS, COLUMNS]
    layout: gl.constexpr = part_layout(FP8)
    return ring.data.index(stage)._reinterpret(dtype, shape, layout)


@gluon.jit
def keys_of(ring, stage, c):
    """View a stage as keys and values, [2, KEYS, DP]; in FP8 as [4, KEYS, DP], where the scales follow the values."""
    dtype: gl.constexpr = stored_dtype(ring.data.dtype, c.FP8)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return ring.data.index(stage)._reinterpret(dtype, [4 if c.FP8 else 2, c.KEYS, c.DP], layout)


@gluon.jit
def rows_in(ring, stage, c):
    """View a stage as rows [DP]: KEYS keys, then as many values; in FP8, what follows them are scales."""
    dtype: gl.constexpr = stored_dtype(ring.data.dtype, c.FP8)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return ring.data.index(stage)._reinterpret(dtype, [(4 if c.FP8 else 2) * c.KEYS, c.DP], layout)


@gluon.jit
def lines_of(ring, stage, c):
    """View a stage as the keys and values of each line, [2, LINES, 2, DP]; in FP8 the first size is 4."""
    dtype: gl.constexpr = stored_dtype(ring.data.dtype, c.FP8)
    shape: gl.constexpr = [4 if c.FP8 else 2, c.LINES, 2, c.DP]
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    return ring.data.index(stage)._reinterpret(dtype, shape, layout)


@gluon.jit
def scales_of(ring, stage, OF_VALUES: gl.constexpr, c):
    """View the scales of a stage's keys or values, [KEYS] float32; a stage has the size of DP such rows."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines = ring.data.index(stage)._reinterpret(gl.float32, [c.DP, c.KEYS], layout)
    return lines.index(c.DP // 2 + OF_VALUES)


@gluon.jit
def lines_scales(ring, stage, OF_VALUES: gl.constexpr, layout: gl.constexpr, c):
    """Load the scales of each line's keys or values, [LINES, 2] float32; all 1 without FP8."""
    scales = gl.full([c.LINES, 2], 1.0, gl.float32, layout=layout)
    if c.FP8:
        plane: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        line = scales_of(ring, stage, OF_VALUES, c)
        scales = line._reinterpret(gl.float32, [c.LINES, 2], plane).load(layout)
    return scales


@gluon.jit
def row_scales(ring, used, FP8: gl.constexpr, c):
    """Return the scales of the rows in use number `used` of the ring, which has arrived, [ROWS]; 1 without FP8."""
    scales = 1.0
    if FP8 == 1:
        scales = ring.scales.index(used % c.STAGES).load(gl.SliceLayout(1, c.W))
    return scales


@gluon.jit
def wait_full(ring, used, c):
    """Wait until the bytes of use number `used` have arrived; returns the stage."""
    stage = used % c.STAGES
    mbarrier.wait(ring.full.index(stage), (used // c.STAGES) & 1)
    return stage


@gluon.jit
def release(ring, used, COUNT: gl.constexpr, c):
    """Release COUNT stages from use number `used` on, when all consumers have read them."""
    gl.thread_barrier()
    for i in gl.static_range(COUNT):
        mbarrier.arrive(ring.empty.index((used + i) % c.STAGES), count=1)


@gluon.jit
def wait_empty(ring, used, c):
    """Wait until the stage of use number `used` is free; returns the stage."""
    stage = used % c.STAGES
    mbarrier.wait(ring.empty.index(stage), ((used // c.STAGES) & 1) ^ 1)
    return stage


@gluon.jit
def sent(ring, stage, FLYING: gl.constexpr):
    """Arrive at the stage's `full` barrier when this thread's copies are done; wait until FLYING - 1 are pending."""
    async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)
    async_copy.commit_group()
    async_copy.wait_group(FLYING - 1)
