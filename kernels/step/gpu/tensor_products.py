"""Products of the whole-step kernel for one sequence on tensor cores: rows of weights by a vector in shared memory.

A product of 16 rows by 16 columns (m16n8k16) would be half empty: a tile has 8 rows. So each row is two rows of the
product, with half of the columns each, and the vector is two columns. A warp multiplies 32 of the 256 columns of a
part by one such product, its second operand has those columns of 4 parts, and each part has sums of its own:

    first halves of 8 rows     x    part 0: first half | second half | part 1: ...        used     | not used
    second halves                                                                         not used | used

The sums of part p are in columns 2 p and 2 p + 1 of its products.

Columns are numbered so that a thread reads 8 adjacent ones of a row, by one load without bank conflicts. Warps add
their sums through shared memory in a fixed order.

The vector has the model's dtype, and float16 for FP8 weights, which are converted to it exactly, two by an instruction.
From bfloat16 it is multiplied by 2^-4 first. Numbers from 2^-13 to 2^20 keep all bits of bfloat16 then; smaller ones
have an absolute error of up to 2^-21. Larger ones become infinite, as do the logits: the step reports no token.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.gpu.unpack import number_bias, number_unit, unpack
from kernels.step.gpu.ring import parts_of, release, row_scales, wait_full
from kernels.step.gpu.step_constants import (
    COLUMNS,
    CONSUMER_WARPS,
    INT4,
    LEAST_STAGES,
    PARTS,
    ROWS,
    WARP_SUMS,
    part_columns_log2,
    parts_in,
    parts_per_stage,
    stages_of,
    stored_dtype,
    stored_size,
)

VECTOR_EXPONENT = gl.constexpr(4)
"""A vector of a model in bfloat16 is divided by 2 to this power to become float16."""
WIDTH = gl.constexpr(PARTS.value * COLUMNS.value)
"""Columns of a second operand."""


@gluon.constexpr_function
def vector_dtype(dtype, fp8):
    """Return the dtype of a vector that is multiplied by weights in FP8 or not, of a model in `dtype`."""
    return gl.float16 if fp8 == 1 else dtype


@gluon.constexpr_function
def vector_factor(dtype, fp8):
    """Return the factor of a vector that is multiplied by weights in FP8 or not, of a model in `dtype`."""
    return 2.0**-VECTOR_EXPONENT.value if fp8 == 1 and dtype == gl.bfloat16 else 1.0


@gluon.jit
def as_vector(x, dtype: gl.constexpr, FP8: gl.constexpr):
    """Convert numbers to those of a vector that is multiplied by weights in FP8 or not, of a model in `dtype`.

    Numbers in bfloat16 are multiplied in bfloat16, which is exact: LLVM would exchange a product in float32 with the
    conversion to float16, whose range is smaller.
    """
    FACTOR: gl.constexpr = vector_factor(dtype, FP8)
    if FACTOR != 1.0:
        x = x * FACTOR
    return x.to(vector_dtype(dtype, FP8))


@gluon.constexpr_function
def column_places(fp8):
    """Return what each bit of a column's number in a part selects: (warp, half, inner index of the product)."""
    inner, warp = [(0, 0, 1 << i) for i in range(4)], [(1 << i, 0, 0) for i in range(3)]
    half = (0, 1, 0)
    if fp8 == INT4.value:
        # 32 columns, half of a warp's, share a scale. A thread has 4 adjacent bytes, in the order of `unpack`.
        return [inner[3], inner[0], inner[1], inner[2], half, *warp]
    # A thread has inner indices 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of both halves; bits 4 and 5 of bfloat16's columns,
    # and 3 and 6 of FP8's, select t: 16 threads of FP8 or 8 of bfloat16, with 4 or 2 rows, read different banks.
    if fp8:
        return [inner[0], inner[3], half, inner[1], warp[0], warp[1], inner[2], warp[2]]
    return [inner[0], inner[3], half, warp[0], inner[1], inner[2], warp[1], warp[2]]


@gluon.constexpr_function
def weights_operand(fp8):
    """Return the layout in which a part [ROWS, COLUMNS] in shared memory is the first operand [warp, 16, 16]."""
    columns = [[warp, ROWS.value * half, inner] for warp, half, inner in column_places(fp8)]
    first = part_columns_log2(fp8)
    rows = []
    for i in range(3):
        warp, row, inner = columns[first + i]
        rows.append([warp, row + (1 << i), inner])
    return gl.SharedLinearLayout([*columns, *rows])


@gluon.constexpr_function
def vector_numbers(size, fp8):
    """Return the elements of a vector that lie at places 1, 2, 4 and so on of shared memory, up to `size` elements.

    Two bits are added to others, so that reading the second operand takes no more cycles than its size does.
    """
    numbers = []
    place = 1
    while place < size:
        numbers.append(place)
        place *= 2
    if fp8 == INT4.value:
        numbers[:2] = [2, 1]
        added = {8: 1 << 5}
    else:
        added = {6: 1 << 4, 8: 1 << 5} if fp8 else {8: 1 << 3}
    return [number ^ added.get(i, 0) for i, number in enumerate(numbers)]


@gluon.constexpr_function
def elements(shape):
    """Return how many elements a tensor of one or two dimensions has."""
    return shape[0] * shape[1] if len(shape) == 2 else shape[0]


@gluon.constexpr_function
def vector_layout(shape, fp8):
    """Return the layout in shared memory of a vector that is seen in one or two dimensions."""
    numbers = vector_numbers(elements(shape), fp8)
    if len(shape) == 2:
        return gl.SharedLinearLayout([[it // shape[1], it % shape[1]] for it in numbers])
    return gl.SharedLinearLayout([[it] for it in numbers])


@gluon.constexpr_function
def vector_operand(fp8):
    """Return the layout in which WIDTH elements of a vector are the second operand [warp, 16, 8]."""
    places = [*column_places(fp8), (0, 2, 0), (0, 4, 0)]
    bases = []
    for number in vector_numbers(WIDTH.value, fp8):
        basis = [0, 0, 0]
        for i in range(len(places)):
            if number >> i & 1:
                warp, column, inner = places[i]
                basis = [basis[0] + warp, basis[1] + inner, basis[2] + column]
        bases.append(basis)
    return gl.SharedLinearLayout(bases)


@gluon.constexpr_function
def accumulators():
    """Return the register layout of products [warp, 16, 8]."""
    return gl.NVMMADistributedLayout([2, 0], [CONSUMER_WARPS.value, 1, 1], [1, 16, 8])


@gluon.jit
def part_of_vector(ring, number, SIZE: gl.constexpr, FP8: gl.constexpr, c):
    """View SIZE elements of the vector in shared memory, from `number` * SIZE on, in any layout."""
    dtype: gl.constexpr = vector_dtype(ring.x.dtype, FP8)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return ring.x._reinterpret(dtype, [c.INPUTS // SIZE, SIZE], flat).index(number)


@gluon.jit
def store_vector(ring, number, values, FP8: gl.constexpr, c):
    """Store elements of the vector that is multiplied next by weights in FP8 or not.

    `values` are [WIDTH] or [blocks, size], a power of two in all, of the model's dtype or float32; `number` of the
    same shape are before them.
    """
    if FP8 == INT4:
        store_halves(ring, number, values, c)
    else:
        store_whole(ring, number, values, FP8, c)


@gluon.jit
def store_halves(ring, number, values, c):
    """Store elements that 4-bit weights multiply: even ones in the first half of the memory, odd ones behind."""
    SIZE: gl.constexpr = elements(values.shape) // 2
    even, odd = gl.split(gl.reshape(values, in_pairs(values.shape)))
    store_whole(ring, number, even, INT4, c)
    store_whole(ring, number + c.INPUTS // 2 // SIZE, odd, INT4, c)


@gluon.constexpr_function
def in_pairs(shape):
    """Return the shape of pairs of adjacent elements."""
    return [*shape[:-1], shape[-1] // 2, 2]


@gluon.jit
def store_whole(ring, number, values, FP8: gl.constexpr, c):
    """Store elements as `store_vector`, in the order for the products."""
    dtype: gl.constexpr = ring.x.dtype
    layout: gl.constexpr = vector_layout(values.shape, FP8)
    view = part_of_vector(ring, number, elements(values.shape), FP8, c)
    target = view._reinterpret(vector_dtype(dtype, FP8), values.shape, layout)
    target.store(as_vector(values, dtype, FP8))


@gluon.jit
def no_products():
    """Return zeros for the products of a tile: for each of PARTS parts [warp, 16, 8] float32."""
    layout: gl.constexpr = accumulators()
    products = ()
    for _ in gl.static_range(PARTS):
        zeros = gl.zeros([CONSUMER_WARPS, 2 * ROWS, 8], gl.float32, layout=layout)
        products = products + (zeros,)  # type: ignore[assignment]
    return products


@gluon.jit
def multiply_groups(ring, used, INPUTS: gl.constexpr, TILES: gl.constexpr, FP8: gl.constexpr, c):
    """Multiply the next tiles of weights in groups by the vector in shared memory, as `multiply`.

    Their conversion takes so many instructions that these would not stay in a cache if tiles or stages were unrolled.
    Rows of many stages of FP8 release them by twos.
    """
    EACH: gl.constexpr = stages_of(INPUTS, FP8)
    COUNT: gl.constexpr = (stored_size(INPUTS, FP8) + COLUMNS - 1) // COLUMNS
    FULL: gl.constexpr = COUNT // PARTS
    FACTOR: gl.constexpr = 1.0 / vector_factor(ring.x.dtype, FP8)
    TWOS: gl.constexpr = twos_of_stages(EACH, FP8)
    REST: gl.constexpr = EACH - 2 * TWOS
    # All have read the sums before.
    gl.thread_barrier()
    for t in range(TILES):
        sums = gl.zeros([ROWS, WARP_SUMS], gl.float32, layout=packed_sums())
        if TWOS > 0:
            for m in range(TWOS):
                for n in range(4):
                    wait_full(ring, used + n // 2, c)
                    sums += of_groups(ring, 4 * m + n, used + n // 2, PARTS, FP8, c)
                release(ring, used, gl.constexpr(2), c)
                used += 2
        for n in range(4 * TWOS, FULL):
            wait_full(ring, used + n // 2 - 2 * TWOS, c)
            sums += of_groups(ring, n, used + n // 2 - 2 * TWOS, PARTS, FP8, c)
        if COUNT % PARTS > 0:
            LAST: gl.constexpr = FULL // 2 - 2 * TWOS
            wait_full(ring, used + LAST, c)
            sums += of_groups(ring, FULL, used + LAST, COUNT % PARTS, FP8, c)
        ring.sums.index(t).store(sums)
        release(ring, used, REST, c)
        used += REST
    totals = ()
    for t in gl.static_range(TILES):
        total = gl.sum(ring.sums.index(t).load(c.W), 1)
        if FACTOR != 1.0:
            total *= FACTOR
        totals = totals + (total,)  # type: ignore[assignment]
    return totals, used


@gluon.constexpr_function
def twos_of_stages(stages, fp8):
    """Return how many times two stages of ROWS rows of weights in groups are released before the others."""
    return (stages - 1) // 2 if fp8 != INT4.value and stages > LEAST_STAGES.value else 0


@gluon.jit
def of_groups(ring, number, used, COUNT: gl.constexpr, FP8: gl.constexpr, c):
    """Return the sums of COUNT parts, from part `number` * PARTS of their rows on, [ROWS, WARP_SUMS]."""
    if FP8 == INT4:
        sums = of_packed(ring, number, used, COUNT, c)
    else:
        sums = of_fp8(ring, number, used, COUNT, FP8, c)
    return gl.convert_layout(gl.reshape(sums, [ROWS, WARP_SUMS]), packed_sums())


@gluon.jit
def of_fp8(ring, number, used, COUNT: gl.constexpr, FP8: gl.constexpr, c):
    """Return the sums of COUNT parts of FP8 weights, times their scales, [ROWS, CONSUMER_WARPS, PARTS].

    A warp's columns of a part are in one group, so a scale is that of a sum.
    """
    start = number % 2 * PARTS
    products = parts_of_stage(ring, no_products(), number, start, used, COUNT, FP8, c)
    left, right = halves_of_warps(sums_by_part(products))
    scale, _ = group_scales(ring, used, number % 2, left, c)
    return (left + right) * scale.to(gl.float32, bitcast=True)


@gluon.jit
def of_packed(ring, number, used, COUNT: gl.constexpr, c):
    """Return the sums of COUNT parts of 4-bit weights, as `of_fp8`.

    The numbers are multiplied as they are converted, and a group's sum gets scale and shift:

        sum of ((n - offset) * scale + shift) * x = scale * sum(m * x) + (shift - (bias + offset) * scale) * sum(x)

    with m = n + bias, in units of 1 or 2^-24. The sum of x is a product by ones.
    """
    dtype: gl.constexpr = ring.x.dtype
    first: gl.constexpr = gl.DotOperandLayout(0, accumulators(), 2)
    second: gl.constexpr = gl.DotOperandLayout(1, accumulators(), 2)
    ODD: gl.constexpr = c.INPUTS // WIDTH // 2
    parts = parts_of(ring, used % c.STAGES, INT4)
    start = number % 2 * PARTS
    even = part_of_vector(ring, number, WIDTH, INT4, c)
    even = even._reinterpret(dtype, [CONSUMER_WARPS, 16, 8], vector_operand(INT4)).load(second)
    odd = part_of_vector(ring, number + ODD, WIDTH, INT4, c)
    odd = odd._reinterpret(dtype, [CONSUMER_WARPS, 16, 8], vector_operand(INT4)).load(second)
    none = gl.zeros([CONSUMER_WARPS, 2 * ROWS, 8], gl.float32, layout=accumulators())
    ones = gl.full([CONSUMER_WARPS, 2 * ROWS, 16], 1.0, dtype, layout=first)
    loaded = ()
    for j in gl.static_range(COUNT):
        loaded = loaded + (parts.index(start + j).load(whole_layout()),)  # type: ignore[assignment]
    products = ()
    for j in gl.static_range(PARTS):
        product = none
        if j < COUNT:
            low, high = unpack(loaded[j], dtype)
            product = mma_v2(packed_operand(low, first), even, none)
            product = mma_v2(packed_operand(high, first), odd, product)
        products = products + (product,)  # type: ignore[assignment]
    of_x = mma_v2(ones, odd, mma_v2(ones, even, none))
    left, right = halves_of_warps(sums_by_part(products))
    x_left, x_right = halves_of_warps(of_x)
    if COUNT < PARTS:
        # Behind the vector the memory may hold anything.
        layout: gl.constexpr = x_left.type.layout
        part = gl.arange(0, PARTS, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[
            None, None, :
        ]
        x_left = gl.where(part < COUNT, x_left, 0.0)
        x_right = gl.where(part < COUNT, x_right, 0.0)
    both, right_both = group_scales(ring, used, number % 2, left, c)
    scale, zero = scale_and_summand(both, dtype, c)
    right_scale, right_zero = scale_and_summand(right_both, dtype, c)
    return left * scale + right * right_scale + (x_left * zero + x_right * right_zero)


@gluon.jit
def group_scales(ring, used, half, like, c):
    """Return the packed scales of each warp's first half of columns of each part, then of the second halves.

    All are [ROWS, CONSUMER_WARPS, PARTS] in the layout of `like`; `half` is that of the stage in use number `used`.
    """
    GROUPS: gl.constexpr = c.PART_SCALES
    EACH: gl.constexpr = CONSUMER_WARPS // GROUPS if GROUPS < CONSUMER_WARPS else 1
    layout: gl.constexpr = like.type.layout
    stage = ring.scales.index(used % c.STAGES)
    if GROUPS > CONSUMER_WARPS:
        shape: gl.constexpr = [4, ROWS, CONSUMER_WARPS, PARTS]
        view = stage._reinterpret(gl.int32, shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
        both = view.index(half * 2).load(layout)
        right_both = view.index(half * 2 + 1).load(layout)
    else:
        halves: gl.constexpr = [2, ROWS, GROUPS, PARTS]
        view = stage._reinterpret(gl.int32, halves, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
        apart = gl.reshape(like, [ROWS, GROUPS, EACH, PARTS])
        apart_layout: gl.constexpr = apart.type.layout
        both = view.index(half).load(gl.SliceLayout(2, apart_layout))
        zeros = gl.zeros([ROWS, GROUPS, EACH, PARTS], gl.int32, layout=apart_layout)
        both = gl.reshape(both[:, :, None, :] + zeros, [ROWS, CONSUMER_WARPS, PARTS])
        both = gl.convert_layout(both, layout)
        right_both = both
    return both, right_both


@gluon.jit
def scale_and_summand(both, dtype: gl.constexpr, c):
    """Return the factors of a group's products and of its sum of x, from a scale of `kernels.step.packed_scales`."""
    if c.WEIGHT_SHIFTS:
        scale = (both & 0xFFFF).to(gl.uint16).to(dtype, bitcast=True).to(gl.float32)
        shift = ((both >> 16) & 0xFFFF).to(gl.uint16).to(dtype, bitcast=True).to(gl.float32)
        zero = shift - scale * (number_bias(dtype) + c.WEIGHT_OFFSET)
    else:
        scale = both.to(gl.float32, bitcast=True)
        zero = scale * (-number_bias(dtype) - c.WEIGHT_OFFSET)
    return scale * number_unit(dtype), zero


@gluon.constexpr_function
def packed_sums():
    """Return the register layout of sums of 4-bit weights, [ROWS, WARP_SUMS]: those of warps, of 4 parts each."""
    return gl.BlockedLayout([1, 1], [ROWS.value, PARTS.value], [1, CONSUMER_WARPS.value], [1, 0])


@gluon.constexpr_function
def whole_layout():
    """Return `packed_layout` without groups, [ROWS, COLUMNS]."""
    places = [[0, 1 << i] for i in range(8)]
    return gl.DistributedLinearLayout(
        [*places[:2], places[4]],
        [*places[2:4], [1, 0], [2, 0], [4, 0]],
        places[5:],
        [],
        [ROWS.value, COLUMNS.value],
    )


@gluon.jit
def packed_operand(weights, layout: gl.constexpr):
    """Return converted weights of a part as a first operand, [warp, 16, 16]."""
    apart = gl.reshape(weights, [ROWS, CONSUMER_WARPS, 2, 4, 2, 2])
    ordered = gl.permute(apart, [1, 2, 0, 4, 3, 5])
    return gl.convert_layout(gl.reshape(ordered, [CONSUMER_WARPS, 2 * ROWS, 16]), layout)


@gluon.jit
def add_stage(ring, products, number, used, COUNT: gl.constexpr, FP8: gl.constexpr, c):
    """Add the products of a tile's stage `number`, which has COUNT parts."""
    AT_ONCE: gl.constexpr = parts_per_stage(FP8) // PARTS
    sums = products
    for i in gl.static_range((COUNT + PARTS - 1) // PARTS):
        sums = parts_of_stage(
            ring, sums, number * AT_ONCE + i, i * PARTS, used, min(PARTS, COUNT - i * PARTS), FP8, c
        )
    return sums


@gluon.jit
def parts_of_stage(ring, sums, number, start, used, COUNT: gl.constexpr, FP8: gl.constexpr, c):
    """Add the products of COUNT parts, at most PARTS, of a stage from `start` on by the WIDTH elements `number`."""
    dtype: gl.constexpr = vector_dtype(ring.x.dtype, FP8)
    stored: gl.constexpr = stored_dtype(ring.data.dtype, FP8)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first: gl.constexpr = gl.DotOperandLayout(0, accumulators(), 2)
    second: gl.constexpr = gl.DotOperandLayout(1, accumulators(), 2)
    parts = ring.data.index(used % c.STAGES)._reinterpret(
        stored, [parts_per_stage(FP8), ROWS * COLUMNS], flat
    )
    x = part_of_vector(ring, number, WIDTH, FP8, c)
    x = x._reinterpret(dtype, [CONSUMER_WARPS, 16, 8], vector_operand(FP8)).load(second)
    added = ()
    for j in gl.static_range(PARTS):
        if j < COUNT:
            part = parts.index(start + j)
            weights = part._reinterpret(
                stored, [CONSUMER_WARPS, 2 * ROWS, 16], weights_operand(FP8)
            ).load(first)
            added = added + (mma_v2(weights.to(dtype), x, sums[j]),)  # type: ignore[assignment]
        else:
            added = added + (sums[j],)  # type: ignore[assignment]
    return added


@gluon.jit
def multiply(ring, used, INPUTS: gl.constexpr, TILES: gl.constexpr, FP8: gl.constexpr, c):
    """Multiply the next tiles of weights by the vector in shared memory; returns TILES tensors of [ROWS] float32."""
    if FP8 and c.PART_SCALES > 0:
        totals, used = multiply_groups(ring, used, INPUTS, TILES, FP8, c)
    else:
        totals, used = multiply_whole(ring, used, INPUTS, TILES, FP8, c)
    return totals, used


@gluon.jit
def multiply_whole(ring, used, INPUTS: gl.constexpr, TILES: gl.constexpr, FP8: gl.constexpr, c):
    """Multiply the next tiles of weights of 16 bits or in FP8, as `multiply`."""
    EACH: gl.constexpr = stages_of(INPUTS, FP8)
    ALL: gl.constexpr = TILES * EACH
    scales = ()
    tiles = ()
    if c.STAGES // 2 >= ALL:
        # All are released at once.
        for i in gl.static_range(ALL):
            if i % 2 == 0:
                for k in gl.static_range(min(2, ALL - i)):
                    wait_full(ring, used + i + k, c)
            if i % EACH == 0:
                scales = scales + (row_scales(ring, used + i, FP8, c),)  # type: ignore[assignment]
                products = no_products()
            products = add_stage(
                ring, products, i % EACH, used + i, parts_in(INPUTS, i % EACH, FP8), FP8, c
            )
            if i % EACH == EACH - 1:
                tiles = tiles + (products,)  # type: ignore[assignment]
        totals = sums_of_warps(ring, tiles, scales, used, ALL, FP8, c)
        used += ALL
    else:
        TIMES: gl.constexpr = (EACH - 1) // 2
        REST: gl.constexpr = EACH - 2 * TIMES
        for t in gl.static_range(TILES):
            products = no_products()
            for n in range(TIMES):
                for i in gl.static_range(2):
                    wait_full(ring, used + i, c)
                for i in gl.static_range(2):
                    products = add_stage(
                        ring, products, 2 * n + i, used + i, parts_per_stage(FP8), FP8, c
                    )
                release(ring, used, gl.constexpr(2), c)
                used += 2
            for i in gl.static_range(REST):
                wait_full(ring, used + i, c)
            scales = scales + (row_scales(ring, used, FP8, c),)  # type: ignore[assignment]
            for i in gl.static_range(REST):
                products = add_stage(
                    ring, products, 2 * TIMES + i, used + i, parts_in(INPUTS, 2 * TIMES + i, FP8), FP8, c
                )  # fmt: skip
            tiles = tiles + (products,)  # type: ignore[assignment]
            if t + 1 < TILES:
                release(ring, used, REST, c)
                used += REST
        totals = sums_of_warps(ring, tiles, scales, used, REST, FP8, c)
        used += REST
    return totals, used


@gluon.jit
def sums_of_warps(ring, tiles, scales, used, COUNT: gl.constexpr, FP8: gl.constexpr, c):
    """Add the warps' products of each tile, [ROWS] each, and release COUNT stages from use number `used` on."""
    FACTOR: gl.constexpr = 1.0 / vector_factor(ring.x.dtype, FP8)
    # All have read the sums before.
    gl.thread_barrier()
    for t in gl.static_range(len(tiles)):
        store_sums(ring, t, tiles[t])
    release(ring, used, COUNT, c)
    totals = ()
    for t in gl.static_range(len(tiles)):
        total = gl.sum(ring.sums.index(t).load(c.W), 1)
        if FP8 == 1:
            total *= scales[t] * FACTOR
        totals = totals + (total,)  # type: ignore[assignment]
    return totals


@gluon.jit
def store_sums(ring, t, products):
    """Store each warp's sums of tile `t`."""
    first, second = halves_of_warps(sums_by_part(products))
    ring.sums.index(t).store(gl.reshape(first + second, [ROWS, WARP_SUMS]))


@gluon.jit
def sums_by_part(products):
    """Return [warp, 16, 8] with the sums of part p, of all parts' `products`, in columns 2 p and 2 p + 1."""
    layout: gl.constexpr = accumulators()
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    sums = products[0]
    for p in gl.static_range(1, PARTS):
        sums = gl.where(column // 2 == p, products[p], sums)
    return sums


@gluon.jit
def halves_of_warps(sums):
    """Return the sums of the first and the second halves of each warp's columns, [ROWS, CONSUMER_WARPS, PARTS]."""
    halves = gl.reshape(sums, [CONSUMER_WARPS, 2, ROWS, PARTS, 2])
    left, right = gl.split(gl.permute(halves, [2, 0, 3, 1, 4]))
    first, _ = gl.split(left)
    _, second = gl.split(right)
    return first, second


@gluon.constexpr_function
def tensor_tiles_at_once(inputs, fp8, stages, wanted):
    """Return how many tiles the next call of `multiply` multiplies: `wanted` at most, and half of the ring."""
    return max(1, min(wanted, stages // 2 // stages_of(inputs, fp8)))
