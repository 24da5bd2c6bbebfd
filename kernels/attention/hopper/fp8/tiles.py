"""Operands of an FP8 prefill on Hopper: quantized queries, and tiles of keys and values from an FP8 cache.

    queries   divided by a scale for each token and head
    keys      with one scale for a tile of a head instead of one for each key
    values    likewise, and transposed

A tile's scale is the largest scale of its rows. Scales that `write_kv` writes are powers of two, so the numbers of
the other rows only change their exponents, without rounding, unless they become subnormal: 2^-15 of the largest.
Other scales round a second time. Queries and keys have been rotated (`kernels.hadamard`) when the cache was written.

Each sequence's keys are cut into tiles, the last one padded with zeros:

    keys      [K, tiles, block_n, D]
    values    [K, tiles, D, block_n], since an FP8 WGMMA needs the keys contiguous in its second operand
    scales    [3, K, tiles] float32: of keys, of values, and 1 / that of values

Values are stored in the order in which the registers hold the weights of their keys (`key_of_slot`).

Source: Shah et al., "FlashAttention-3", 2024, section 3.3, for scales of tiles and the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention.hopper.fp8.cached_rows import find_slots, load_cached

if TYPE_CHECKING:
    from kernels.attention.problem import PagedBatch

LARGEST = tl.constexpr(448.0)
"""The largest number of e4m3."""
_SMALLEST = tl.constexpr(1e-12)
"""Lower bound of a query's largest element, so that no scale is 0."""
_SMALLEST_SCALE = tl.constexpr(2.0**-120)
"""Lower bound of a tile's scale, so that its inverse is finite; the scales that `write_kv` writes are larger."""
_QUERY_ROWS = tl.constexpr(64)
"""Rows of a program."""
_TILE_FIELDS = tl.constexpr(3)
"""Fields of a tile: its sequence, its first key, and the number of its keys (0 for an unused entry)."""


@triton.jit
def key_of_slot(slot):
    """Return the index of the key whose value is in a slot of its tile.

    Of every 16 keys, thread t holds the scores of 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 in the accumulator, and slots
    4 t to 4 t + 3 in an FP8 operand.
    """
    return slot // 16 * 16 + slot // 2 % 2 * 8 + slot // 4 % 4 * 2 + slot % 2


@triton.jit(do_not_specialize=["num_seqs"])
def list_key_tiles(
    tiles, first_tiles, seq_lens, num_seqs, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr
):
    """List the tiles of all sequences; program e writes entry e of `tiles` [entries, 3] int32.

    Program b also writes the index of sequence b's first tile to `first_tiles` [B] int32.
    """
    entry = tl.program_id(0)
    b = tl.arange(0, BLOCK_B)
    length = tl.load(seq_lens + b, mask=b < num_seqs, other=0)
    count = (length + BLOCK_N - 1) // BLOCK_N
    seq = tl.sum((tl.cumsum(count, 0) <= entry).to(tl.int32), 0)
    key = (entry - tl.sum(tl.where(b < seq, count, 0), 0)) * BLOCK_N
    left = tl.sum(tl.where(b == seq, length, 0), 0) - key
    tl.store(tiles + entry * _TILE_FIELDS, seq)
    tl.store(tiles + entry * _TILE_FIELDS + 1, key)
    tl.store(tiles + entry * _TILE_FIELDS + 2, tl.maximum(tl.minimum(left, BLOCK_N), 0))
    if entry < num_seqs:
        tl.store(first_tiles + entry, tl.sum(tl.where(b < entry, count, 0), 0))


