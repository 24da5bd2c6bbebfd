"""The weights of `kernels.linear.gpu.matrix` with scales by groups of columns, and their products.

Of 4 bits, a thread converts four adjacent bytes, since the columns of the rows are ordered before
(`kernels.linear.gpu.arrange`). Weights get their scales and shifts and are rounded to the inputs' dtype.

FP8 is converted exactly, and a chunk lies within a group, so its products have sums of their own, which get the scale
before those of the next chunk take their place.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.gpu.functions import LINE_BYTES
from kernels.gpu.unpack import dequantize, twice
from kernels.gpu.widen import widen


@gluon.jit
def row_of_weights(row, tile, N: gl.constexpr, OUTPUTS: gl.constexpr, GATED: gl.constexpr):
    """Return which rows of the weights a program's rows are, in their order in shared memory."""
    place = tile * OUTPUTS + row
    if GATED:
        place = row // 8 % 2 * (N // 2) + tile * (OUTPUTS // 2) + row // 16 * 8 + row % 8
    return place


@gluon.constexpr_function
def bytes_layout(products, outputs, groups, width):
    """Return the register layout of packed weights [outputs, groups, width].

    Of 16 bytes, a thread has four adjacent ones; its rows are those that it has in `products`, the result's layout.
    """
    bits = [[0, group, place] for group, place in _byte_places(groups, width)]
    warps = products.warps_per_cta[0]
    return gl.DistributedLinearLayout(
        [*bits[:2], [8, 0, 0], *bits[4:]],
        [*bits[2:4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16 << i, 0, 0] for i in range(warps.bit_length() - 1)],
        [],
        [outputs, groups, width],
    )


