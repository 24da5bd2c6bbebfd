"""Quantize queries, keys and values to FP8 (e4m3) for Hopper's FP8 tensor cores.

    queries   rotated, then divided by a scale for each token and head
    keys      rotated, then divided by a scale for each block of keys and head
    values    divided by a scale for each block of keys and head; transposed

The rotation multiplies the head dim by a Hadamard matrix with random signs, the same for queries and keys, so that the
scores do not change. It spreads an outlier over its row. e4m3 rounds each element by up to a sixteenth of itself: the
error of a score that depends on one large element is that element's error, while the errors of many elements of equal
size average out.

Each sequence's keys are cut into blocks of one tile, the last one padded with zeros, so that a tile is one
contiguous block with one scale:

    keys      [K, blocks, block_n, D]
    values    [K, blocks, D, block_n], since an FP8 WGMMA needs the keys contiguous in its second operand
    scales    [3, K, blocks] float32: of keys, of values, and 1 / that of values

Values are stored in the order in which the registers hold the weights of their keys (`key_of_slot`).

Source: Shah et al., "FlashAttention-3", 2024, section 3.3, for block scales, the rotation and the order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = tl.constexpr(448.0)
"""The largest number of e4m3."""
_SMALLEST = tl.constexpr(1e-12)
"""Lower bound of a block's largest element, so that no scale is 0 and no inverse infinite."""
_QUERY_ROWS = tl.constexpr(64)
"""Rows of a program's tile."""
_BLOCK_FIELDS = tl.constexpr(2)
"""Fields of a block: its first key among all keys, and the number of its keys (0 for an unused entry)."""
_SEED = 3


