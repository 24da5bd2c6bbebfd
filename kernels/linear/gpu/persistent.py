"""A linear layer of many rows on Hopper's tensor cores: warp-specialized, persistent programs.

    producer    one warp: issues TMA copies of chunks of rows and of weights to a ring in shared memory
    consumers   two warp groups, each with half of a tile's rows and all of its outputs: wait for a chunk, multiply it,
                and release the one before it; then they gate or add a bias and store the tile

A program per SM computes tile after tile, so that the copies of a tile overlap the end of the tile before it. The
second consumer starts a tile some chunks after the first: while one stores, the other has the tensor cores.

Rows are on the M dimension of WGMMA and weights on N, so a thread has neighbouring outputs of a row. Of gated weights,
N alternates between eight rows of the gate and the corresponding eight of up, so that a thread has both.

The sums of an output are added as in `kernels.linear.gpu.matrix`: 16 columns after the other within a split, then split
after split. With the same number of splits, the bits are the same too.
"""
# `aggregate` evaluates the annotations when the class is defined, so this module cannot postpone them.

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.arch import detect
from kernels.gpu.dependent_launch import dependent_launch
from kernels.linear.checks import check_weights
from kernels.linear.persistent_tiles import (
    COLUMNS,
    CONSUMERS,
    STORED_OUTPUTS,
    PersistentLaunch,
    plan_persistent,
    rounded_rows,
)

if TYPE_CHECKING:
    from kernels.linear.problem import LinearProblem
    from kernels.linear.select import LinearChoice
    from kernels.linear.weights import LinearArguments, LinearWeights

_COLUMNS = gl.constexpr(COLUMNS)
_CONSUMERS = gl.constexpr(CONSUMERS)
_STORED_OUTPUTS = gl.constexpr(STORED_OUTPUTS)


