"""A linear layer of up to 256 rows on Hopper's tensor cores, with bulk copies of weights that start before the wait.

Such a step is bound by reading the weights, by the wait of each kernel for the one before, and with many rows by the
bandwidth of the second-level cache. A program computes 64 or 128 outputs of some rows over a part of the inner
dimension. It starts to copy weights, as many as shared memory holds, before it waits for the kernel whose output it
multiplies. It writes partial sums; the norm that follows adds them to the residual stream in a fixed order.

Weights in FP8 take half of the bytes. The tensor cores multiply only numbers of one dtype, so a thread loads its part
of a chunk to registers and converts it, exactly, while the chunk before is multiplied; the scales are applied to sums.
Weights of 4 bits, and FP8 with scales of groups, are converted likewise (`kernels.linear.gpu.matrix_groups`).
"""

from __future__ import annotations

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
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.dependent_launch import dependent_launch
from kernels.gpu.widen import widen
from kernels.linear.checks import check_weights
from kernels.linear.gpu.arrange import arrange
from kernels.linear.gpu.matrix_groups import (
    fetch_groups,
    load_factors,
    load_groups,
    multiply_fp8,
    multiply_groups,
    row_of_weights,
)
from kernels.linear.matrix_tiles import (
    MANY_ROWS,
    MOST_GROUPS_TILE,
    ROW_COUNTS,
    plan_invariant_matrix,
    plan_matrix,
)

if TYPE_CHECKING:
    from kernels.linear.problem import LinearProblem
    from kernels.linear.select import LinearChoice
    from kernels.linear.weights import LinearArguments, LinearWeights