@functools.lru_cache(maxsize=16)
def rotation(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a Hadamard matrix whose rows have random signs, [D, D]; D is a power of two.

    Its elements are 1 and -1, exact in any dtype; x @ rotation is sqrt(D) times as long as x.

    Source: Sylvester's construction; element (i, j) is -1 to the number of common bits.
    """
    matrix = torch.ones((1, 1))
    while matrix.shape[0] < head_dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    generator = torch.Generator().manual_seed(_SEED)
    signs = torch.randint(0, 2, (head_dim, 1), generator=generator) * 2 - 1
    return (matrix * signs).to(device, dtype)


@triton.jit
def key_of_slot(slot):
    """Return the index of the key whose value is in a slot of its block.

    Of every 16 keys, thread t holds the scores of 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 in the accumulator, and slots
    4 t to 4 t + 3 in an FP8 operand.
    """
    return slot // 16 * 16 + slot // 2 % 2 * 8 + slot // 4 % 4 * 2 + slot % 2


@triton.jit(do_not_specialize=["num_seqs"])
def list_key_blocks(
    blocks, first_blocks, cu_seqlens_k, num_seqs, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr
):
    """List the key blocks of all sequences; program e writes entry e of `blocks` [entries, 2] int32.

    Program b also writes the index of sequence b's first block to `first_blocks` [B] int32.
    """
    entry = tl.program_id(0)
    b = tl.arange(0, BLOCK_B)
    real = b < num_seqs
    start = tl.load(cu_seqlens_k + b, mask=real, other=0)
    length = tl.load(cu_seqlens_k + b + 1, mask=real, other=0) - start
    count = (length + BLOCK_N - 1) // BLOCK_N
    seq = tl.sum((tl.cumsum(count, 0) <= entry).to(tl.int32), 0)
    key = (entry - tl.sum(tl.where(b < seq, count, 0), 0)) * BLOCK_N
    left = tl.sum(tl.where(b == seq, length, 0), 0) - key
    first = tl.sum(tl.where(b == seq, start, 0), 0) + key
    tl.store(blocks + entry * _BLOCK_FIELDS, first)
    tl.store(blocks + entry * _BLOCK_FIELDS + 1, tl.maximum(tl.minimum(left, BLOCK_N), 0))
    if entry < num_seqs:
        tl.store(first_blocks + entry, tl.sum(tl.where(b < entry, count, 0), 0))


@triton.jit(do_not_specialize=["num_rows"])
def quantize_queries(
    q,
    quantized,
    factors,
    matrix,
    num_rows,
    q_stride,
    q_head_stride,
    factor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    TILES: tl.constexpr,
):
    """Quantize queries; each program processes `TILES` tiles of 64 rows of [T * H, D].

    Args:
        q: [T, H, D], dense along D.
        quantized: [T, H, D] e4m3.
        factors: [T, H] float32, the factors on the scores of these queries.
        matrix: [D, D], from `rotation`.
        num_rows: T * H.
        q_stride: elements from one token to the next.
        q_head_stride: elements from one head to the next.
        factor: common to all of `factors`.
    """
    column = tl.arange(0, D)
    hadamard = tl.load(matrix + column[:, None] * D + column[None, :])
    for tile in tl.static_range(TILES):
        row = (tl.program_id(0) * TILES + tile) * _QUERY_ROWS + tl.arange(0, _QUERY_ROWS)
        exists = row < num_rows
        source = (row // HEADS).to(tl.int64) * q_stride + row % HEADS * q_head_stride
        x = tl.load(q + source[:, None] + column[None, :], mask=exists[:, None], other=0.0)
        x = tl.dot(x, hadamard, input_precision="ieee")
        largest = tl.maximum(tl.max(tl.abs(x), 1), _SMALLEST)
        inverse = 1.0 / largest * LARGEST
        x = x * inverse[:, None]
        place = row.to(tl.int64)[:, None] * D + column[None, :]
        tl.store(quantized + place, x.to(quantized.dtype.element_ty), mask=exists[:, None])
        tl.store(factors + row, largest / LARGEST * factor, mask=exists)


@triton.jit
def quantize_keys_and_values(
    k,
    v,
    quantized_k,
    quantized_v,
    scales,
    matrix,
    blocks,
    num_blocks,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
):
    """Quantize one block; program (block, head, 0 for keys and 1 for values).

    Args:
        k: [T_k, K, D], dense along D.
        v: [T_k, K, D], dense along D.
        quantized_k: [K, blocks, BLOCK_N, D] e4m3.
        quantized_v: [K, blocks, D, BLOCK_N] e4m3.
        scales: [3, K, blocks] float32.
        matrix: [D, D], from `rotation`.
        blocks: as `list_key_blocks` writes them.
        num_blocks: entries of `blocks`.
        k_stride: elements from one key to the next; the other strides accordingly.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(blocks + block * _BLOCK_FIELDS)
    count = tl.load(blocks + block * _BLOCK_FIELDS + 1)
    if count == 0:
        return
    scale = scales + head * num_blocks + block
    num_scales = tl.num_programs(1) * num_blocks
    slot = tl.arange(0, BLOCK_N)
    column = tl.arange(0, D)
    place = (head * num_blocks + block).to(tl.int64) * (BLOCK_N * D)
    if tl.program_id(2) == 0:
        x = load_rows(k + head * k_head_stride, first, slot, count, k_stride, column)
        hadamard = tl.load(matrix + column[:, None] * D + column[None, :])
        x, fitted, _ = fit(tl.dot(x, hadamard, input_precision="ieee"))
        tl.store(scale, fitted)
        x = x.to(quantized_k.dtype.element_ty)
        tl.store(quantized_k + place + slot[:, None] * D + column[None, :], x)
    else:
        x = load_rows(v + head * v_head_stride, first, key_of_slot(slot), count, v_stride, column)
        x, fitted, inverse = fit(x.to(tl.float32))
        tl.store(scale + num_scales, fitted)
        tl.store(scale + 2 * num_scales, inverse)
        x = x.to(quantized_v.dtype.element_ty)
        tl.store(quantized_v + place + column[:, None] * BLOCK_N + slot[None, :], tl.trans(x))


@triton.jit
def load_rows(x, first, key, count, stride, column):
    """Load the keys or values of a block in the order `key`; rows from `count` on are 0."""
    row = (first + key).to(tl.int64) * stride
    return tl.load(x + row[:, None] + column[None, :], mask=(key < count)[:, None], other=0.0)


@triton.jit
def fit(x):
    """Scale a block so that its largest magnitude becomes 448; return (block, scale, 1 / scale)."""
    largest = tl.maximum(tl.max(tl.abs(x)), _SMALLEST)
    inverse = 1.0 / largest * LARGEST
    return x * inverse, largest / LARGEST, inverse


@dataclass(frozen=True, slots=True)
class KeyBlocks:
    """The blocks of the keys of a step's sequences; made once per step, on the device.

    Attributes:
        blocks: [entries, 2] int32, as `list_key_blocks` writes them.
        first_blocks: [B] int32, the index of each sequence's first block.
        size: keys of a block.
    """

    blocks: Tensor
    first_blocks: Tensor
    size: int


def plan_key_blocks(cu_seqlens_k: Tensor, num_keys: int, size: int) -> KeyBlocks:
    """Cut packed keys into blocks.

    Args:
        cu_seqlens_k: [B + 1] int32; keys of sequence b start at cu_seqlens_k[b].
        num_keys: keys of all sequences.
        size: keys of a block.
    """
    num_seqs = cu_seqlens_k.shape[0] - 1
    device = cu_seqlens_k.device
    # Each sequence may end with a partial block.
    most = num_keys // size + num_seqs
    blocks = torch.empty((most, _BLOCK_FIELDS.value), dtype=torch.int32, device=device)
    first_blocks = torch.empty(num_seqs, dtype=torch.int32, device=device)
    list_key_blocks[(most,)](
        blocks,
        first_blocks,
        cu_seqlens_k,
        num_seqs,
        BLOCK_N=size,
        BLOCK_B=max(16, triton.next_power_of_2(num_seqs)),
        num_warps=1,
    )
    return KeyBlocks(blocks, first_blocks, size)


@dataclass(frozen=True, slots=True)
class Quantized:
    """Buffers for one layer's queries, keys and values; layers may share them.

    Attributes:
        q: [T, H, D] e4m3.
        factors: [T, H] float32, the factors on a query's scores, to be multiplied by the keys' scale.
        k: [K, blocks, block_n, D] e4m3.
        v: [K, blocks, D, block_n] e4m3.
        scales: [3, K, blocks] float32.
    """

    q: Tensor
    factors: Tensor
    k: Tensor
    v: Tensor
    scales: Tensor


def make_buffers(q: Tensor, kv: Tensor, plan: KeyBlocks) -> Quantized:
    """Allocate the outputs of `quantize` for queries [T, H, D] and keys and values [2, T_k, K, D]."""
    heads, head_dim = kv.shape[-2:]
    blocks = plan.blocks.shape[0]
    e4m3 = torch.float8_e4m3fn
    return Quantized(
        q=torch.empty(q.shape, dtype=e4m3, device=q.device),
        factors=torch.empty(q.shape[:2], dtype=torch.float32, device=q.device),
        k=torch.empty((heads, blocks, plan.size, head_dim), dtype=e4m3, device=q.device),
        v=torch.empty((heads, blocks, head_dim, plan.size), dtype=e4m3, device=q.device),
        scales=torch.empty((3, heads, blocks), dtype=torch.float32, device=q.device),
    )


def quantize(q: Tensor, kv: Tensor, plan: KeyBlocks, buffers: Quantized, factor: float) -> None:
    """Quantize one layer's queries, keys and values.

    Args:
        q: [T, H, D], dense along D.
        kv: [2, T_k, K, D], dense along D.
        plan: the blocks of the keys.
        buffers: the outputs.
        factor: factor on the scores of the given queries and keys.
    """
    num_rows, head_dim = q.shape[0] * q.shape[1], q.shape[2]
    keys, values = kv.unbind(0)
    matrix = rotation(head_dim, q.dtype, q.device)
    tiles = 4 if num_rows >= 1 << 16 else 1
    quantize_queries[(triton.cdiv(num_rows, tiles * _QUERY_ROWS.value),)](
        q,
        buffers.q,
        buffers.factors,
        matrix,
        num_rows,
        q.stride(0),
        q.stride(1),
        factor / head_dim,  # each rotation multiplies its operand's length by sqrt(head_dim)
        HEADS=q.shape[1],
        D=head_dim,
        TILES=tiles,
        num_warps=4,
    )
    quantize_keys_and_values[(plan.blocks.shape[0], kv.shape[2], 2)](
        keys,
        values,
        buffers.k,
        buffers.v,
        buffers.scales,
        matrix,
        plan.blocks,
        plan.blocks.shape[0],
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        BLOCK_N=plan.size,
        D=head_dim,
        num_warps=8,
    )
