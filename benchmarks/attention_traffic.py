"""Bytes that attention moves between a GPU's memory and its chip: by tiles, at least, and with all scores written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.attention_shapes import ELEMENT_BYTES

if TYPE_CHECKING:
    from benchmarks.attention_shapes import Shape


def tile_bytes(shape: Shape, dtype: str, block_m: int, block_n: int) -> int:
    """Return the bytes that a prefill by tiles reads and writes if no tile finds keys in a cache.

    A tile holds `block_m` rows, each a query token and a head of a group, and reads the keys and values that its rows
    see in steps of `block_n` keys.

    Args:
        shape: a prefill without a window.
        dtype: of all tensors.
        block_m: rows of a tile.
        block_n: keys of a step.
    """
    assert shape.window is None, "a window has a first key too"
    group = shape.hq // shape.hkv
    read = 0
    for queries, keys in zip(shape.query_lens, shape.seq_lens, strict=True):
        for first in range(0, queries * group, block_m):
            last_token = (min(first + block_m, queries * group) - 1) // group
            seen = keys - queries + last_token + 1 if shape.causal else keys
            read += min(keys, -(-seen // block_n) * block_n)
    return shape.hkv * read * 2 * shape.d * ELEMENT_BYTES[dtype] + _query_bytes(shape, dtype)


def least_bytes(shape: Shape, dtype: str) -> int:
    """Return the bytes of queries, keys, values and output, each moved once: no algorithm moves fewer."""
    return shape.kv_bytes(dtype) + _query_bytes(shape, dtype)


def standard_bytes(shape: Shape, dtype: str) -> int:
    """Return the bytes of attention as written: scores and weights are both written and read, all of them."""
    pairs = zip(shape.query_lens, shape.seq_lens, strict=True)
    scores = shape.hq * sum(queries * keys for queries, keys in pairs)
    return 4 * scores * ELEMENT_BYTES[dtype] + least_bytes(shape, dtype)


def _query_bytes(shape: Shape, dtype: str) -> int:
    return 2 * sum(shape.query_lens) * shape.hq * shape.d * ELEMENT_BYTES[dtype]
