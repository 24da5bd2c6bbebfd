"""Scratch memory of the one-pass backward: numbers of each query, and sums of its gradient in float32.

Each sequence's tiles of queries start at a tile of their own, tile (first query + sequence * BLOCK_M) // BLOCK_M:

    stats    [tiles, H, 2, BLOCK_M] float32: log-sum-exp in units of log2, and rowsum(dO * O) - d lse
    sums     [tiles, H, BLOCK_M * D] float32: dQ / scale, in the order of the registers that hold a tile

Programs that follow each other have the heads of the same queries, whose rows follow each other in memory.

Queries past the end of a sequence, and those that see nothing, have an infinite log-sum-exp, so that all their weights
are 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.training.portable.tile import LOG2_E, load_seqlen, load_tile, store_tile


@triton.jit
def _tile_of_program(cu_seqlens_q, BLOCK_M: tl.constexpr):
    """Return first query and queries of the sequence, first query of the tile, and index of the tile."""
    tile, sequence = tl.program_id(1), tl.program_id(2)
    start, count = load_seqlen(cu_seqlens_q, sequence)
    return start, count, tile * BLOCK_M, (start + sequence * BLOCK_M) // BLOCK_M + tile


@triton.jit
def prepare(
    out, dout, lse, dlse, stats, sums, cu_seqlens_q, dout_stride, dout_head_stride,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write the numbers of a tile of queries, and zeros as its sums; program (head, tile, sequence)."""
    head = tl.program_id(0)
    start, count, first, tile = _tile_of_program(cu_seqlens_q, BLOCK_M)
    if first >= count:
        return
    rows = first + tl.arange(0, BLOCK_M)
    exists = rows < count
    start = start.to(tl.int64)
    out += start * HEADS * D + head * D
    dout += start * dout_stride + head * dout_head_stride
    o = load_tile(out, rows, HEADS * D, count, D, D).to(tl.float32)
    do = load_tile(dout, rows, dout_stride, count, D, D).to(tl.float32)
    place = (start + rows) * HEADS + head
    mean = tl.sum(o * do, 1) - tl.load(dlse + place, mask=exists, other=0.0)
    log_sum = tl.load(lse + place, mask=exists, other=float("inf")) * LOG2_E
    log_sum = tl.where(log_sum == float("-inf"), float("inf"), log_sum)
    entry = tile.to(tl.int64) * HEADS + head
    stats += entry * 2 * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(stats, log_sum)
    tl.store(stats + BLOCK_M, mean)
    size: tl.constexpr = BLOCK_M * D
    tl.store(sums + entry * size + tl.arange(0, size), tl.zeros((size,), tl.float32))


@triton.jit
def finish(
    sums, dq, cu_seqlens_q, scale, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Write the gradient of a tile of queries from its sums; program (head, tile, sequence)."""
    head = tl.program_id(0)
    start, count, first, tile = _tile_of_program(cu_seqlens_q, BLOCK_M)
    if first >= count:
        return
    size: tl.constexpr = BLOCK_M * D
    x = tl.load(sums + (tile.to(tl.int64) * HEADS + head) * size + tl.arange(0, size))
    # See `backward_roles._add_to_sums` for the order. Triton reads and writes in whole lines, through shared memory.
    x = x.reshape([D // 16, 2, 4, 8, 4, 2, 2]).permute([2, 5, 3, 1, 0, 4, 6]).reshape([BLOCK_M, D])
    dq += start.to(tl.int64) * HEADS * D + head * D
    store_tile(dq, first + tl.arange(0, BLOCK_M), HEADS * D, count, x * scale, D, D)
