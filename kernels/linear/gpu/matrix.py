"""A linear layer of 5 to 256 rows on Hopper's tensor cores, with bulk copies of weights that start before the wait.

Such a step is bound by reading the weights, by the wait of each kernel for the one before, and with many rows by the
bandwidth of the second-level cache. A program computes 64 or 128 outputs of some rows over a part of the inner
dimension. It starts to copy weights, as many as shared memory holds, before it waits for the kernel whose output it
multiplies. It writes partial sums; the norm that follows adds them to the residual stream in a fixed order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.dependent_launch import dependent_launch
from kernels.linear.matrix_tiles import (
    MANY_ROWS,
    ROW_COUNTS,
    plan_invariant_matrix,
    plan_matrix,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.linear.problem import LinearProblem
    from kernels.linear.select import LinearChoice
    from kernels.linear.weights import LinearArguments, LinearWeights


@gluon.jit(do_not_specialize=["num_rows"])
def matrix_linear(
    x_desc,
    w_desc,
    bias,
    out,
    num_rows,
    N: gl.constexpr,
    K: gl.constexpr,
    OUTPUTS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    IN_PARTS: gl.constexpr,
    SPLITS: gl.constexpr,
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute some outputs of some rows over one part of the columns; program (rows, outputs, part).

    Where GATED, half of the weight rows are of the gate and half of the up projection, so there are N / 2 outputs.

    Args:
        x_desc: [num_rows, K] in boxes of [ROWS, COLUMNS].
        w_desc: [N, K], gate above up where GATED, in boxes of OUTPUTS rows and COLUMNS.
        bias: [N]; where BIAS, which excludes IN_PARTS and GATED.
        out: [num_rows, N], or N / 2 where GATED; [SPLITS, num_rows, N] float32 where IN_PARTS.
        num_rows: of x.
        OUTPUTS: rows of weights per program, 16 for each of its warps.
        ROWS: rows of x per program, a power of two from 16 to 256.
        COLUMNS: columns that are multiplied at once.
        STAGES: boxes of weights in shared memory, and as many of rows.
    """
    CHUNKS: gl.constexpr = K // COLUMNS // SPLITS
    dtype: gl.constexpr = x_desc.dtype
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUTPUTS, COLUMNS], dtype)
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    w = gl.allocate_shared_memory(dtype, [STAGES, OUTPUTS, COLUMNS], w_layout)
    x = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], x_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    # The copies' proxy must see the barriers initialized.
    fence_async_shared()
    gl.thread_barrier()
    if PDL:
        gdc_launch_dependents()
    first_row = gl.program_id(0) * ROWS
    tile = gl.program_id(1)
    part = gl.program_id(2)
    first = part * (CHUNKS * COLUMNS)
    for s in gl.static_range(STAGES):
        expect_copies(w_desc, full.index(s), w.index(s), x.index(s), True)
        copy_weights(w_desc, tile, first + s * COLUMNS, full.index(s), w.index(s), True, GATED)
    if PDL:
        gdc_wait()
    for s in gl.static_range(STAGES):
        copy_rows(x_desc, first_row, first + s * COLUMNS, full.index(s), x.index(s), True)

    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=layout)
    # Only while chunks are left to copy do the warps wait for each other, so that a stage may be filled again.
    REFILLS: gl.constexpr = CHUNKS - STAGES + 1 if CHUNKS > STAGES else 0
    for i in range(REFILLS):
        acc = multiply(w, x, full, acc, i)
        # The stage that the previous products have read.
        gl.thread_barrier()
        following = i - 1 + STAGES
        then = following % STAGES
        column = first + following * COLUMNS
        expect_copies(w_desc, full.index(then), w.index(then), x.index(then), i > 0)
        copy_weights(w_desc, tile, column, full.index(then), w.index(then), i > 0, GATED)
        copy_rows(x_desc, first_row, column, full.index(then), x.index(then), i > 0)
    for i in range(REFILLS, CHUNKS):
        acc = multiply(w, x, full, acc, i)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    store(acc, bias, out, first_row, tile, part, num_rows, N, OUTPUTS, ROWS, IN_PARTS, GATED, BIAS)
    # The store needs shared memory. Used after it, the barriers keep theirs.
    mbarrier.invalidate(full.index(0))


@gluon.jit
def expect_copies(w_desc, full, w, x, pred):
    """Announce the bytes of a stage's weights and rows, if `pred`."""
    columns: gl.constexpr = w.shape[1] * w_desc.dtype.primitive_bitwidth // 8
    mbarrier.expect(full, (w.shape[0] + x.shape[0]) * columns, pred=pred)


@gluon.jit
def copy_weights(w_desc, tile, column, full, target, pred, GATED: gl.constexpr):
    """Start to copy a box of weights to shared memory, if `pred`."""
    OUTPUTS: gl.constexpr = target.shape[0]
    if GATED:
        box = target._reinterpret(target.dtype, w_desc.block_type.shape, w_desc.layout)
        place = [tile * (OUTPUTS // 16), 0, 0, column]
        tma.async_copy_global_to_shared(w_desc, place, full, box, pred=pred)
    else:
        tma.async_copy_global_to_shared(w_desc, [tile * OUTPUTS, column], full, target, pred=pred)


@gluon.jit
def copy_rows(x_desc, row, column, full, target, pred):
    """Start to copy the same columns of ROWS rows, if `pred`; rows that do not exist are zeros."""
    tma.async_copy_global_to_shared(x_desc, [row, column], full, target, pred=pred)


@gluon.jit
def multiply(w, x, full, acc, i):
    """Start the products of chunk `i`; those of the chunk before have ended then."""
    STAGES: gl.constexpr = w.shape[0]
    stage = i % STAGES
    mbarrier.wait(full.index(stage), i // STAGES & 1)
    acc = warpgroup_mma(w.index(stage), x.index(stage).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma_wait(1, deps=(acc,))


@gluon.jit
def gated(acc, OUTPUTS: gl.constexpr, ROWS: gl.constexpr):
    """Compute silu(gate) * up within each thread: [OUTPUTS, ROWS] to [OUTPUTS / 2, ROWS]."""
    eights = gl.reshape(acc, [OUTPUTS // 16, 2, 8, ROWS])
    gate, up = gl.split(gl.permute(eights, [0, 2, 3, 1]))
    return gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, [OUTPUTS // 2, ROWS])


@gluon.jit
def store(
    acc, bias, out, first_row, tile, part, num_rows, N: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr,
    IN_PARTS: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Store a program's result [OUTPUTS, ROWS]; neighbouring threads hold neighbouring outputs."""
    COUNT: gl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    WIDTH: gl.constexpr = N // 2 if GATED else N
    threads: gl.constexpr = [COUNT // 4, 128 // COUNT]
    layout: gl.constexpr = gl.BlockedLayout([4, 1], threads, [1, gl.num_warps()], [0, 1])
    output = tile * COUNT + gl.arange(0, COUNT, layout=gl.SliceLayout(1, layout))[:, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))[None, :]
    value = acc
    if GATED:
        value = gated(acc, OUTPUTS, ROWS)
    value = gl.convert_layout(value, layout)
    if BIAS:
        value += gl.load(bias + output).to(gl.float32)
    line = first_row.to(gl.int64)
    if IN_PARTS:
        line += part.to(gl.int64) * num_rows
    place = out + line * WIDTH + (row * WIDTH + output)
    gl.store(place, value.to(out.dtype.element_ty), mask=first_row + row < num_rows)


class MatrixLinear:
    """A projection bound to its weights; it keeps their addresses, so they must not be replaced.

    It computes up to 256 rows, and any number of them for a batch-invariant problem: a row then has the same bits
    whatever the number.

    The weights are [N, C], float16 or bfloat16, N and C multiples of 64; [2 * N, C], gate above up, where the problem
    is gated. A projection with a gate or for the residual stream has no bias.
    """

    def __init__(self, weights: LinearWeights, problem: LinearProblem) -> None:
        self._weight, self._bias, _ = weights
        self._gated, self._in_parts = problem.gated, problem.residual
        stacked, inputs = self._weight.shape
        assert stacked % 64 == inputs % 64 == 0, self._weight.shape
        assert self._bias is None or not (self._gated or self._in_parts)
        self._outputs = stacked // 2 if self._gated else stacked
        self._dtype = getattr(gl, str(self._weight.dtype).removeprefix("torch."))
        if problem.batch_invariant:
            self._launches = plan_invariant_matrix(stacked, inputs, may_split=self._in_parts)
        else:
            self._launches = {
                rows: plan_matrix(stacked, inputs, rows, may_split=self._in_parts)
                for rows in ROW_COUNTS
            }
        shapes = {(it.outputs, it.columns) for it in self._launches.values()}
        self._boxes = {shape: self._weight_boxes(*shape) for shape in shapes}

    def __call__(
        self,
        x: Tensor,
        _choice: LinearChoice,
        out: Tensor | None,
        arguments: LinearArguments,
    ) -> Tensor:
        """Compute the projection.

        Args:
            x: [rows, C] contiguous, at least 1 row.
            out: [rows, outputs] contiguous; None allocates it. None for the residual stream.
            arguments: only `pdl` may be set; the kernel absorbs a gate and nothing else.

        Returns:
            [rows, outputs] in x's dtype; for the residual stream [splits, rows, outputs] float32 partial sums.
        """
        assert all(it is None for it in arguments[:3]), "it absorbs a gate alone"
        assert out is None or not self._in_parts
        rows, inputs = x.shape
        launch = self._launches[next((it for it in ROW_COUNTS if rows <= it), MANY_ROWS)]
        if self._in_parts:
            shape = (launch.splits, rows, self._outputs)
            out = torch.empty(shape, dtype=torch.float32, device=x.device)
        elif out is None:
            out = torch.empty((rows, self._outputs), dtype=x.dtype, device=x.device)
        box = [launch.rows, launch.columns]
        stacked = self._weight.shape[0]
        grid = (-(-rows // launch.rows), stacked // launch.outputs, launch.splits)
        matrix_linear[grid](
            TensorDescriptor(x, [rows, inputs], [x.stride(0), 1], box, self._layout(box)),
            self._boxes[launch.outputs, launch.columns],
            out if self._bias is None else self._bias,
            out,
            rows,
            N=stacked,
            K=inputs,
            OUTPUTS=launch.outputs,
            ROWS=launch.rows,
            COLUMNS=launch.columns,
            STAGES=launch.stages(inputs),
            IN_PARTS=self._in_parts,
            SPLITS=launch.splits,
            GATED=self._gated,
            BIAS=self._bias is not None,
            num_warps=launch.outputs // 16,
            **dependent_launch(arguments.pdl),
        )
        return out

    def _weight_boxes(self, outputs: int, columns: int) -> TensorDescriptor:
        stacked, inputs = self._weight.shape
        shape, strides, box = [stacked, inputs], [inputs, 1], [outputs, columns]
        if self._gated:
            # Eight rows of the gate, then the matching eight of the up projection, so that one thread holds both.
            shape = [self._outputs // 8, 2, 8, inputs]
            strides = [8 * inputs, self._outputs * inputs, inputs, 1]
            box = [outputs // 16, 2, 8, columns]
        return TensorDescriptor(self._weight, shape, strides, box, self._layout(box))

    def _layout(self, box: list[int]) -> gl.NVMMASharedLayout:
        return gl.NVMMASharedLayout.get_default_for(box, self._dtype)
