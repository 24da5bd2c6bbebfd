"""The producer of the whole-step kernel: warps that copy weights, keys and values to shared memory, in order of use.

It runs as far ahead as the ring has room, past the barriers that the consumers wait at: weights depend on nothing,
and of keys and values it copies only those that earlier steps have written. Knows nothing of what is computed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kernels.fused.step_ring import (
    COLUMNS,
    DOWN,
    GATE_UP,
    KEYS,
    OUTPUT,
    PRODUCER_WARPS,
    QKV,
    ROWS,
    VALUES,
    address,
    key_range,
    keys_of,
    parts_of,
    projected_row,
    projected_tiles,
    sent,
    wait_empty,
)


@gluon.jit
def produce(ring, table, head, positions, block_table, c):
    """Copy what a step reads."""
    dtype: gl.constexpr = ring.data.dtype
    past = gl.load(positions).to(gl.int32)
    QUERIES: gl.constexpr = c.HEADS * c.D
    used = 0
    for layer in range(c.LAYERS):
        weight = address(table, layer, QKV, dtype)
        for number in range(projected_tiles(c)):
            place = weight + projected_row(number, c) * c.HIDDEN
            used = send_rows(ring, place, used, c.HIDDEN, c.FLYING, c)
        keys = address(table, layer, KEYS, dtype)
        values = address(table, layer, VALUES, dtype)
        used = send_keys(ring, keys, values, block_table, past, used, c)
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
def send_keys(ring, keys, values, block_table, past, used, c):
    """Copy the keys and values of this program's head and split, those of the step's own token excepted."""
    LANES: gl.constexpr = c.D // 8
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // LANES, LANES], [PRODUCER_WARPS, 1], [1, 0]
    )
    kv_head = gl.program_id(0) % c.KV_HEADS
    splits, first, last = key_range(past, gl.program_id(0) // c.KV_HEADS, c)
    row = gl.arange(0, c.KEYS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, c.D, layout=gl.SliceLayout(0, layout))[None, :]
    if gl.program_id(0) // c.KV_HEADS < splits:
        for i in range(first, last):
            # Keys past the last are masked where they are used; the last one stands for them, since it is a number.
            key = gl.minimum(i * c.KEYS + row, past - 1)
            block = gl.load(block_table + key // c.BLOCK_SIZE)
            line = block.to(gl.int64) * c.BLOCK_SIZE + key % c.BLOCK_SIZE
            offset = ((line * c.KV_HEADS + kv_head) * c.D)[:, None] + column
            stage = wait_empty(ring, used, c)
            both = keys_of(ring, stage, c)
            place = gl.multiple_of(gl.max_contiguous(keys + offset, [1, 8]), [1, 16])
            async_copy.async_copy_global_to_shared(both.index(0), place)
            place = gl.multiple_of(gl.max_contiguous(values + offset, [1, 8]), [1, 16])
            async_copy.async_copy_global_to_shared(both.index(1), place)
            sent(ring, stage, c.FLYING)
            used += 1
    return used
