"""A linear layer of at most 16 rows with 4-bit weights, on any GPU with mma.sync.

A program computes 16 outputs, and its warps divide the columns. Each thread loads 32 adjacent columns of a row of
weights, 16 bytes with one scale, and the same columns of x; four threads load 128 columns. It converts the weights in
registers by a few bit operations, rounded to the inputs' dtype, since arithmetic in float32 would take longer than the
reads, and tensor cores multiply them. Which columns meet in one instruction does not matter, so threads exchange
nothing before the end. The first chunks of weights are loaded before the wait for the kernel whose output is
multiplied.

Sums are in float32, in an order that depends on the layer alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.dependent_launch import dependent_launch
from kernels.gpu.unpack import dequantize, twice
from kernels.linear import group_tiles
from kernels.linear.checks import check_linear, check_weights
from kernels.linear.group_tiles import plan_groups

if TYPE_CHECKING:
    from kernels.linear.problem import LinearProblem
    from kernels.linear.select import LinearChoice
    from kernels.linear.weights import LinearArguments, LinearWeights


COLUMNS = gl.constexpr(group_tiles.COLUMNS)
"""Of a chunk, which four threads load at once."""


@gluon.constexpr_function
def _log2(size):
    return size.bit_length() - 1


@gluon.constexpr_function
def products_layout(warps):
    """Return the register layout of products [warp, 16, rows]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def weights_layout(warps):
    """Return the register layout of packed weights [warp, 16, COLUMNS / 2]: four threads divide a row."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 8, 0]],
        [[0, 0, 16], [0, 0, 32], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1 << i, 0, 0] for i in range(_log2(warps))],
        [],
        [warps, 16, COLUMNS.value // 2],
    )


@gluon.constexpr_function
def apart_layout(warps):
    """Return `weights_layout` with threads as a dimension, [warp, 16, 4, COLUMNS / 8]."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8], [0, 8, 0, 0]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1 << i, 0, 0, 0] for i in range(_log2(warps))],
        [],
        [warps, 16, 4, COLUMNS.value // 8],
    )


