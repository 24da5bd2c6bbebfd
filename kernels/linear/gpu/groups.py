"""A linear layer of at most 16 rows with 4-bit or FP8 weights whose scales are of groups, on any GPU with mma.sync.

A program computes 16 outputs, and its warps divide the columns. Each thread loads 16 adjacent bytes of a row of
weights, and the same columns of x; four threads load a chunk of 128 columns of 4 bits or 64 of FP8. It converts the
weights in registers by a few bit operations, and tensor cores multiply them. Which columns meet in one instruction does
not matter, so threads exchange nothing before the end. The first chunks of weights are loaded before the wait for the
kernel whose output is multiplied.

4-bit weights get scales and shifts as they are converted, rounded to the inputs' dtype, since arithmetic in float32
would take longer than the reads. FP8 is converted exactly; a chunk of it lies within a group, so its sums get the
scale.

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
from kernels.gpu.widen import widen
from kernels.linear import group_tiles
from kernels.linear.checks import check_linear, check_weights
from kernels.linear.group_tiles import plan_groups

if TYPE_CHECKING:
    from kernels.linear.problem import LinearProblem
    from kernels.linear.select import LinearChoice
    from kernels.linear.weights import LinearArguments, LinearWeights


BYTES = gl.constexpr(group_tiles.BYTES)
"""Of a row in a chunk, which four threads load at once."""


@gluon.constexpr_function
def _log2(size):
    return size.bit_length() - 1


@gluon.constexpr_function
def products_layout(warps):
    """Return the register layout of products [warp, 16, rows]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def weights_layout(warps):
    """Return the register layout of stored weights [warp, 16, BYTES]: four threads divide a row."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 8, 0]],
        [[0, 0, 16], [0, 0, 32], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1 << i, 0, 0] for i in range(_log2(warps))],
        [],
        [warps, 16, BYTES.value],
    )


@gluon.constexpr_function
def apart_layout(warps):
    """Return `weights_layout` with threads as a dimension, [warp, 16, 4, BYTES / 4]."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8], [0, 8, 0, 0]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[1 << i, 0, 0, 0] for i in range(_log2(warps))],
        [],
        [warps, 16, 4, BYTES.value // 4],
    )