@gluon.constexpr_function
def accumulator_layout(outputs):
    """Return the register layout of a consumer's WGMMA accumulator with `outputs` columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, outputs, 16])


@aggregate
class Constants:
    """Compile-time constants; those without a description are the arguments of `persistent_linear`.

    Attributes:
        OWN_ROWS: rows of a consumer.
        WIDTH: outputs of a row of the result.
        COUNT: outputs of a tile; half of BLOCK_N where GATED.
        CHUNKS: chunks of columns in a split.
        COLUMN_TILES: tiles along the weights.
    """

    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    GROUP_M: gl.constexpr
    SKEW: gl.constexpr
    SPLITS: gl.constexpr
    FLOAT32: gl.constexpr
    GATED: gl.constexpr
    BIAS: gl.constexpr
    PDL: gl.constexpr
    OWN_ROWS: gl.constexpr
    WIDTH: gl.constexpr
    COUNT: gl.constexpr
    CHUNKS: gl.constexpr
    COLUMN_TILES: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, N, K, BLOCK_M, BLOCK_N, STAGES, GROUP_M, SKEW, SPLITS, FLOAT32, GATED, BIAS, PDL
    ) -> None:  # fmt: skip
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.STAGES = gl.constexpr(STAGES)
        self.GROUP_M = gl.constexpr(GROUP_M)
        self.SKEW = gl.constexpr(SKEW)
        self.SPLITS = gl.constexpr(SPLITS)
        self.FLOAT32 = gl.constexpr(FLOAT32)
        self.GATED = gl.constexpr(GATED)
        self.BIAS = gl.constexpr(BIAS)
        self.PDL = gl.constexpr(PDL)
        self.OWN_ROWS = gl.constexpr(BLOCK_M // CONSUMERS)
        self.WIDTH = gl.constexpr(N // 2 if GATED else N)
        self.COUNT = gl.constexpr(BLOCK_N // 2 if GATED else BLOCK_N)
        self.CHUNKS = gl.constexpr(K // SPLITS // COLUMNS)
        self.COLUMN_TILES = gl.constexpr(-(-N // BLOCK_N))


@aggregate
class Pipeline:
    """Shared memory and mbarriers; use n of the ring has stage n % STAGES and phase (n // STAGES) & 1.

    Attributes:
        x: [STAGES, BLOCK_M, COLUMNS] ring of chunks of rows.
        w: [STAGES, BLOCK_N, COLUMNS] ring of chunks of weights.
        o: [CONSUMERS, OWN_ROWS, at most STORED_OUTPUTS] from which outputs are stored.
        full: mbarriers, one per stage: its bytes have arrived.
        empty: one per stage: both consumers have released it.
        started: the first consumer has multiplied SKEW chunks of its tile.
    """

    x: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    started: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, x, w, o, full, empty, started) -> None:
        self.x = x
        self.w = w
        self.o = o
        self.full = full
        self.empty = empty
        self.started = started


@gluon.jit(do_not_specialize=["num_rows"])
def persistent_linear(
    x_desc, w_desc, out_desc, bias, out, num_rows,
    N: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, SKEW: gl.constexpr, SPLITS: gl.constexpr, FLOAT32: gl.constexpr,
    GATED: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute all tiles; at most as many programs as there are tiles.

    Where GATED, half of the weight rows are of the gate and half of the up projection, so there are N / 2 outputs.

    Args:
        x_desc: [num_rows, K] in boxes of [BLOCK_M, COLUMNS].
        w_desc: [N, K], gate above up where GATED, in boxes of BLOCK_N rows and COLUMNS.
        out_desc: `out` in boxes of a consumer's rows and at most STORED_OUTPUTS; not read where FLOAT32.
        bias: [N]; where BIAS, which excludes FLOAT32 and GATED.
        out: [num_rows, N], or N / 2 where GATED; [1, num_rows, N] float32 where FLOAT32.
        num_rows: of x.
        BLOCK_M: rows of x per tile.
        BLOCK_N: rows of weights per tile.
        STAGES: chunks of rows and weights in shared memory.
        GROUP_M: tiles of rows that are computed for some weights before the next weights.
        SKEW: chunks by which the second consumer is behind the first; less than CHUNKS and STAGES.
        SPLITS: parts of the inner dimension whose sums are rounded to float32 and added in their order.
    """
    c = Constants(N, K, BLOCK_M, BLOCK_N, STAGES, GROUP_M, SKEW, SPLITS, FLOAT32, GATED, BIAS, PDL)
    if PDL:
        gdc_launch_dependents()
    pipe = make_pipeline(x_desc.dtype, c)
    # Registers per thread (setmaxnreg): 64 Ki per SM divided over the warp groups, in steps of 8.
    gl.warp_specialize([
        (consume, (pipe, out_desc, bias, out, num_rows, gl.constexpr(0), c)),
        (consume, (pipe, out_desc, bias, out, num_rows, gl.constexpr(1), c)),
        (produce, (pipe, x_desc, w_desc, num_rows, c)),
    ], [4, 1], [232, 40])  # fmt: skip


@gluon.jit
def make_pipeline(dtype: gl.constexpr, c):
    """Allocate shared memory and initialize the mbarriers."""
    x = make_tiles(dtype, c.STAGES, c.BLOCK_M, _COLUMNS)
    w = make_tiles(dtype, c.STAGES, c.BLOCK_N, _COLUMNS)
    o = x
    if not c.FLOAT32:
        o = make_tiles(dtype, _CONSUMERS, c.OWN_ROWS, stored_outputs(c))
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [c.STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [c.STAGES, 1], bar)
    started = gl.allocate_shared_memory(gl.int64, [1], bar)
    for s in gl.static_range(c.STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=_CONSUMERS)
    mbarrier.init(started, count=1)
    # The copies' proxy must see the barriers initialized.
    fence_async_shared()
    return Pipeline(x, w, o, full, empty, started)


@gluon.jit
def make_tiles(dtype: gl.constexpr, count: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    """Allocate tiles in the swizzled layout that WGMMA reads and TMA accesses."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return gl.allocate_shared_memory(dtype, [count, rows, columns], layout)


@gluon.constexpr_function
def stored_outputs(c):
    """Return how many outputs of a row are stored at once."""
    return min(c.COUNT, STORED_OUTPUTS)


@gluon.jit
def num_tiles(num_rows, c):
    """Return the number of tiles of all programs."""
    return (num_rows + c.BLOCK_M - 1) // c.BLOCK_M * c.COLUMN_TILES


@gluon.jit
def place_of(tile, num_rows, c):
    """Return the first row of a tile, and its index along the weights.

    GROUP_M tiles of rows have all weights one after the other. The tiles that are computed at once then have few
    different rows and weights, which stay in the second-level cache.
    """
    row_tiles = (num_rows + c.BLOCK_M - 1) // c.BLOCK_M
    group = tile // (c.GROUP_M * c.COLUMN_TILES)
    inside = tile % (c.GROUP_M * c.COLUMN_TILES)
    size = gl.minimum(row_tiles - group * c.GROUP_M, c.GROUP_M)
    row = group * c.GROUP_M + inside % size
    return row * c.BLOCK_M, inside // size


@gluon.jit
def produce(pipe, x_desc, w_desc, num_rows, c):
    """Copy the rows and weights of this program's tiles, as far ahead of the consumers as the ring allows."""
    EARLY: gl.constexpr = min(c.STAGES, c.CHUNKS * c.SPLITS) if c.PDL else 0
    first = gl.program_id(0)
    if c.PDL:
        # Weights do not depend on the kernel before.
        row, column = place_of(first, num_rows, c)
        for s in gl.static_range(EARLY):
            copy_weights(pipe, w_desc, s, column, s * _COLUMNS, c)
        gdc_wait()
        for s in gl.static_range(EARLY):
            copy_rows(pipe, x_desc, s, row, s * _COLUMNS)
    loaded = EARLY
    for tile in range(first, num_tiles(num_rows, c), gl.num_programs(0)):
        row, column = place_of(tile, num_rows, c)
        for i in range(gl.where(tile == first, EARLY, 0), c.CHUNKS * c.SPLITS):
            stage = loaded % c.STAGES
            mbarrier.wait(pipe.empty.index(stage), ((loaded // c.STAGES) & 1) ^ 1)
            copy_weights(pipe, w_desc, stage, column, i * _COLUMNS, c)
            copy_rows(pipe, x_desc, stage, row, i * _COLUMNS)
            loaded += 1


@gluon.jit
def copy_weights(pipe, w_desc, stage, tile, column, c):
    """Start to copy a chunk of weights to a stage; its mbarrier completes with the rows, which come after."""
    ITEM_BYTES: gl.constexpr = w_desc.dtype.primitive_bitwidth // 8
    full = pipe.full.index(stage)
    mbarrier.expect(full, (c.BLOCK_M + c.BLOCK_N) * _COLUMNS * ITEM_BYTES)
    target = pipe.w.index(stage)
    if c.GATED:
        box = target._reinterpret(w_desc.dtype, w_desc.block_type.shape, w_desc.layout)
        place = [tile * (c.BLOCK_N // 16), 0, 0, column]
        tma.async_copy_global_to_shared(w_desc, place, full, box)
    else:
        tma.async_copy_global_to_shared(w_desc, [tile * c.BLOCK_N, column], full, target)


@gluon.jit
def copy_rows(pipe, x_desc, stage, row, column):
    """Start to copy the same columns of a tile's rows; rows that do not exist are zeros."""
    full = pipe.full.index(stage)
    tma.async_copy_global_to_shared(x_desc, [row, column], full, pipe.x.index(stage))


@gluon.jit
def consume(pipe, out_desc, bias, out, num_rows, INDEX: gl.constexpr, c):
    """Compute the rows of consumer INDEX of this program's tiles."""
    used = 0
    for tile in range(gl.program_id(0), num_tiles(num_rows, c), gl.num_programs(0)):
        row, column = place_of(tile, num_rows, c)
        row += INDEX * c.OWN_ROWS
        if (INDEX == 1) & (c.SKEW > 0):
            mbarrier.wait(pipe.started, (tile // gl.num_programs(0)) & 1)
        acc = multiply(pipe, used, INDEX, c)
        used += c.CHUNKS
        if c.SPLITS > 1:
            total = acc
            for _ in range(1, c.SPLITS):
                total += multiply(pipe, used, INDEX, c)
                used += c.CHUNKS
            acc = total
        if c.FLOAT32:
            store_sums(acc, out, row, column, num_rows, c)
        else:
            store_outputs(pipe, out_desc, bias, acc, row, column, INDEX, c)
    tma.store_wait(0)


@gluon.jit
def multiply(pipe, used, INDEX: gl.constexpr, c):
    """Multiply CHUNKS chunks, from use number `used` of the ring on; returns [OWN_ROWS, BLOCK_N] float32."""
    layout: gl.constexpr = accumulator_layout(c.BLOCK_N)
    acc = gl.zeros([c.OWN_ROWS, c.BLOCK_N], gl.float32, layout=layout)
    if c.SKEW > 0:
        acc = multiply_chunks(pipe, acc, used, 0, c.SKEW, INDEX, c)
        if INDEX == 0:
            mbarrier.arrive(pipe.started, count=1)
    acc = multiply_chunks(pipe, acc, used, c.SKEW, c.CHUNKS, INDEX, c)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(pipe.empty.index((used + c.CHUNKS - 1) % c.STAGES), count=1)
    return acc


@gluon.jit
def multiply_chunks(
    pipe, acc, used, start: gl.constexpr, stop: gl.constexpr, INDEX: gl.constexpr, c
):
    """Issue the products of some chunks, and release all stages but the last."""
    dtype: gl.constexpr = pipe.x.dtype
    shape: gl.constexpr = [_CONSUMERS, c.OWN_ROWS, _COLUMNS]
    for i in range(start, stop):
        use = used + i
        stage = use % c.STAGES
        mbarrier.wait(pipe.full.index(stage), (use // c.STAGES) & 1)
        x = pipe.x.index(stage)._reinterpret(dtype, shape, pipe.x.layout).index(INDEX)
        acc = warpgroup_mma(x, pipe.w.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        # All products but the last have ended.
        before = (use + c.STAGES - 1) % c.STAGES
        mbarrier.arrive(pipe.empty.index(before), count=1, pred=i > 0)
    return acc


@gluon.jit
def store_sums(acc, out, row, column, num_rows, c):
    """Store float32 sums [OWN_ROWS, BLOCK_N]; four threads store 32 bytes of a row."""
    layout: gl.constexpr = accumulator_layout(c.BLOCK_N)
    mine = gl.arange(0, c.OWN_ROWS, layout=gl.SliceLayout(1, layout))
    output = column * c.BLOCK_N + gl.arange(0, c.BLOCK_N, layout=gl.SliceLayout(0, layout))
    exists = (row + mine < num_rows)[:, None]
    if c.WIDTH % c.BLOCK_N != 0:
        exists = exists & (output < c.WIDTH)[None, :]
    line = row.to(gl.int64)
    place = out + line * c.WIDTH + (mine[:, None] * c.WIDTH + output[None, :])
    gl.store(place, acc, mask=exists)


@gluon.jit
def store_outputs(pipe, out_desc, bias, acc, row, column, INDEX: gl.constexpr, c):
    """Gate sums or add the bias, round them, and start TMA stores, which drop rows and outputs that do not exist."""
    if c.BIAS:
        layout: gl.constexpr = accumulator_layout(c.BLOCK_N)
        output = column * c.BLOCK_N + gl.arange(0, c.BLOCK_N, layout=gl.SliceLayout(0, layout))
        added = gl.load(bias + output, mask=output < c.WIDTH, other=0.0)
        acc += added.to(gl.float32)[None, :]
    value = acc
    if c.GATED:
        value = gated(acc, c)
    first = column * c.COUNT
    if c.COUNT > _STORED_OUTPUTS:
        halves = gl.permute(gl.reshape(value, [c.OWN_ROWS, 2, c.COUNT // 2]), [0, 2, 1])
        left, right = gl.split(halves)
        store_box(pipe, out_desc, left, row, first, INDEX)
        store_box(pipe, out_desc, right, row, first + c.COUNT // 2, INDEX)
    else:
        store_box(pipe, out_desc, value, row, first, INDEX)


@gluon.jit
def gated(acc, c):
    """Compute silu(gate) * up within each thread: [OWN_ROWS, BLOCK_N] to [OWN_ROWS, BLOCK_N / 2]."""
    eights = gl.reshape(acc, [c.OWN_ROWS, c.BLOCK_N // 16, 2, 8])
    gate, up = gl.split(gl.permute(eights, [0, 1, 3, 2]))
    return gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, [c.OWN_ROWS, c.BLOCK_N // 2])


@gluon.jit
def store_box(pipe, out_desc, value, row, column, INDEX: gl.constexpr):
    """Store a consumer's rows of at most STORED_OUTPUTS outputs."""
    layout: gl.constexpr = accumulator_layout(value.shape[1])
    value = gl.convert_layout(value.to(pipe.o.dtype), layout, assert_trivial=True)
    # The store before must have read the memory; only the thread that issued it can wait.
    tma.store_wait(0)
    gl.thread_barrier()
    box = pipe.o.index(INDEX)
    box.store(value)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out_desc, [row, column], box)


class PersistentLinear:
    """A projection of many rows bound to its weights; it keeps their addresses, so they must not be replaced.

    For a batch-invariant problem a row has the same bits whatever the number of rows, those of `MatrixLinear`.

    The weights are [N, C], float16 or bfloat16, N and C multiples of 64; [2 * N, C], gate above up, where the problem
    is gated. A projection with a gate or for the residual stream has no bias.
    """

    def __init__(self, weights: "LinearWeights", problem: "LinearProblem") -> None:
        check_weights(weights, problem)
        self._weight, self._bias = weights.weight.numbers, weights.bias
        self._problem = problem
        stacked, inputs = self._weight.shape
        assert stacked % 64 == inputs % 64 == 0, self._weight.shape
        assert self._bias is None or not (problem.gated or problem.residual)
        self._num_sms = detect(self._weight.device).num_sms
        self._dtype = getattr(gl, str(self._weight.dtype).removeprefix("torch."))
        self._launches: dict[int, PersistentLaunch] = {}
        self._boxes: dict[int, TensorDescriptor] = {}

    def __call__(
        self,
        x: "Tensor",
        _choice: "LinearChoice",
        out: "Tensor | None",
        arguments: "LinearArguments",
    ) -> "Tensor":
        """Compute the projection.

        Args:
            x: [rows, C] contiguous, at least 1 row.
            out: [rows, outputs] contiguous; None allocates it. None for the residual stream.
            arguments: only `pdl` may be set; the kernel absorbs a gate and nothing else.

        Returns:
            [rows, outputs] in x's dtype; for the residual stream [1, rows, outputs] float32.
        """
        assert all(it is None for it in arguments[:3]), "it absorbs a gate alone"
        counted = rounded_rows(len(x))
        launch = self._launches.get(counted)
        if launch is None:
            launch = self._launches[counted] = plan_persistent(self._problem, counted)
        return self.run(x, launch, out, pdl=arguments.pdl)

    def run(
        self, x: "Tensor", launch: PersistentLaunch, out: "Tensor | None" = None, *, pdl: bool
    ) -> "Tensor":
        """Compute the projection with given tile sizes; arguments and result as for a call."""
        residual, rows = self._problem.residual, len(x)
        assert out is None or not residual
        stacked, inputs = self._weight.shape
        outputs = self._problem.outputs
        if residual:
            out = torch.empty((1, rows, outputs), dtype=torch.float32, device=x.device)
        elif out is None:
            out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
        x_boxes = self._describe(x, [launch.rows, COLUMNS])
        out_boxes = x_boxes
        if not residual:
            tile = launch.outputs // self._problem.matrices
            out_boxes = self._describe(out, [launch.rows // CONSUMERS, min(tile, STORED_OUTPUTS)])
        tiles = -(-rows // launch.rows) * -(-stacked // launch.outputs)
        persistent_linear[(min(tiles, self._num_sms),)](
            x_boxes, self._weight_boxes(launch.outputs), out_boxes, out if self._bias is None else self._bias,
            out, rows,
            N=stacked, K=inputs, BLOCK_M=launch.rows, BLOCK_N=launch.outputs, STAGES=launch.stages,
            GROUP_M=launch.group, SKEW=launch.skew, SPLITS=launch.splits, FLOAT32=residual,
            GATED=self._problem.gated, BIAS=self._bias is not None, num_warps=4, **dependent_launch(pdl),
        )  # fmt: skip
        return out

    def _describe(self, tensor: "Tensor", box: list[int]) -> TensorDescriptor:
        return TensorDescriptor(
            tensor, list(tensor.shape), [tensor.stride(0), 1], box, self._layout(box)
        )

    def _weight_boxes(self, outputs: int) -> TensorDescriptor:
        """Describe the weights in boxes of `outputs` rows, of which each thread block copies one at once."""
        found = self._boxes.get(outputs)
        if found is None:
            stacked, inputs = self._weight.shape
            shape, strides, box = [stacked, inputs], [inputs, 1], [outputs, COLUMNS]
            if self._problem.gated:
                # Eight rows of the gate, then the matching eight of the up projection.
                width = stacked // 2
                shape = [width // 8, 2, 8, inputs]
                strides = [8 * inputs, width * inputs, inputs, 1]
                box = [outputs // 16, 2, 8, COLUMNS]
            found = TensorDescriptor(self._weight, shape, strides, box, self._layout(box))
            self._boxes[outputs] = found
        return found

    def _layout(self, box: list[int]) -> gl.NVMMASharedLayout:
        return gl.NVMMASharedLayout.get_default_for(box, self._dtype)
