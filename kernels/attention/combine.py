"""Merging partial attention results by their log-sum-exp.

A device function in Triton: the program that finishes last among those of one tile calls it.

Source: Dao et al., "Flash-Decoding", 2023: out = sum of out_i * exp(lse_i - lse) over the parts i.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine_columns(
    partial_out,
    partial_lse,
    first_part,
    num_parts,
    part_step,
    column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge some columns of all parts of one tile.

    Args:
        partial_out: [parts, ROWS, D] float32, each divided by its own sum.
        partial_lse: [parts, ROWS] float32 in units of log2; -inf for a part that saw nothing.
        first_part: index of the tile's first part.
        num_parts: of the tile.
        part_step: between the indices of its parts.
        column: the first column.

    Returns:
        ([ROWS, COLUMNS], [ROWS]): merged output and its log-sum-exp.
    """
    rows = tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    m = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        exists = part < num_parts
        line = (first_part + part * part_step).to(tl.int64)[:, None] * ROWS + rows[None, :]
        # Other programs wrote these, so the first-level cache is passed by.
        lse = tl.load(
            partial_lse + line, mask=exists[:, None], other=-float("inf"), cache_modifier=".cg"
        )
        out = tl.load(
            partial_out + line[:, :, None] * D + columns[None, None, :],
            mask=exists[:, None, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_m = tl.maximum(m, tl.max(lse, 0))
        base = tl.where(new_m == -float("inf"), 0.0, new_m)
        weight = tl.exp2(lse - base[None, :])
        fade = tl.exp2(m - base)
        acc = acc * fade[:, None] + tl.sum(out * weight[:, :, None], 0)
        total = total * fade + tl.sum(weight, 0)
        m = new_m
    saw_nothing = total == 0.0
    total = tl.where(saw_nothing, 1.0, total)
    inverse = tl.where(saw_nothing, 0.0, 1.0 / total)
    lse = tl.where(saw_nothing, -float("inf"), m + tl.log2(total))
    return acc * inverse[:, None], lse