@gluon.constexpr_function
def _byte_places(groups, width):
    """Return group and place in it of bytes 1, 2, 4 and so on of [groups, width]."""
    count = (groups * width).bit_length() - 1
    return [((1 << i) // width, (1 << i) % width) for i in range(count)]


@gluon.jit
def load_groups(
    scale, shift, tile, column, layout: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    OUTPUTS: gl.constexpr, COLUMNS: gl.constexpr, GATED: gl.constexpr, SHIFTED: gl.constexpr,
):  # fmt: skip
    """Load scales and shifts of the chunk of 4-bit weights from a column on, [OUTPUTS, groups]."""
    COUNT: gl.constexpr = (K + GROUP - 1) // GROUP
    GROUPS: gl.constexpr = COLUMNS // GROUP if GROUP < COLUMNS else 1
    packed: gl.constexpr = bytes_layout(layout, OUTPUTS, GROUPS, COLUMNS // 2 // GROUPS)
    of_groups: gl.constexpr = gl.SliceLayout(2, packed)
    row = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, of_groups))[:, None]
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, of_groups))[None, :]
    place = row_of_weights(row, tile, N, OUTPUTS, GATED) * COUNT + (column // GROUP + group)
    if COUNT % GROUPS == 0:
        place = gl.multiple_of(gl.max_contiguous(place, [1, GROUPS]), [1, GROUPS])
    scales = gl.load(scale + place)
    shifts = scales
    if SHIFTED:
        shifts = gl.load(shift + place)
    return scales, shifts


@gluon.jit
def fetch_groups(
    scale, tile, column, COLUMNS: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    OUTPUTS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Prefetch the scales of a program's rows of 4-bit weights, of COLUMNS columns, to the second-level cache."""
    COUNT: gl.constexpr = (K + GROUP - 1) // GROUP
    LINE: gl.constexpr = LINE_BYTES // (scale.dtype.element_ty.primitive_bitwidth // 8)
    LINES: gl.constexpr = lines_of(COLUMNS // GROUP, LINE)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))[:, None]
    line = gl.arange(0, LINES, layout=gl.SliceLayout(0, layout))[None, :]
    group = gl.minimum(column // GROUP + line * LINE, COUNT - 1)
    place = row_of_weights(row, tile, N, OUTPUTS, GATED) * COUNT + group
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0",
        "=r,l",
        [scale + place],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def lines_of(count, line):
    """Return a power of two of cache lines that is enough for `count` numbers anywhere in them."""
    return 1 << (count // line + 1).bit_length()


@gluon.jit
def multiply_groups(
    w, x, full, acc, i, groups, layout: gl.constexpr, OFFSET: gl.constexpr, SHIFTED: gl.constexpr
):
    """Start the products of chunk `i` of 4-bit weights, whose scales are `groups`, when those before have ended."""
    STAGES: gl.constexpr = w.shape[0]
    OUTPUTS: gl.constexpr = w.shape[1]
    BYTES: gl.constexpr = w.shape[2]
    stage = i % STAGES
    scales, shifts = groups
    GROUPS: gl.constexpr = scales.shape[1]
    packed: gl.constexpr = bytes_layout(layout, OUTPUTS, GROUPS, BYTES // GROUPS)
    flat: gl.constexpr = bytes_layout(layout, OUTPUTS, 1, BYTES)
    mbarrier.wait(full.index(stage), i // STAGES & 1)
    rows = x.index(stage).permute((1, 0))
    numbers = w.index(stage).load(gl.SliceLayout(1, flat))
    numbers = gl.convert_layout(gl.reshape(numbers, [OUTPUTS, GROUPS, BYTES // GROUPS]), packed)
    zeros = gl.zeros([OUTPUTS, GROUPS, BYTES // GROUPS], gl.int32, layout=packed)
    dtype: gl.constexpr = x.dtype
    scales = twice(scales, dtype)[:, :, None] + zeros
    shifts = twice(shifts, dtype)[:, :, None] + zeros
    # The tensor cores may still read the registers of the last chunk's weights.
    acc = warpgroup_mma_wait(0, deps=(acc,))
    low, high = dequantize(numbers, scales, shifts, dtype, OFFSET, SHIFTED)
    apart = gl.reshape(gl.join(low, high), [OUTPUTS, BYTES // 16, 4, 2, 2, 2])
    weights = gl.reshape(gl.permute(apart, [0, 1, 5, 3, 2, 4]), [OUTPUTS, 2 * BYTES])
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, layout, 2))
    return warpgroup_mma(weights, rows, acc, is_async=True)


@gluon.jit
def load_factors(
    scale, tile, column, layout: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
    TALL: gl.constexpr, OUTPUTS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Load the scales of the chunk of FP8 weights from a column on, [OUTPUTS] float32."""
    COUNT: gl.constexpr = (K + GROUP - 1) // GROUP
    row = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))
    line = row_of_weights(row, tile, N, OUTPUTS, GATED) // TALL
    return gl.load(scale + line * COUNT + column // GROUP).to(gl.float32)


@gluon.jit
def multiply_fp8(w, x, full, acc, product, i, factors, layout: gl.constexpr):
    """Add the products of the chunk before, times `factors`, and start those of chunk `i` of FP8 weights."""
    STAGES: gl.constexpr = w.shape[0]
    stage = i % STAGES
    mbarrier.wait(full.index(stage), i // STAGES & 1)
    rows = x.index(stage).permute((1, 0))
    numbers = w.index(stage).load(gl.DotOperandLayout(0, layout, 2))
    # The tensor cores may still read the registers of the last chunk's weights, and write those of its products.
    product = warpgroup_mma_wait(0, deps=(product,))
    acc = add_scaled(acc, product, factors)
    weights = widen(numbers, x.dtype)
    return acc, warpgroup_mma(weights, rows, product, use_acc=False, is_async=True)


@gluon.jit
def add_scaled(acc, product, factors):
    """Return acc + product * factors, of sums [OUTPUTS, ROWS] and [OUTPUTS].

    Calls stay in their order among products: moved behind the start of the next ones, which write the same registers,
    they would make the compiler let these wait for each other.
    """
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;",
        "=f,f,f,f",
        [product, factors[:, None], acc],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )
