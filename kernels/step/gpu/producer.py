"""The producer warps of the whole-step kernel: copy weights, keys and values to shared memory in the order of use.

The producer runs ahead of the consumers until the ring is full, also past the barriers at which they wait: weights
depend on no computation, and it copies only keys and values that earlier steps have written.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kernels.step.gpu.ring import keys_of, parts_of, scales_of, sent, wait_empty
from kernels.step.gpu.step_constants import (
    COLUMNS,
    DOWN,
    GATE_UP,
    OUTPUT,
    PRODUCER_WARPS,
    QKV,
    ROWS,
    attended,
    cache_of,
    first_key,
    first_tile,
    flying_of,
    head_element,
    key_range,
    matrix_of,
    parts_per_stage,
    parts_sent,
    projected_row,
    projected_tiles,
    scale_stride,
    stages_of,
    stored_size,
)


@gluon.jit
def produce(ring, table, head, positions, block_table, c):
    """Copy all weights, keys and values that this program reads in a step of one sequence."""
    position = gl.load(positions).to(gl.int32)
    produce_step(ring, table, head, position, position, block_table, c)


@gluon.jit
def produce_rows(ring, table, head, positions, earlier, block_table, columns, c):
    """Like `produce`, for a step of rows; their block tables have `columns` blocks each."""
    row, _, _, _ = attended(c)
    position = gl.load(positions + row).to(gl.int32)
    cached = position - gl.load(earlier + row)
    produce_step(ring, table, head, position, cached, block_table + row * columns, c)


@gluon.jit
def produce_step(ring, table, head, position, cached, block_table, c):
    """Copy weights, keys and values.

    `position`, the number of positions in the cache and `block_table` are of the row that this program attends.
    """
    dtype: gl.constexpr = ring.data.dtype
    QUERIES: gl.constexpr = c.HEADS * c.D
    HIDDEN: gl.constexpr = stored_size(c.HIDDEN, c.FP8_WEIGHTS)
    STRIDE: gl.constexpr = scale_stride(c.HIDDEN, c.FP8_WEIGHTS, c.PART_SCALES)
    used = 0
    table = computed_again(table)
    for layer in range(c.LAYERS):
        weight, scales = matrix_of(table, layer, QKV, dtype, c)
        for number in range(projected_tiles(c)):
            row = projected_row(number, c)
            place = weight + row * HIDDEN
            used = send_rows(
                ring,
                place,
                scales + row * STRIDE,
                ROWS - 1,
                used,
                c.HIDDEN,
                c.FLYING,
                c.FP8_WEIGHTS,
                c,
            )
        cache = cache_of(table, layer, dtype, c)
        seen = first_key(table, layer, position, c)
        used = send_keys(ring, cache, block_table, seen, position, cached, used, c)
        matrix = matrix_of(table, layer, OUTPUT, dtype, c)
        first = first_tile(layer, gl.constexpr(0), c)
        used = send_matrix(ring, matrix, first, used, c.HIDDEN, QUERIES, c.FLYING, c.FP8_WEIGHTS, c)
        weight, scales = matrix_of(table, layer, GATE_UP, dtype, c)
        first = first_tile(layer, c.HIDDEN // ROWS, c)
        for tile in range(first, c.INNER // ROWS, gl.num_programs(0)):
            place = weight + tile * ROWS * HIDDEN
            scale = scales + tile * ROWS * STRIDE
            used = send_rows(
                ring, place, scale, ROWS - 1, used, c.HIDDEN, c.FLYING, c.FP8_WEIGHTS, c
            )
            place += c.INNER * HIDDEN
            scale += c.INNER * STRIDE
            used = send_rows(
                ring, place, scale, ROWS - 1, used, c.HIDDEN, c.FLYING, c.FP8_WEIGHTS, c
            )
        matrix = matrix_of(table, layer, DOWN, dtype, c)
        first = first_tile(layer, (c.HIDDEN + c.INNER) // ROWS, c)
        used = send_matrix(ring, matrix, first, used, c.HIDDEN, c.INNER, c.FLYING, c.FP8_WEIGHTS, c)
    first = gl.program_id(0)
    used = send_matrix(
        ring, (head, head), first, used, c.VOCAB, c.HIDDEN, c.HEAD_FLYING, gl.constexpr(False), c
    )


@gluon.jit
def send_matrix(
    ring, matrix, first, used, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr, FLYING: gl.constexpr,
    FP8: gl.constexpr, c,
):  # fmt: skip
    """Copy this program's tiles of a matrix, from `first` on; rows past its end are copies of its last row.

    `matrix` is a result of `matrix_of`, of FP8 weights or others.
    """
    weight, scales = matrix
    UNITS: gl.constexpr = stored_size(INPUTS, FP8)
    STRIDE: gl.constexpr = scale_stride(INPUTS, FP8, c.PART_SCALES)
    for tile in range(first, (OUTPUTS + ROWS - 1) // ROWS, gl.num_programs(0)):
        place = weight + tile.to(gl.int64) * (ROWS * UNITS)  # type: ignore[attr-defined]
        last = ROWS - 1
        if OUTPUTS % ROWS > 0:
            last = gl.minimum(OUTPUTS - 1 - tile * ROWS, ROWS - 1)
        used = send_rows(
            ring, place, scales + tile * ROWS * STRIDE, last, used, INPUTS, FLYING, FP8, c
        )
    return used


@gluon.jit
def send_rows(
    ring, weight, scales, last, used, INPUTS: gl.constexpr, FLYING: gl.constexpr, FP8: gl.constexpr, c
):  # fmt: skip
    """Copy the rows from 0 to `last`, stage by stage; the stages' further rows are copies of the last one.

    A stage of FP8 weights gets the scales of its rows too.
    """
    AT_ONCE: gl.constexpr = flying_of(INPUTS, FLYING, FP8)
    UNITS: gl.constexpr = stored_size(INPUTS, FP8)
    FULL: gl.constexpr = UNITS // (COLUMNS * parts_per_stage(FP8))
    for i in range(FULL):
        stage = wait_empty(ring, used, c)
        send_parts(
            ring, stage, weight, i, last, UNITS, gl.constexpr(False), parts_per_stage(FP8), FP8
        )
        send_scales(ring, stage, scales, i, FP8, c)
        sent(ring, stage, AT_ONCE)
        used += 1
    if stages_of(INPUTS, FP8) > FULL:
        stage = wait_empty(ring, used, c)
        COUNT: gl.constexpr = parts_sent(INPUTS, FULL, c.OF_ROWS, FP8)
        send_parts(ring, stage, weight, FULL, last, UNITS, gl.constexpr(True), COUNT, FP8)
        send_scales(ring, stage, scales, FULL, FP8, c)
        sent(ring, stage, AT_ONCE)
        used += 1
    return used


@gluon.jit
def send_parts(
    ring, stage, weight, number, last, INPUTS: gl.constexpr, ENDS: gl.constexpr, COUNT: gl.constexpr,
    FP8: gl.constexpr,
):  # fmt: skip
    """Copy COUNT parts of ROWS rows, those of their stage `number`; zeros behind the rows' end if ENDS.

    A row has INPUTS stored numbers.
    """
    WIDE: gl.constexpr = 16 if FP8 else 8
    layout: gl.constexpr = gl.BlockedLayout(
        [1, WIDE], [WIDE // 8, 256 // WIDE], [PRODUCER_WARPS, 1], [1, 0]
    )
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    row = computed_again(row)
    row = gl.minimum(row, last)[:, None]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    parts = parts_of(ring, stage, FP8)
    for j in gl.static_range(COUNT):
        element = (number * parts_per_stage(FP8) + j) * COLUMNS + column
        place = gl.max_contiguous(weight + row * INPUTS + element, [1, WIDE])
        place = gl.multiple_of(place, [1, 16])
        if ENDS:
            exists = gl.max_constancy((element < INPUTS) & (row >= 0), [1, WIDE])
            async_copy.async_copy_global_to_shared(parts.index(j), place, mask=exists)
        else:
            async_copy.async_copy_global_to_shared(parts.index(j), place)


@gluon.jit
def computed_again(numbers):
    """Return int32 numbers or a pointer as a result that the compiler does not compute before this call.

    The producer's threads wait for their work with 24 registers. What depends on constants and the thread's number only
    would be computed before, and spilled.
    """
    POINTER: gl.constexpr = numbers.dtype.is_ptr()
    found = gl.inline_asm_elementwise(
        "mov.b64 $0, $1;" if POINTER else "mov.b32 $0, $1;",
        "=l,l" if POINTER else "=r,r",
        [numbers.to(gl.int64 if POINTER else gl.int32)],
        dtype=gl.int64 if POINTER else gl.int32,
        is_pure=False,
        pack=1,
    )
    return found.to(numbers.dtype)


@gluon.jit
def send_scales(ring, stage, scales, number, FP8: gl.constexpr, c):
    """Copy the scales of ROWS rows of FP8 weights, or those of their stage `number` of weights in groups."""
    if FP8 and c.PART_SCALES > 0:
        SIZE: gl.constexpr = parts_per_stage(FP8) * ROWS * c.PART_SCALES
        EACH: gl.constexpr = max(1, min(4, SIZE // (32 * PRODUCER_WARPS)))
        place = gl.arange(0, SIZE, layout=gl.BlockedLayout([EACH], [32], [PRODUCER_WARPS], [0]))
        place = gl.max_contiguous(scales + number * SIZE + place, EACH)
        async_copy.async_copy_global_to_shared(
            ring.scales.index(stage), gl.multiple_of(place, 4 * EACH)
        )
    elif FP8:
        row = gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [PRODUCER_WARPS], [0]))
        async_copy.async_copy_global_to_shared(ring.scales.index(stage), scales + row)


@gluon.jit
def send_keys(ring, cache, block_table, seen, position, cached, used, c):
    """Copy the cached keys and values of this program's head and splits, and zeros for those of the step's tokens.

    `cache` is a result of `cache_of`; `seen` is the first key that the row may see, `position` the last one, and
    `cached` how many positions the cache holds.
    """
    WIDE: gl.constexpr = 16 if c.FP8 and c.D % 32 == 0 else 8
    LANES: gl.constexpr = c.DP // WIDE
    layout: gl.constexpr = gl.BlockedLayout(
        [1, WIDE], [32 // LANES, LANES], [PRODUCER_WARPS, 1], [1, 0]
    )
    _, kv_head, _, split_group = attended(c)
    row = gl.arange(0, c.KEYS, layout=gl.SliceLayout(1, layout))
    column, in_head = head_element(gl.arange(0, c.DP, layout=gl.SliceLayout(0, layout)), c)
    scale_row = gl.arange(0, c.KEYS, layout=gl.BlockedLayout([1], [32], [PRODUCER_WARPS], [0]))
    _, first, _ = key_range(seen, position, split_group * c.LOCAL, c)
    _, _, last = key_range(seen, position, (split_group + 1) * c.LOCAL - 1, c)
    if split_group >= c.SPLIT_GROUPS:
        last = first
    for i in range(first, last):
        block, offset = place_of(block_table, i * c.KEYS + row, cached, c)
        line = block * c.BLOCK_SIZE + offset
        element = ((line * c.KV_HEADS + kv_head) * c.D)[:, None] + column[None, :]
        exists = in_head[None, :] & (i * c.KEYS + row < cached)[:, None]
        exists = gl.max_constancy(exists, [1, WIDE])
        scale_block, offset = place_of(block_table, i * c.KEYS + scale_row, cached, c)
        scale = (scale_block * c.KV_HEADS + kv_head) * c.BLOCK_SIZE + offset
        stage = wait_empty(ring, used, c)
        both = keys_of(ring, stage, c)
        for which in gl.static_range(2):
            numbers, scales = cache[which]
            place = gl.multiple_of(gl.max_contiguous(numbers + element, [1, WIDE]), [1, 16])
            async_copy.async_copy_global_to_shared(both.index(which), place, mask=exists)
            if c.FP8:
                target = scales_of(ring, stage, which, c)
                in_cache = i * c.KEYS + scale_row < cached
                async_copy.async_copy_global_to_shared(target, scales + scale, mask=in_cache)
        sent(ring, stage, c.FLYING)
        used += 1
    return used


@gluon.jit
def place_of(block_table, key, cached, c):
    """Return the cache blocks of keys, int64, and their offsets in these blocks.

    Keys that are not in the cache have the place of the last one that is.
    """
    key = gl.minimum(key, gl.maximum(cached, 1) - 1)
    return gl.load(block_table + key // c.BLOCK_SIZE).to(gl.int64), key % c.BLOCK_SIZE
