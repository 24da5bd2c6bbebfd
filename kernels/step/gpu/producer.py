"""The producer warps of the whole-step kernel: copy weights, keys and values to shared memory in the order of use.

The producer runs ahead of the consumers until the ring is full, also past the barriers at which they wait: weights
depend on no computation, and it copies only keys and values that earlier steps have written.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kernels.step.gpu.ring import (
    COLUMNS,
    DOWN,
    GATE_UP,
    OUTPUT,
    PRODUCER_WARPS,
    QKV,
    ROWS,
    address,
    cache_of,
    key_range,
    keys_of,
    parts_of,
    projected_row,
    projected_tiles,
    scales_of,
    sent,
    wait_empty,
)


@gluon.jit
def produce(ring, table, head, positions, block_table, c):
    """Copy all weights, keys and values that this program reads in a step."""
    dtype: gl.constexpr = ring.data.dtype
    past = gl.load(positions).to(gl.int32)
    QUERIES: gl.constexpr = c.HEADS * c.D
    used = 0
    for layer in range(c.LAYERS):
        weight = address(table, layer, QKV, dtype)
        for number in range(projected_tiles(c)):
            place = weight + projected_row(number, c) * c.HIDDEN
            used = send_rows(ring, place, used, c.HIDDEN, c.FLYING, c)
        cache = cache_of(table, layer, dtype, c)
        used = send_keys(ring, cache, block_table, past, used, c)
        weight = address(table, layer, OUTPUT, dtype)
        used = send_matrix(ring, weight, used, c.HIDDEN, QUERIES, c.FLYING, c)
        weight = address(table, layer, GATE_UP, dtype)
        for tile in range(gl.program_id(0), c.INNER // ROWS, gl.num_programs(0)):
            place = weight + tile * ROWS * c.HIDDEN
            used = send_rows(ring, place, used, c.HIDDEN, c.FLYING, c)
            used = send_rows(ring, place + c.INNER * c.HIDDEN, used, c.HIDDEN, c.FLYING, c)
        weight = address(table, layer, DOWN, dtype)
        used = send_matrix(ring, weight, used, c.HIDDEN, c.INNER, c.FLYING, c)
    used = send_matrix(ring, head, used, c.VOCAB, c.HIDDEN, c.HEAD_FLYING, c)


@gluon.jit
def send_matrix(
    ring, weight, used, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr, FLYING: gl.constexpr, c
):  # fmt: skip
    """Copy this program's rows of a matrix."""
    for tile in range(gl.program_id(0), OUTPUTS // ROWS, gl.num_programs(0)):
        place = weight + tile.to(gl.int64) * (ROWS * INPUTS)  # type: ignore[attr-defined]
        used = send_rows(ring, place, used, INPUTS, FLYING, c)
    return used


@gluon.jit
def send_rows(ring, weight, used, INPUTS: gl.constexpr, FLYING: gl.constexpr, c):
    """Copy ROWS rows, stage by stage."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [PRODUCER_WARPS, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    for i in range(INPUTS // (COLUMNS * c.PARTS)):
        stage = wait_empty(ring, used, c)
        parts = parts_of(ring, stage, c)
        for j in gl.static_range(c.PARTS):
            place = weight + row * INPUTS + ((i * c.PARTS + j) * COLUMNS + column)
            place = gl.multiple_of(gl.max_contiguous(place, [1, 8]), [1, 16])
            async_copy.async_copy_global_to_shared(parts.index(j), place)
        sent(ring, stage, FLYING)
        used += 1
    return used


@gluon.jit
def send_keys(ring, cache, block_table, past, used, c):
    """Copy the keys and values of this program's head and split, except those of the step's own token.

    `cache` is a result of `cache_of`.
    """
    WIDE: gl.constexpr = 16 if c.FP8 else 8
    LANES: gl.constexpr = c.D // WIDE
    layout: gl.constexpr = gl.BlockedLayout(
        [1, WIDE], [32 // LANES, LANES], [PRODUCER_WARPS, 1], [1, 0]
    )
    kv_head = gl.program_id(0) % c.KV_HEADS
    splits, first, last = key_range(past, gl.program_id(0) // c.KV_HEADS, c)
    row = gl.arange(0, c.KEYS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, c.D, layout=gl.SliceLayout(0, layout))[None, :]
    scale_row = gl.arange(0, c.KEYS, layout=gl.BlockedLayout([1], [32], [PRODUCER_WARPS], [0]))
    if gl.program_id(0) // c.KV_HEADS < splits:
        for i in range(first, last):
            block, offset = place_of(block_table, i * c.KEYS + row, past, c)
            line = block * c.BLOCK_SIZE + offset
            element = ((line * c.KV_HEADS + kv_head) * c.D)[:, None] + column
            scale_block, offset = place_of(block_table, i * c.KEYS + scale_row, past, c)
            scale = (scale_block * c.KV_HEADS + kv_head) * c.BLOCK_SIZE + offset
            stage = wait_empty(ring, used, c)
            both = keys_of(ring, stage, c)
            for which in gl.static_range(2):
                numbers, scales = cache[which]
                place = gl.multiple_of(gl.max_contiguous(numbers + element, [1, WIDE]), [1, 16])
                async_copy.async_copy_global_to_shared(both.index(which), place)
                if c.FP8:
                    target = scales_of(ring, stage, which, c)
                    async_copy.async_copy_global_to_shared(target, scales + scale)
            sent(ring, stage, c.FLYING)
            used += 1
    return used


@gluon.jit
def place_of(block_table, key, past, c):
    """Return the cache blocks of keys, int64, and their offsets in these blocks.

    Indices past the last key return its place, which holds finite numbers; the consumers mask them.
    """
    key = gl.minimum(key, past - 1)
    return gl.load(block_table + key // c.BLOCK_SIZE).to(gl.int64), key % c.BLOCK_SIZE