@gluon.constexpr_function
def rows_layout(warps, rows):
    """Return the register layout of x, [warp, COLUMNS, rows], in which a thread has the columns of its weights."""
    return gl.DistributedLinearLayout(
        [[0, 1 << i, 0] for i in range(5)] + [[0, 0, 8]] * (rows // 16),
        [[0, 32, 0], [0, 64, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        [[1 << i, 0, 0] for i in range(_log2(warps))],
        [],
        [warps, COLUMNS.value, rows],
    )


@gluon.jit(do_not_specialize=["num_rows"])
def group_linear(
    x, weight, scales, shifts, bias, residual, out, num_rows, x_stride, residual_stride, out_stride,
    N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, OFFSET: gl.constexpr,
    ROWS: gl.constexpr, AHEAD: gl.constexpr, GATED: gl.constexpr, SHIFTED: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute 16 outputs of all rows; program (outputs).

    Args:
        x: [num_rows, K], contiguous in K.
        weight: [N, K / 2] uint8; [2 * N, K / 2], gate above up, where GATED.
        scales: [N or 2 * N, K / GROUP rounded up].
        shifts: as `scales`; where SHIFTED.
        bias: [N or 2 * N]; where BIAS.
        residual: [num_rows, N], contiguous in N; where RESIDUAL.
        out: [num_rows, N], contiguous in N.
        num_rows: of x, at most ROWS.
        ROWS: 8 or 16.
        AHEAD: chunks of weights that are loaded before the wait.
    """
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = (K + COLUMNS * WARPS - 1) // (COLUMNS * WARPS)
    FIRST: gl.constexpr = AHEAD if AHEAD < STEPS else STEPS
    products: gl.constexpr = products_layout(WARPS)
    first = gl.program_id(0) * 16
    if PDL:
        gdc_launch_dependents()
    chunks = ()
    ups = ()
    for i in gl.static_range(FIRST):
        chunks = chunks + (load_weights(weight, scales, shifts, first, 0, i, N, K, GROUP, SHIFTED),)  # type: ignore[assignment]
        if GATED:
            ups = ups + (load_weights(weight, scales, shifts, first, N, i, N, K, GROUP, SHIFTED),)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
    none = gl.zeros([WARPS, 16, ROWS], gl.float32, layout=products)
    acc = (none, none)
    up_acc = acc
    for i in gl.static_range(STEPS):
        if i + FIRST < STEPS:
            chunks = chunks + (  # type: ignore[assignment]
                load_weights(weight, scales, shifts, first, 0, i + FIRST, N, K, GROUP, SHIFTED),
            )
            if GATED:
                ups = ups + (  # type: ignore[assignment]
                    load_weights(weight, scales, shifts, first, N, i + FIRST, N, K, GROUP, SHIFTED),
                )
        rows = operands(load_rows(x, num_rows, x_stride, i, K, ROWS))
        acc = add_chunk(acc, chunks[i], rows, OFFSET, SHIFTED)
        if GATED:
            up_acc = add_chunk(up_acc, ups[i], rows, OFFSET, SHIFTED)

    result = gl.sum(acc[0] + acc[1], 0)
    output = (
        first + gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(0, products)))[:, None]
    )
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(0, products)))[None, :]
    exists = output < N
    if BIAS:
        result += gl.load(bias + output, mask=exists, other=0.0).to(gl.float32)
    if GATED:
        up = gl.sum(up_acc[0] + up_acc[1], 0)
        if BIAS:
            up += gl.load(bias + N + output, mask=exists, other=0.0).to(gl.float32)
        result = result / (1.0 + gl.exp(-result)) * up
    exists = exists & (row < num_rows)
    if RESIDUAL:
        result += gl.load(residual + row * residual_stride + output, mask=exists, other=0.0).to(
            gl.float32
        )
    gl.store(out + row * out_stride + output, result.to(out.dtype.element_ty), mask=exists)


@gluon.jit
def load_weights(
    weight, scales, shifts, first, above, step, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    SHIFTED: gl.constexpr,
):  # fmt: skip
    """Load each warp's chunk of 16 rows of weights, with scales and shifts [warp, 16, 4] of each thread.

    They are evicted from the caches first, since the step reads the rest of the model before it reads them again, and
    leave the first-level cache to x.
    """
    WARPS: gl.constexpr = gl.num_warps()
    EACH: gl.constexpr = COLUMNS // 8
    layout: gl.constexpr = weights_layout(WARPS)
    of_warp: gl.constexpr = gl.SliceLayout(2, layout)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, of_warp))[:, None, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, of_warp))[None, :, None]
    place = gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[
        None, None, :
    ]
    column = (step * WARPS + warp) * (COLUMNS // 2) + place
    line = (above + gl.minimum(first + row, N - 1)).to(gl.int64)
    pointer = gl.max_contiguous(weight + line * (K // 2) + column, [1, 1, EACH])
    pointer = gl.multiple_of(pointer, [1, 1, EACH])
    if (step + 1) * WARPS * COLUMNS <= K:
        numbers = gl.load(pointer, eviction_policy="evict_first")
    else:
        is_column = gl.max_constancy((column < K // 2) & (row >= 0), [1, 1, EACH])
        numbers = gl.load(pointer, mask=is_column, other=0, eviction_policy="evict_first")
    COUNT: gl.constexpr = (K + GROUP - 1) // GROUP
    of_threads: gl.constexpr = gl.SliceLayout(3, apart_layout(WARPS))
    of_them: gl.constexpr = gl.SliceLayout(2, of_threads)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, of_them))[:, None, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, of_them))[None, :, None]
    thread = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, of_threads)))[None, None, :]
    column = (step * WARPS + warp) * COLUMNS + thread * (COLUMNS // 4)
    group = gl.minimum(column // GROUP, COUNT - 1)
    place = (above + gl.minimum(first + row, N - 1)).to(gl.int64) * COUNT + group
    scale = gl.load(scales + place)
    shift = scale
    if SHIFTED:
        shift = gl.load(shifts + place)
    return numbers, scale, shift


@gluon.jit
def load_rows(x, num_rows, stride, step, K: gl.constexpr, ROWS: gl.constexpr):
    """Load the columns of each warp's chunk of all rows, [warp, COLUMNS, ROWS]."""
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = rows_layout(WARPS, ROWS)
    of_warp: gl.constexpr = gl.SliceLayout(2, layout)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, of_warp))[:, None, None]
    place = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, of_warp))[None, :, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    column = (step * WARPS + warp) * COLUMNS + place
    pointer = gl.max_contiguous(x + row * stride + column, [1, 8, 1])
    exists = (column < K) & (row < num_rows)
    if (step + 1) * WARPS * COLUMNS <= K:
        exists = (row < num_rows) & (column >= 0)
    exists = gl.max_constancy(exists, [1, COLUMNS // 4, 1])
    return gl.load(pointer, mask=exists, other=0.0)


@gluon.jit
def operands(numbers):
    """Return the even and the odd columns of x as second operands, [warp, COLUMNS / 2, ROWS] each.

    They are in the order in which `dequantize` returns the weights.
    """
    WARPS: gl.constexpr = numbers.shape[0]
    ROWS: gl.constexpr = numbers.shape[2]
    operand: gl.constexpr = gl.DotOperandLayout(1, products_layout(WARPS), 4)
    apart = gl.reshape(numbers, [WARPS, 4, COLUMNS // 32, 2, 2, 2, ROWS])
    even, odd = gl.split(gl.permute(apart, [0, 2, 1, 4, 3, 6, 5]))
    even = gl.convert_layout(gl.reshape(even, [WARPS, COLUMNS // 2, ROWS]), operand)
    return even, gl.convert_layout(gl.reshape(odd, [WARPS, COLUMNS // 2, ROWS]), operand)


@gluon.jit
def as_operand(numbers):
    """Return converted weights [warp, 16, COLUMNS / 2] as a first operand."""
    WARPS: gl.constexpr = numbers.shape[0]
    operand: gl.constexpr = gl.DotOperandLayout(0, products_layout(WARPS), 4)
    apart = gl.reshape(numbers, [WARPS, 16, 4, COLUMNS // 32, 4])
    ordered = gl.reshape(gl.permute(apart, [0, 1, 3, 2, 4]), [WARPS, 16, COLUMNS // 2])
    return gl.convert_layout(ordered, operand)


@gluon.jit
def add_chunk(acc, chunk, rows, OFFSET: gl.constexpr, SHIFTED: gl.constexpr):
    """Add the products of a chunk's lower and upper halves of bytes to two sums [warp, 16, ROWS]."""
    WARPS: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = rows[0].dtype
    apart: gl.constexpr = apart_layout(WARPS)
    numbers, scale, shift = chunk
    zeros = gl.zeros([WARPS, 16, 4, COLUMNS // 8], gl.int32, layout=apart)
    numbers = gl.convert_layout(gl.reshape(numbers, [WARPS, 16, 4, COLUMNS // 8]), apart)
    scales = twice(scale, dtype)[:, :, :, None] + zeros
    shifts = twice(shift, dtype)[:, :, :, None] + zeros
    low, high = dequantize(numbers, scales, shifts, dtype, OFFSET, SHIFTED)
    return mma_v2(as_operand(low), rows[0], acc[0]), mma_v2(as_operand(high), rows[1], acc[1])


class GroupsLinear:
    """A linear layer of up to 16 rows bound to its 4-bit weights, which it reads in place at each call."""

    def __init__(self, weights: LinearWeights, problem: LinearProblem) -> None:
        check_weights(weights, problem)
        self._weight, self._bias = weights
        self._form = problem.format

    def __call__(
        self, x: Tensor, choice: LinearChoice, out: Tensor | None, arguments: LinearArguments
    ) -> Tensor:
        """Compute x W^T + bias, gated or added to the residual stream; shapes as for `VectorLinear`."""
        norm, residual, best, pdl = arguments
        assert norm is None
        assert best is None
        check_linear(x, choice, out, arguments)
        problem, weight, form = choice.problem, self._weight, self._form
        if out is None:
            out = torch.empty((problem.rows, problem.outputs), dtype=x.dtype, device=x.device)
        launch = plan_groups(problem)
        group_linear[(-(-problem.outputs // 16),)](
            x, weight.numbers, weight.scale, weight.shift, self._bias, residual, out, problem.rows, x.stride(0),
            0 if residual is None else residual.stride(0), out.stride(0),
            N=problem.outputs, K=problem.inputs, GROUP=form.group, OFFSET=form.offset,
            ROWS=launch.rows, AHEAD=launch.ahead, GATED=problem.gated, SHIFTED=form.shifts,
            BIAS=self._bias is not None, RESIDUAL=residual is not None, num_warps=launch.num_warps,
            **dependent_launch(pdl),
        )  # fmt: skip
        return out
