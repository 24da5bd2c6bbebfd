"""Triton device functions for kernels that list a prefill's tiles: they read lengths and write an entry."""

from __future__ import annotations

import triton
import triton.language as tl

TILE_FIELDS = tl.constexpr(6)
"""Fields of a tile: sequence (-1 for an unused entry), its first row, query start, query tokens, key start, keys."""


@triton.jit
def load_lengths(cu_seqlens_q, seq_lens, cu_seqlens_k, b, real, PAGED: tl.constexpr):
    """Load (query start, query tokens, key start, keys) of sequences, int32 each."""
    q_start = tl.load(cu_seqlens_q + b, mask=real, other=0)
    q_len = tl.load(cu_seqlens_q + b + 1, mask=real, other=0) - q_start
    if PAGED:
        k_start = tl.zeros_like(q_start)
        k_len = tl.load(seq_lens + b, mask=real, other=0)
    else:
        k_start = tl.load(cu_seqlens_k + b, mask=real, other=0)
        k_len = tl.load(cu_seqlens_k + b + 1, mask=real, other=0) - k_start
    return q_start, q_len, k_start, k_len


@triton.jit
def store_tile(tiles, place, seq, first_row, q_start, q_len, k_start, num_keys):
    """Write one tile's fields."""
    base = tiles + place * TILE_FIELDS
    tl.store(base, seq)
    tl.store(base + 1, first_row)
    tl.store(base + 2, q_start)
    tl.store(base + 3, q_len)
    tl.store(base + 4, k_start)
    tl.store(base + 5, num_keys)