@gluon.jit(do_not_specialize=["num_rows"])
def matrix_linear(
    x_desc, w_desc, bias, scale, shift, out, num_rows,
    N: gl.constexpr, K: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr, TALL: gl.constexpr,
    OFFSET: gl.constexpr, SHIFTED: gl.constexpr, OUTPUTS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, IN_PARTS: gl.constexpr, SPLITS: gl.constexpr, GATED: gl.constexpr,
    BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute some outputs of some rows over one part of the columns; program (rows, outputs, part).

    Where GATED, half of the weight rows are of the gate and half of the up projection, so there are N / 2 outputs.

    Args:
        x_desc: [num_rows, K] in boxes of [ROWS, COLUMNS].
        w_desc: [N, K], gate above up where GATED, in boxes of OUTPUTS rows and COLUMNS; two columns in a uint8 where
            BITS is 4.
        bias: [N]; where BIAS, which excludes IN_PARTS and GATED.
        scale: [N] float32 where GROUP is 0 and BITS 8; [N / TALL, K / GROUP], both rounded up, where GROUP is not 0.
        shift: as `scale`; where SHIFTED, of 4 bits alone.
        out: [num_rows, N], or N / 2 where GATED; [SPLITS, num_rows, N] float32 where IN_PARTS.
        num_rows: of x.
        BITS: 16; 8 for weights in FP8; 4 for integers.
        GROUP: columns with one scale, a multiple of 32 that divides COLUMNS or is divided by it, the latter where BITS
            is 8; 0 where a row has one.
        TALL: outputs with one scale of a group; 1 where BITS is 4.
        OFFSET: subtracted from a number; where BITS is 4.
        OUTPUTS: rows of weights per program, 16 for each of its warps.
        ROWS: rows of x per program, a power of two from 16 to 256.
        COLUMNS: columns that are multiplied at once.
        STAGES: boxes of weights in shared memory, and as many of rows.
    """
    CHUNKS: gl.constexpr = K // COLUMNS // SPLITS
    dtype: gl.constexpr = x_desc.dtype
    w_dtype: gl.constexpr = w_desc.dtype
    IN_BYTE: gl.constexpr = 2 if BITS == 4 else 1
    BYTES: gl.constexpr = COLUMNS // IN_BYTE
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUTPUTS, BYTES], w_dtype)
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    w = gl.allocate_shared_memory(w_dtype, [STAGES, OUTPUTS, BYTES], w_layout)
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
        expect_copies(w_desc, x_desc, full.index(s), w.index(s), x.index(s))
        copy_weights(w_desc, tile, first // IN_BYTE + s * BYTES, full.index(s), w.index(s), GATED)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    factors = ()
    if BITS == 8 and GROUP == 0:
        factors = (load_scales(scale, tile, layout, N, OUTPUTS, GATED),)  # type: ignore[assignment]
    if BITS == 8 and GROUP > 0:
        none = gl.zeros([OUTPUTS], gl.float32, layout=gl.SliceLayout(1, layout))
        loaded = load_factors(scale, tile, first, layout, N, K, GROUP, TALL, OUTPUTS, GATED)
        factors = (none, loaded)  # type: ignore[assignment]
    groups = ()
    if BITS == 4:
        fetch_groups(scale, tile, first, CHUNKS * COLUMNS, N, K, GROUP, OUTPUTS, GATED)
        if SHIFTED:
            fetch_groups(shift, tile, first, CHUNKS * COLUMNS, N, K, GROUP, OUTPUTS, GATED)
        for i in gl.static_range(2):
            column = gl.minimum(first + i * COLUMNS, K - COLUMNS)
            loaded = load_groups(
                scale, shift, tile, column, layout, N, K, GROUP, OUTPUTS, COLUMNS, GATED, SHIFTED
            )
            groups = groups + (loaded,)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
    for s in gl.static_range(STAGES):
        copy_rows(x_desc, first_row, first + s * COLUMNS, full.index(s), x.index(s))

    acc = gl.zeros([OUTPUTS, ROWS], gl.float32, layout=layout)
    if BITS == 8 and GROUP > 0:
        product = warpgroup_mma_init(acc)
    elif BITS < 16:
        acc = warpgroup_mma_init(acc)
    for i in range(CHUNKS):
        if BITS == 8 and GROUP > 0:
            then_column = gl.minimum(first + (i + 1) * COLUMNS, K - COLUMNS)
            loaded = load_factors(
                scale, tile, then_column, layout, N, K, GROUP, TALL, OUTPUTS, GATED
            )
            acc, product = multiply_fp8(w, x, full, acc, product, i, factors[0], layout)  # type: ignore[misc]
            factors = (factors[1], loaded)  # type: ignore[assignment,misc]
        elif BITS == 4:
            then_column = gl.minimum(first + (i + 2) * COLUMNS, K - COLUMNS)
            loaded = load_groups(
                scale,
                shift,
                tile,
                then_column,
                layout,
                N,
                K,
                GROUP,
                OUTPUTS,
                COLUMNS,
                GATED,
                SHIFTED,
            )
            acc = multiply_groups(w, x, full, acc, i, groups[0], layout, OFFSET, SHIFTED)  # type: ignore[misc]
            groups = (groups[1], loaded)  # type: ignore[assignment,misc]
        else:
            acc = multiply(w, x, full, acc, i, layout)
        following = i - 1 + STAGES
        # Only while chunks are left to copy do the warps wait for each other, so that the stage of the previous
        # products may be filled again.
        if (i > 0) & (following < CHUNKS):
            gl.thread_barrier()
            then = following % STAGES
            column = first + following * COLUMNS
            expect_copies(w_desc, x_desc, full.index(then), w.index(then), x.index(then))
            copy_weights(w_desc, tile, column // IN_BYTE, full.index(then), w.index(then), GATED)
            copy_rows(x_desc, first_row, column, full.index(then), x.index(then))
    if BITS == 8 and GROUP > 0:
        product = warpgroup_mma_wait(0, deps=(product,))
        acc = acc + product * factors[0][:, None]  # type: ignore[misc]
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    if BITS == 8 and GROUP == 0:
        acc = acc * factors[0][:, None]  # type: ignore[misc]
    store(acc, bias, out, first_row, tile, part, num_rows, N, OUTPUTS, ROWS, IN_PARTS, GATED, BIAS)
    # The store needs shared memory. Used after it, the barriers keep theirs.
    mbarrier.invalidate(full.index(0))


@gluon.jit
def expect_copies(w_desc, x_desc, full, w, x):
    """Announce the bytes of a stage's weights and rows."""
    w_bits: gl.constexpr = w.shape[0] * w.shape[1] * w_desc.dtype.primitive_bitwidth
    x_bits: gl.constexpr = x.shape[0] * x.shape[1] * x_desc.dtype.primitive_bitwidth
    mbarrier.expect(full, (w_bits + x_bits) // 8)


@gluon.jit
def copy_weights(w_desc, tile, column, full, target, GATED: gl.constexpr):
    """Start to copy a box of weights to shared memory."""
    OUTPUTS: gl.constexpr = target.shape[0]
    if GATED:
        box = target._reinterpret(target.dtype, w_desc.block_type.shape, w_desc.layout)
        place = [tile * (OUTPUTS // 16), 0, 0, column]
        tma.async_copy_global_to_shared(w_desc, place, full, box)
    else:
        tma.async_copy_global_to_shared(w_desc, [tile * OUTPUTS, column], full, target)


@gluon.jit
def copy_rows(x_desc, row, column, full, target):
    """Start to copy the same columns of ROWS rows; rows that do not exist are zeros."""
    tma.async_copy_global_to_shared(x_desc, [row, column], full, target)


@gluon.jit
def load_scales(
    scale, tile, layout: gl.constexpr, N: gl.constexpr, OUTPUTS: gl.constexpr, GATED: gl.constexpr
):
    """Load the scales of a program's rows of weights, [OUTPUTS] float32, in their order in shared memory."""
    row = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))
    return gl.load(scale + row_of_weights(row, tile, N, OUTPUTS, GATED))


@gluon.jit
def multiply(w, x, full, acc, i, layout: gl.constexpr):
    """Start the products of chunk `i`; those of the chunk before have ended then."""
    STAGES: gl.constexpr = w.shape[0]
    stage = i % STAGES
    mbarrier.wait(full.index(stage), i // STAGES & 1)
    rows = x.index(stage).permute((1, 0))
    if w.dtype != x.dtype:
        operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
        numbers = w.index(stage).load(operand)
        # The tensor cores may still read the registers of the last chunk's weights.
        acc = warpgroup_mma_wait(0, deps=(acc,))
        acc = warpgroup_mma(widen(numbers, x.dtype), rows, acc, is_async=True)
    else:
        acc = warpgroup_mma(w.index(stage), rows, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
    return acc


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

    The weights are [N, C], N and C multiples of 64; [2 * N, C], gate above up, where the problem is gated. They have
    the inputs' dtype, float16 or bfloat16, or are of 4 bits or in FP8 with scales. A projection with a gate or for the
    residual stream has no bias.
    """

    def __init__(self, weights: LinearWeights, problem: LinearProblem) -> None:
        check_weights(weights, problem)
        self._weight, self._scale = weights.weight.numbers, weights.weight.scale
        self._shift, self._bias = weights.weight.shift, weights.bias
        self._form = problem.format
        self._gated, self._in_parts = problem.gated, problem.residual
        stacked, inputs = weights.weight.shape
        assert stacked % 64 == inputs % 64 == 0, (stacked, inputs)
        assert self._bias is None or not (self._gated or self._in_parts)
        self._outputs = stacked // 2 if self._gated else stacked
        self._dtype = getattr(gl, problem.dtype)
        bits = problem.format.bits
        self._weight_dtype = {16: self._dtype, 8: gl.float8e4nv, 4: gl.uint8}[bits]
        self._shape = stacked, inputs
        if problem.batch_invariant:
            assert self._scale is None, "tiles are planned for weights in the inputs' dtype"
            self._launches = plan_invariant_matrix(stacked, inputs, may_split=self._in_parts)
        else:
            in_groups = self._form.float and self._form.group > 0
            most = MOST_GROUPS_TILE if in_groups else ROW_COUNTS[-1]
            self._launches = {
                rows: plan_matrix(
                    stacked, inputs, rows, may_split=self._in_parts, bits=bits, most_tile=most
                )
                for rows in ROW_COUNTS
            }
        shapes = {(it.outputs, it.columns) for it in self._launches.values()}
        self._boxes = {shape: self._weight_boxes(*shape) for shape in shapes}

    def __call__(
        self, x: Tensor, _choice: LinearChoice, out: Tensor | None, arguments: LinearArguments
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
        form = self._form
        if form.bits == 4:
            x = arrange(x, pdl=arguments.pdl)
        launch = self._launches[next((it for it in ROW_COUNTS if rows <= it), MANY_ROWS)]
        if self._in_parts:
            shape = (launch.splits, rows, self._outputs)
            out = torch.empty(shape, dtype=torch.float32, device=x.device)
        elif out is None:
            out = torch.empty((rows, self._outputs), dtype=x.dtype, device=x.device)
        box = [launch.rows, launch.columns]
        layout = gl.NVMMASharedLayout.get_default_for(box, self._dtype)
        stacked = self._shape[0]
        grid = (-(-rows // launch.rows), stacked // launch.outputs, launch.splits)
        absent = out
        matrix_linear[grid](
            TensorDescriptor(x, [rows, inputs], [x.stride(0), 1], box, layout),
            self._boxes[launch.outputs, launch.columns],
            *(absent if it is None else it for it in (self._bias, self._scale, self._shift)), out, rows,
            N=stacked, K=inputs, BITS=form.bits, GROUP=form.group,
            TALL=form.group if form.scales == "block" else 1, OFFSET=form.offset, SHIFTED=form.shifts,
            OUTPUTS=launch.outputs, ROWS=launch.rows, COLUMNS=launch.columns, STAGES=launch.stages(inputs),
            IN_PARTS=self._in_parts, SPLITS=launch.splits, GATED=self._gated, BIAS=self._bias is not None,
            num_warps=launch.outputs // 16, **dependent_launch(arguments.pdl),
        )  # fmt: skip
        return out

    def _weight_boxes(self, outputs: int, columns: int) -> TensorDescriptor:
        stacked, inputs = self._weight.shape
        columns //= self._shape[1] // inputs
        shape, strides, box = [stacked, inputs], [inputs, 1], [outputs, columns]
        if self._gated:
            # Eight rows of the gate, then the matching eight of the up projection, so that one thread holds both.
            shape = [self._outputs // 8, 2, 8, inputs]
            strides = [8 * inputs, self._outputs * inputs, inputs, 1]
            box = [outputs // 16, 2, 8, columns]
        layout = gl.NVMMASharedLayout.get_default_for(box, self._weight_dtype)
        return TensorDescriptor(self._weight, shape, strides, box, layout)
