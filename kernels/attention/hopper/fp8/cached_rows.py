"""Reads an FP8 cache in Triton, for prefills on Hopper whose kernels copy tiles of another form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.attention.portable.tile import window_argument

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.attention.problem import AttentionProblem, PagedBatch

_TOKENS = tl.constexpr(64)
"""Keys of a program."""


@triton.jit
def find_slots(block_table, table_stride, seq, key, exists, BLOCK_SIZE: tl.constexpr):
    """Return the cache block, int64, and the offset in it of keys of a sequence."""
    table = block_table + seq.to(tl.int64) * table_stride
    block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    return block, key % BLOCK_SIZE


@triton.jit
def load_cached(
    numbers, scales, block, offset, head, exists, block_stride, token_stride, head_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Load cached rows of a head, [keys, BLOCK_D] float8_e4m3fn, and their scales; 0 where they do not exist."""
    column = tl.arange(0, BLOCK_D)[None, :]
    place = block * block_stride + offset * token_stride + head * head_stride
    rows = exists[:, None] & (column < D)
    x = tl.load(numbers + place[:, None] + column, mask=rows, other=0.0)
    place = (block * KV_HEADS + head) * BLOCK_SIZE + offset
    return x, tl.load(scales + place, mask=exists, other=0.0)


@triton.jit(do_not_specialize=["table_stride", "window"])
def unpack_rows(
    keys, values, key_scales, value_scales, out, cu_seqlens_q, cu_seqlens_k, block_table, table_stride,
    block_stride, token_stride, head_stride, out_stride, window,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Convert some keys or values of a head; program (keys, sequence, head of keys and then of values).

    Args:
        keys: [N, S, K, D] float8_e4m3fn, with these strides; `values` likewise.
        key_scales: [N, K, S]; `value_scales` likewise.
        out: [2, rows, K, D], rows of sequence b from cu_seqlens_k[b]; its first stride is `out_stride`.
        cu_seqlens_q: [B + 1] int32.
        cu_seqlens_k: [B + 1] int32.
        block_table: [B, M] int32.
        table_stride: M.
        window: keys before every query's window are not read.
    """
    seq = tl.program_id(1)
    start = tl.load(cu_seqlens_k + seq)
    length = tl.load(cu_seqlens_k + seq + 1) - start
    kept = 0
    if WINDOW:
        queries = tl.load(cu_seqlens_q + seq + 1) - tl.load(cu_seqlens_q + seq)
        kept = tl.maximum(length - queries - window + 1, 0)
    key = tl.program_id(0) * _TOKENS + tl.arange(0, _TOKENS)
    exists = (key < length) & (key >= kept)
    if tl.max(exists.to(tl.int32), 0) == 0:
        return
    block, offset = find_slots(block_table, table_stride, seq, key, exists, BLOCK_SIZE)
    head = tl.program_id(2) % KV_HEADS
    numbers, scales, target = keys, key_scales, out
    if tl.program_id(2) >= KV_HEADS:
        numbers, scales, target = values, value_scales, out + out_stride
    x, scale = load_cached(
        numbers, scales, block, offset, head, exists, block_stride, token_stride, head_stride,
        KV_HEADS, D, BLOCK_D, BLOCK_SIZE,
    )  # fmt: skip
    wide = x.to(tl.float16).to(tl.float32) * scale[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    place = ((start + key).to(tl.int64) * KV_HEADS + head) * D
    tl.store(
        target + place[:, None] + column,
        wide.to(out.dtype.element_ty),
        mask=exists[:, None] & (column < D),
    )


def convert_rows(
    problem: AttentionProblem,
    batch: PagedBatch,
    cu_seqlens_k: Tensor,
    kv: Tensor,
    kv_scale: Tensor,
    out: Tensor,
) -> None:
    """Convert the keys and values of a batch's sequences to the queries' dtype.

    Args:
        problem: its window limits what is read.
        batch: the sequences.
        cu_seqlens_k: [B + 1] int32; rows of sequence b start at cu_seqlens_k[b].
        kv: [2, N, S, K, D] float8_e4m3fn.
        kv_scale: [2, N, K, S] float32.
        out: [2, rows, K, D]; rows that no query's window reaches are not written.
    """
    heads, head_dim = problem.num_kv_heads, problem.head_dim
    grid = (triton.cdiv(batch.max_seqlen_k, _TOKENS.value), batch.num_seqs, 2 * heads)
    unpack_rows[grid](
        *kv.unbind(0), *kv_scale.unbind(0), out, batch.cu_seqlens_q, cu_seqlens_k,
        batch.block_table, batch.block_table.stride(0), *kv.stride()[1:4], out.stride(0), window_argument(problem),
        KV_HEADS=heads, D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_SIZE=kv.shape[2],
        WINDOW=problem.sliding_window is not None, num_warps=4,
    )  # fmt: skip