@triton.jit(do_not_specialize=["num_rows"])
def quantize_queries(
    q, quantized, factors, num_rows, q_stride, q_head_stride, factor, HEADS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Quantize 64 rows of [T * H, D].

    Args:
        q: [T, H, D], dense along D.
        quantized: [T, H, D] e4m3.
        factors: [T, H] float32, the factors on the scores of these queries.
        num_rows: T * H.
        q_stride: elements from one token to the next.
        q_head_stride: elements from one head to the next.
        factor: common to all of `factors`.
    """
    column = tl.arange(0, D)[None, :]
    row = tl.program_id(0) * _QUERY_ROWS + tl.arange(0, _QUERY_ROWS)
    exists = row < num_rows
    source = (row // HEADS).to(tl.int64) * q_stride + row % HEADS * q_head_stride
    x = tl.load(q + source[:, None] + column, mask=exists[:, None], other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 1), _SMALLEST)
    x *= (1.0 / largest * LARGEST)[:, None]
    place = row.to(tl.int64)[:, None] * D + column
    tl.store(quantized + place, x.to(quantized.dtype.element_ty), mask=exists[:, None])
    tl.store(factors + row, largest / LARGEST * factor, mask=exists)


@triton.jit(do_not_specialize=["num_tiles", "table_stride"])
def copy_tiles(
    keys, values, key_scales, value_scales, tile_k, tile_v, scales, tiles, num_tiles, block_table, table_stride,
    block_stride, token_stride, head_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Copy one tile; program (tile, head, 0 for keys and 1 for values).

    Args:
        keys: [N, S, K, D] float8_e4m3fn, with these strides; `values` likewise.
        key_scales: [N, K, S]; `value_scales` likewise.
        tile_k: [K, tiles, BLOCK_N, D] e4m3.
        tile_v: [K, tiles, D, BLOCK_N] e4m3.
        scales: [3, K, tiles] float32.
        tiles: as `list_key_tiles` writes them.
        num_tiles: entries of `tiles`.
        block_table: [B, M] int32.
        table_stride: M.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.load(tiles + tile * _TILE_FIELDS)
    first = tl.load(tiles + tile * _TILE_FIELDS + 1)
    count = tl.load(tiles + tile * _TILE_FIELDS + 2)
    if count == 0:
        return
    slot = tl.arange(0, BLOCK_N)
    column = tl.arange(0, D)
    place = (head * num_tiles + tile).to(tl.int64) * (BLOCK_N * D)
    scale = scales + head * num_tiles + tile
    num_scales = KV_HEADS * num_tiles
    if tl.program_id(2) == 0:
        block, offset = find_slots(
            block_table, table_stride, seq, first + slot, slot < count, BLOCK_SIZE
        )
        x, own = load_cached(
            keys, key_scales, block, offset, head, slot < count, block_stride, token_stride, head_stride,
            KV_HEADS, D, D, BLOCK_SIZE,
        )  # fmt: skip
        x, largest = rescale(x, own)
        tl.store(scale, largest)
        tl.store(tile_k + place + slot[:, None] * D + column[None, :], x)
    else:
        key = key_of_slot(slot)
        block, offset = find_slots(
            block_table, table_stride, seq, first + key, key < count, BLOCK_SIZE
        )
        x, own = load_cached(
            values, value_scales, block, offset, head, key < count, block_stride, token_stride, head_stride,
            KV_HEADS, D, D, BLOCK_SIZE,
        )  # fmt: skip
        x, largest = rescale(x, own)
        tl.store(scale + num_scales, largest)
        tl.store(scale + 2 * num_scales, tl.div_rn(1.0, largest))
        tl.store(tile_v + place + column[:, None] * BLOCK_N + slot[None, :], tl.trans(x))


@triton.jit
def rescale(x, scale):
    """Give e4m3 rows their largest scale; return rows and scale."""
    largest = tl.maximum(tl.max(scale, 0), _SMALLEST_SCALE)
    ratio = tl.div_rn(scale, tl.zeros_like(scale) + largest)
    return (x.to(tl.float16).to(tl.float32) * ratio[:, None]).to(x.dtype), largest


@dataclass(frozen=True, slots=True)
class KeyTiles:
    """The tiles of the keys of some sequences; made once per step, on the device.

    Attributes:
        tiles: [entries, 3] int32, as `list_key_tiles` writes them.
        first_tiles: [B] int32, the index of each sequence's first tile.
        size: keys of a tile.
    """

    tiles: Tensor
    first_tiles: Tensor
    size: int


def plan_key_tiles(batch: PagedBatch, size: int) -> KeyTiles:
    """Cut the keys of each sequence into tiles of `size` keys."""
    device = batch.seq_lens.device
    most = batch.num_seqs * max(1, triton.cdiv(batch.max_seqlen_k, size))
    tiles = torch.empty((most, _TILE_FIELDS.value), dtype=torch.int32, device=device)
    first_tiles = torch.empty(batch.num_seqs, dtype=torch.int32, device=device)
    list_key_tiles[(most,)](
        tiles, first_tiles, batch.seq_lens, batch.num_seqs,
        BLOCK_N=size, BLOCK_B=max(16, triton.next_power_of_2(batch.num_seqs)), num_warps=1,
    )  # fmt: skip
    return KeyTiles(tiles, first_tiles, size)


@dataclass(frozen=True, slots=True)
class Operands:
    """Buffers for one layer's queries, keys and values; layers share them.

    Attributes:
        q: [T, H, D] e4m3.
        factors: [T, H] float32, the factors on a query's scores, to be multiplied by the keys' scale.
        k: [K, tiles, block_n, D] e4m3.
        v: [K, tiles, D, block_n] e4m3.
        scales: [3, K, tiles] float32.
    """

    q: Tensor
    factors: Tensor
    k: Tensor
    v: Tensor
    scales: Tensor


def make_operands(q: Tensor, kv_heads: int, num_tiles: int, size: int) -> Operands:
    """Allocate buffers for queries [T, H, D] and tiles of `size` keys."""
    head_dim = q.shape[2]
    e4m3 = torch.float8_e4m3fn
    return Operands(
        q=torch.empty(q.shape, dtype=e4m3, device=q.device),
        factors=torch.empty(q.shape[:2], dtype=torch.float32, device=q.device),
        k=torch.empty((kv_heads, num_tiles, size, head_dim), dtype=e4m3, device=q.device),
        v=torch.empty((kv_heads, num_tiles, head_dim, size), dtype=e4m3, device=q.device),
        scales=torch.empty((3, kv_heads, num_tiles), dtype=torch.float32, device=q.device),
    )


def write_queries(q: Tensor, operands: Operands, factor: float) -> None:
    """Quantize queries [T, H, D], dense along D, whose scores have this factor."""
    num_rows = q.shape[0] * q.shape[1]
    quantize_queries[(triton.cdiv(num_rows, _QUERY_ROWS.value),)](
        q, operands.q, operands.factors, num_rows, q.stride(0), q.stride(1), factor,
        HEADS=q.shape[1], D=q.shape[2], num_warps=4,
    )  # fmt: skip


def write_tiles(
    kv: Tensor, kv_scale: Tensor, batch: PagedBatch, plan: KeyTiles, operands: Operands
) -> None:
    """Copy one layer's keys and values of a batch's sequences; shapes as in `kernels.prefill_attention`."""
    num_tiles, heads = operands.k.shape[1], kv.shape[3]
    copy_tiles[(len(plan.tiles), heads, 2)](
        *kv.unbind(0), *kv_scale.unbind(0), operands.k, operands.v, operands.scales, plan.tiles, num_tiles,
        batch.block_table, batch.block_table.stride(0), *kv.stride()[1:4],
        KV_HEADS=heads, D=kv.shape[4], BLOCK_SIZE=kv.shape[2], BLOCK_N=plan.size, num_warps=8,
    )  # fmt: skip