@gluon.constexpr_function
def rows_layout(warps, rows, columns):
    """Return the register layout of x, [warp, columns, rows], in which a thread has the columns of its weights."""
    return gl.DistributedLinearLayout(
        [[0, 1 << i, 0] for i in range(_log2(columns // 4))] + [[0, 0, 8]] * (rows // 16),
        [[0, columns // 4, 0], [0, columns // 2, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        [[1 << i, 0, 0] for i in range(_log2(warps))],
        [],
        [warps, columns, rows],
    )


@gluon.jit(do_not_specialize=["num_rows"])
def group_linear(
    x, weight, scales, shifts, bias, residual, out, num_rows, x_stride, residual_stride, out_stride,
    N: gl.constexpr, K: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr, TALL: gl.constexpr, OFFSET: gl.constexpr,
    ROWS: gl.constexpr, AHEAD: gl.constexpr, GATED: gl.constexpr, SHIFTED: gl.constexpr, BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute 16 outputs of all rows; program (outputs).

    Args:
        x: [num_rows, K], contiguous in K.
        weight: [N, K * BITS / 8] uint8, of 8 bits FP8; [2 * N, ...], gate above up, where GATED.
        scales: [N or 2 * N, K / GROUP], both rounded up, the former divided by TALL.
        shifts: as `scales`; where SHIFTED, of 4 bits alone.
        bias: [N or 2 * N]; where BIAS.
        residual: [num_rows, N], contiguous in N; where RESIDUAL.
        out: [num_rows, N], contiguous in N.
        num_rows: of x, at most ROWS.
        BITS: 4 or 8.
        TALL: outputs that share a scale; 1 for 4 bits.
        OFFSET: subtracted from a number of 4 bits.
        ROWS: 8 or 16.
        AHEAD: chunks of weights that are loaded before the wait.
    """
    WARPS: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = BYTES * 8 // BITS
    STEPS: gl.constexpr = (K + COLUMNS * WARPS - 1) // (COLUMNS * WARPS)
    FIRST: gl.constexpr = AHEAD if AHEAD < STEPS else STEPS
    products: gl.constexpr = products_layout(WARPS)
    first = gl.program_id(0) * 16
    if PDL:
        gdc_launch_dependents()
    chunks = ()
    ups = ()
    for i in gl.static_range(FIRST):
        chunk = load_weights(weight, scales, shifts, first, 0, i, N, K, BITS, GROUP, TALL, SHIFTED)
        chunks = chunks + (chunk,)  # type: ignore[assignment]
        if GATED:
            up = load_weights(weight, scales, shifts, first, N, i, N, K, BITS, GROUP, TALL, SHIFTED)
            ups = ups + (up,)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
    none = gl.zeros([WARPS, 16, ROWS], gl.float32, layout=products)
    acc = (none, none)
    up_acc = acc
    for i in gl.static_range(STEPS):
        if i + FIRST < STEPS:
            chunk = load_weights(
                weight, scales, shifts, first, 0, i + FIRST, N, K, BITS, GROUP, TALL, SHIFTED
            )
            chunks = chunks + (chunk,)  # type: ignore[assignment]
            if GATED:
                up = load_weights(
                    weight, scales, shifts, first, N, i + FIRST, N, K, BITS, GROUP, TALL, SHIFTED
                )
                ups = ups + (up,)  # type: ignore[assignment]
        rows = load_rows(x, num_rows, x_stride, i, K, COLUMNS, ROWS)
        if BITS == 4:
            halves = operands(rows)
            acc = add_packed(acc, chunks[i], halves, OFFSET, SHIFTED)
            if GATED:
                up_acc = add_packed(up_acc, ups[i], halves, OFFSET, SHIFTED)
        else:
            whole = operand_of_rows(rows)
            acc = add_fp8(acc, chunks[i], whole)
            if GATED:
                up_acc = add_fp8(up_acc, ups[i], whole)

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
    weight, scales, shifts, first, above, step, N: gl.constexpr, K: gl.constexpr, BITS: gl.constexpr,
    GROUP: gl.constexpr, TALL: gl.constexpr, SHIFTED: gl.constexpr,
):  # fmt: skip
    """Load each warp's chunk of 16 rows of weights, with their scales and shifts, see `load_scales`.

    They are evicted from the caches first, since the step reads the rest of the model before it reads them again, and
    leave the first-level cache to x.
    """
    WARPS: gl.constexpr = gl.num_warps()
    EACH: gl.constexpr = BYTES // 4
    WIDTH: gl.constexpr = K * BITS // 8
    layout: gl.constexpr = weights_layout(WARPS)
    of_warp: gl.constexpr = gl.SliceLayout(2, layout)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, of_warp))[:, None, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, of_warp))[None, :, None]
    place = gl.arange(0, BYTES, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    column = (step * WARPS + warp) * BYTES + place
    line = (above + gl.minimum(first + row, N - 1)).to(gl.int64)
    pointer = gl.max_contiguous(weight + line * WIDTH + column, [1, 1, EACH])
    pointer = gl.multiple_of(pointer, [1, 1, EACH])
    if (step + 1) * WARPS * BYTES <= WIDTH:
        numbers = gl.load(pointer, eviction_policy="evict_first")
    else:
        is_column = gl.max_constancy((column < WIDTH) & (row >= 0), [1, 1, EACH])
        numbers = gl.load(pointer, mask=is_column, other=0, eviction_policy="evict_first")
    scale, shift = load_scales(scales, shifts, first, above, step, N, K, BITS, GROUP, TALL, SHIFTED)
    return numbers, scale, shift


@gluon.jit
def load_scales(
    scales, shifts, first, above, step, N: gl.constexpr, K: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr,
    TALL: gl.constexpr, SHIFTED: gl.constexpr,
):  # fmt: skip
    """Load scales and shifts of each warp's chunk: of 4 bits [warp, 16, 4], of each thread; of FP8 [warp, 16, 1]."""
    WARPS: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = BYTES * 8 // BITS
    COUNT: gl.constexpr = (K + GROUP - 1) // GROUP
    PARTS: gl.constexpr = 4 if BITS == 4 else 1
    of_parts: gl.constexpr = (
        gl.SliceLayout(3, apart_layout(WARPS)) if BITS == 4 else products_layout(WARPS)
    )
    of_them: gl.constexpr = gl.SliceLayout(2, of_parts)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, of_them))[:, None, None]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, of_them))[None, :, None]
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(1, of_parts)))[None, None, :]
    column = (step * WARPS + warp) * COLUMNS + part * (COLUMNS // PARTS)
    group = gl.minimum(column // GROUP, COUNT - 1)
    line = (above + gl.minimum(first + row, N - 1)).to(gl.int64)
    place = line // TALL * COUNT + group
    scale = gl.load(scales + place)
    shift = scale
    if SHIFTED:
        shift = gl.load(shifts + place)
    return scale, shift


@gluon.jit
def load_rows(
    x, num_rows, stride, step, K: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr
):
    """Load the columns of each warp's chunk of all rows, [warp, COLUMNS, ROWS]."""
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = rows_layout(WARPS, ROWS, COLUMNS)
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
    """Return the even and the odd columns of x as second operands, [warp, BYTES, ROWS] each.

    They are in the order in which `dequantize` returns the weights.
    """
    WARPS: gl.constexpr = numbers.shape[0]
    ROWS: gl.constexpr = numbers.shape[2]
    operand: gl.constexpr = gl.DotOperandLayout(1, products_layout(WARPS), 4)
    apart = gl.reshape(numbers, [WARPS, 4, BYTES // 16, 2, 2, 2, ROWS])
    even, odd = gl.split(gl.permute(apart, [0, 2, 1, 4, 3, 6, 5]))
    even = gl.convert_layout(gl.reshape(even, [WARPS, BYTES, ROWS]), operand)
    return even, gl.convert_layout(gl.reshape(odd, [WARPS, BYTES, ROWS]), operand)


@gluon.jit
def operand_of_rows(numbers):
    """Return the columns of x, [warp, BYTES, ROWS], as a second operand, in the order of `as_operand`."""
    WARPS: gl.constexpr = numbers.shape[0]
    ROWS: gl.constexpr = numbers.shape[2]
    operand: gl.constexpr = gl.DotOperandLayout(1, products_layout(WARPS), 4)
    apart = gl.reshape(numbers, [WARPS, 4, BYTES // 16, 4, ROWS])
    ordered = gl.reshape(gl.permute(apart, [0, 2, 1, 3, 4]), [WARPS, BYTES, ROWS])
    return gl.convert_layout(ordered, operand)


@gluon.jit
def as_operand(numbers):
    """Return converted weights [warp, 16, BYTES] as a first operand."""
    WARPS: gl.constexpr = numbers.shape[0]
    operand: gl.constexpr = gl.DotOperandLayout(0, products_layout(WARPS), 4)
    apart = gl.reshape(numbers, [WARPS, 16, 4, BYTES // 16, 4])
    ordered = gl.reshape(gl.permute(apart, [0, 1, 3, 2, 4]), [WARPS, 16, BYTES])
    return gl.convert_layout(ordered, operand)


@gluon.jit
def add_packed(acc, chunk, rows, OFFSET: gl.constexpr, SHIFTED: gl.constexpr):
    """Add the products of a chunk's lower and upper halves of bytes to two sums [warp, 16, ROWS]."""
    WARPS: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = rows[0].dtype
    apart: gl.constexpr = apart_layout(WARPS)
    numbers, scale, shift = chunk
    zeros = gl.zeros([WARPS, 16, 4, BYTES // 4], gl.int32, layout=apart)
    numbers = gl.convert_layout(gl.reshape(numbers, [WARPS, 16, 4, BYTES // 4]), apart)
    scales = twice(scale, dtype)[:, :, :, None] + zeros
    shifts = twice(shift, dtype)[:, :, :, None] + zeros
    low, high = dequantize(numbers, scales, shifts, dtype, OFFSET, SHIFTED)
    return mma_v2(as_operand(low), rows[0], acc[0]), mma_v2(as_operand(high), rows[1], acc[1])


@gluon.jit
def add_fp8(acc, chunk, rows):
    """Add the products of a chunk, which has a scale for each row, to the first of two sums [warp, 16, ROWS].

    The sums change places, so that additions to one need not wait for those of the chunk before.
    """
    WARPS: gl.constexpr = rows.shape[0]
    ROWS: gl.constexpr = rows.shape[2]
    numbers, scale, _ = chunk
    none = gl.zeros([WARPS, 16, ROWS], gl.float32, layout=products_layout(WARPS))
    product = mma_v2(as_operand(widen(numbers, rows.dtype)), rows, none)
    return acc[1], acc[0] + product * scale.to(gl.float32)


class GroupsLinear:
    """A linear layer of up to 16 rows bound to its quantized weights, which it reads in place at each call."""

    def __init__(self, weights: LinearWeights, problem: LinearProblem) -> None:
        check_weights(weights, problem)
        self._weight, self._bias = weights
        # GPUs without instructions for FP8 read no tensor of its dtype.
        self._numbers = self._weight.numbers.view(torch.uint8)
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
            x, self._numbers, weight.scale, weight.shift, self._bias, residual, out, problem.rows, x.stride(0),
            0 if residual is None else residual.stride(0), out.stride(0),
            N=problem.outputs, K=problem.inputs, BITS=form.bits, GROUP=form.group,
            TALL=form.group if form.scales == "block" else 1, OFFSET=form.offset, ROWS=launch.rows, AHEAD=launch.ahead,
            GATED=problem.gated, SHIFTED=form.shifts, BIAS=self._bias is not None,
            RESIDUAL=residual is not None, num_warps=launch.num_warps, **dependent_launch(pdl),
        )  # fmt: skip
        return out
