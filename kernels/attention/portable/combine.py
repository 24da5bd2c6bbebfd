"""Merges partial attention results by their log-sum-exp.

`combine_columns` is a Triton device function, called by the last program of a tile to finish. `combine_parts` is a
kernel that merges the results of other kernels.

Source: Dao et al., "Flash-Decoding", 2023: out = sum of out_i * exp(lse_i - lse) over the parts i.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention.portable.tile import LN_2, LOG2_E


@triton.jit
def combine_columns(
    partial_out, partial_lse, first_part, num_parts, part_step, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr,
    LSE_UNIT: tl.constexpr = 1.0,
):  # fmt: skip
    """Merge COLUMNS columns of all parts of one tile.

    Args:
        partial_out: [parts, ROWS, D] float32, each divided by its own sum.
        partial_lse: [parts, ROWS] float32; -inf for a part without visible keys. Multiplied by LSE_UNIT, it is in
            units of log2.
        first_part: index of the tile's first part.
        num_parts: number of the tile's parts.
        part_step: distance between the indices of the tile's parts.
        column: the first column.

    Returns:
        ([ROWS, COLUMNS], [ROWS]): merged output, and its log-sum-exp in units of log2.
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
        # Other programs wrote these, so the loads must bypass the L1 cache.
        lse = tl.load(
            partial_lse + line, mask=exists[:, None], other=-float("inf"), cache_modifier=".cg"
        )
        lse = lse * LSE_UNIT
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


@triton.jit(do_not_specialize=["num_seqs", "num_parts", "part_step"])
def combine_parts(
    partial_out, partial_lse, out, lse, cu_seqlens_q, num_seqs, num_parts, part_step,
    HEADS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    LSE: tl.constexpr,
):  # fmt: skip
    """Merge all parts of ROWS rows; program (row tile). A row is one head of one token.

    partial_out is [parts, part_step * ROWS, D] float32; partial_lse is the same without D, natural logarithm. Rows for
    which the last part has no visible keys become 0: that part contains each token's own key, so these rows belong to
    empty sequences.
    """
    D: tl.constexpr = D1 + D2
    tile = tl.program_id(0)
    row = tile * ROWS + tl.arange(0, ROWS)
    exists = row < tl.load(cu_seqlens_q + num_seqs) * HEADS
    last = (tile + (num_parts - 1) * part_step).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    empty = tl.load(partial_lse + last, mask=exists, other=0.0) == -float("inf")
    result, log_sum = combine_columns(
        partial_out, partial_lse, tile, num_parts, part_step, 0, ROWS, D1, D, PARTS, LOG2_E
    )
    result = tl.where(empty[:, None], 0.0, result)
    target = out + row.to(tl.int64)[:, None] * D
    columns = tl.arange(0, D1)
    tl.store(target + columns[None, :], result.to(out.dtype.element_ty), mask=exists[:, None])
    if LSE:
        tl.store(lse + row, tl.where(empty, -float("inf"), log_sum * LN_2), mask=exists)
    if D2 > 0:
        result, log_sum = combine_columns(
            partial_out, partial_lse, tile, num_parts, part_step, D1, ROWS, D2, D, PARTS, LOG2_E
        )
        result = tl.where(empty[:, None], 0.0, result)
        columns = D1 + tl.arange(0, D2)
        tl.store(target + columns[None, :], result.to(out.dtype.element_ty), mask=exists[:, None])
