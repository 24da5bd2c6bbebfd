"""Store the results of a Hopper decode's splits, and merge the parts of a tile: `portable.combine` in Gluon.

Source: Dao et al., "Flash-Decoding", 2023: out = sum of out_i * exp(lse_i - lse) over the parts i.
"""
# `aggregate` evaluates the annotations when the class is defined, so this module cannot postpone them.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from kernels.attention.hopper.pipeline import (
    ROWS,
    accumulator_layout,
    output_row,
    padded_dim,
    row_exists,
    rows_of_token,
)

_LN_2 = gl.constexpr(0.6931471805599453)
_MERGE_ELEMENTS = 8192
"""Elements of partial results that a merge holds at once: 64 registers a thread at 4 warps."""
_FEW_ELEMENTS = 2048
"""The same in a kernel that needs fewer registers otherwise, so that the merge does not determine its number."""


@aggregate
class DecodeConstants:
    """Compile-time constants of the decode kernel, with the names that the prefill's device functions use.

    `BOX` is `GROUP` rounded up to a power of two: the tile rows of one query token. `D` is `padded_dim` of `HEAD_DIM`.
    `FEW` means that a sequence has one query token, of at most 8 rows. If `KEYS_ON_M`, the products have keys on their
    M dimension and `QUERIES` query heads on N (`keys_on_m`); else `QUERIES` is the 64 rows of M.
    """

    HEADS: gl.constexpr
    KV_HEADS: gl.constexpr
    GROUP: gl.constexpr
    BOX: gl.constexpr
    D: gl.constexpr
    HEAD_DIM: gl.constexpr
    BLOCK_SIZE: gl.constexpr
    PAGE: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    ROW_TILES: gl.constexpr
    MERGE_ROWS: gl.constexpr
    WINDOW: gl.constexpr
    SOFTCAP: gl.constexpr
    LSE: gl.constexpr
    FEW: gl.constexpr
    KEYS_ON_M: gl.constexpr
    QUERIES: gl.constexpr
    PAGED: gl.constexpr
    CAUSAL: gl.constexpr
    OPERAND_BYTES: gl.constexpr
    S_LAYOUT: gl.constexpr
    O_LAYOUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, HEADS, KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, PAGE, BLOCK_N, STAGES, ROW_TILES,
        MERGE_ROWS, WINDOW, SOFTCAP, LSE, FEW, KEYS_ON_M,
    ) -> None:  # fmt: skip
        self.HEADS = gl.constexpr(HEADS)
        self.KV_HEADS = gl.constexpr(KV_HEADS)
        self.GROUP = gl.constexpr(GROUP)
        self.BOX = gl.constexpr(rows_of_token(GROUP))
        D = padded_dim(HEAD_DIM)
        self.D = gl.constexpr(D)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.BLOCK_SIZE = gl.constexpr(BLOCK_SIZE)
        self.PAGE = gl.constexpr(PAGE)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.STAGES = gl.constexpr(STAGES)
        self.ROW_TILES = gl.constexpr(ROW_TILES)
        self.MERGE_ROWS = gl.constexpr(MERGE_ROWS)
        self.WINDOW = gl.constexpr(WINDOW)
        self.SOFTCAP = gl.constexpr(SOFTCAP)
        self.LSE = gl.constexpr(LSE)
        self.FEW = gl.constexpr(FEW)
        self.KEYS_ON_M = gl.constexpr(KEYS_ON_M)
        QUERIES = queries_on_n(GROUP) if KEYS_ON_M else ROWS.value
        self.QUERIES = gl.constexpr(QUERIES)
        self.PAGED = gl.constexpr(True)
        self.CAUSAL = gl.constexpr(True)
        self.OPERAND_BYTES = gl.constexpr(2)
        self.S_LAYOUT = gl.constexpr(accumulator_layout(QUERIES if KEYS_ON_M else BLOCK_N))
        self.O_LAYOUT = gl.constexpr(accumulator_layout(QUERIES if KEYS_ON_M else D))


@gluon.jit
def store_rows(out, lse, acc, log_sum, kv_head, first_row, q_start, q_len, c):
    """Write the output of a tile that is not split, [rows, D], and its log-sum-exp, [rows] in units of log2."""
    row, column = _indices(acc)
    place = output_row(first_row + row, q_start, kv_head, c)
    exists = row_exists(first_row + row, q_len, c)
    gl.store(
        out + place[:, None] * c.HEAD_DIM + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=exists[:, None] & (column < c.HEAD_DIM)[None, :],
    )
    if c.LSE:
        row = gl.arange(0, log_sum.shape[0], layout=log_sum.type.layout)
        place = output_row(first_row + row, q_start, kv_head, c)
        exists = row_exists(first_row + row, q_len, c)
        gl.store(lse + place, log_sum * _LN_2, mask=exists)


@gluon.jit
def store_part(partial_out, partial_lse, part, acc, log_sum, first_row, q_len, c):
    """Write a split's partial output, [rows, D], and its log-sum-exp, [rows] in units of log2, for the merge."""
    row, column = _indices(acc)
    first_line = part.to(gl.int64) * c.MERGE_ROWS
    exists = row_exists(first_row + row, q_len, c) & (row < c.MERGE_ROWS)
    line = first_line + row
    place = line[:, None] * c.HEAD_DIM + column[None, :]
    gl.store(partial_out + place, acc, mask=exists[:, None] & (column < c.HEAD_DIM)[None, :])
    row = gl.arange(0, log_sum.shape[0], layout=log_sum.type.layout)
    exists = row_exists(first_row + row, q_len, c) & (row < c.MERGE_ROWS)
    gl.store(partial_lse + first_line + row, log_sum, mask=exists)


@gluon.jit
def _indices(x):
    """Return the row and column indices of a tile, in the layouts of its rows and columns."""
    layout: gl.constexpr = x.type.layout
    row = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))
    return row, column


@gluon.jit
def merge_parts(
    out, lse, partial_out, partial_lse, first_part, num_parts, kv_head, first_row, q_start, q_len, c
):  # fmt: skip
    """Merge the parts of one tile and write the output; the parts' indices are `KV_HEADS * ROW_TILES` apart."""
    STEP: gl.constexpr = c.KV_HEADS * c.ROW_TILES
    PARTS: gl.constexpr = parts_at_once(c.MERGE_ROWS, c.D, c.KEYS_ON_M)
    # A thread holds all parts of its elements, so that their sum needs no exchange between threads.
    cube: gl.constexpr = merge_layout(PARTS, c.MERGE_ROWS)
    plane: gl.constexpr = gl.SliceLayout(0, cube)
    lines: gl.constexpr = gl.SliceLayout(2, cube)
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(1, lines))
    row = gl.arange(0, c.MERGE_ROWS, layout=gl.SliceLayout(0, lines))
    column = gl.arange(0, c.D, layout=gl.SliceLayout(0, gl.SliceLayout(1, cube)))
    acc = gl.zeros([c.MERGE_ROWS, c.D], gl.float32, layout=plane)
    m = gl.full([c.MERGE_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, lines))
    total = gl.zeros([c.MERGE_ROWS], gl.float32, layout=gl.SliceLayout(0, lines))
    for start in range(0, num_parts, PARTS):
        exists = start + part < num_parts
        line = (first_part + (start + part) * STEP).to(gl.int64)[:, None] * c.MERGE_ROWS
        line = line + row[None, :]
        # Other programs wrote these, so the loads must bypass the L1 cache.
        logs = gl.load(
            partial_lse + line, mask=exists[:, None], other=float("-inf"), cache_modifier=".cg"
        )
        parts = gl.load(
            partial_out + line[:, :, None] * c.HEAD_DIM + column[None, None, :],
            mask=exists[:, None, None] & (column < c.HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_m = gl.maximum(m, gl.max(logs, 0))
        base = gl.where(new_m == float("-inf"), 0.0, new_m)
        weight = gl.exp2(logs - base[None, :])
        fade = gl.exp2(m - base)
        acc = acc * _rows_of(fade, plane)[:, None] + gl.sum(parts * weight[:, :, None], 0)
        total = total * fade + gl.sum(weight, 0)
        m = new_m
    saw_nothing = total == 0.0
    total = gl.where(saw_nothing, 1.0, total)
    acc = acc * _rows_of(gl.where(saw_nothing, 0.0, 1.0 / total), plane)[:, None]
    wide_row = gl.arange(0, c.MERGE_ROWS, layout=gl.SliceLayout(1, plane))
    wide_column = gl.arange(0, c.D, layout=gl.SliceLayout(0, plane))
    exists = row_exists(first_row + wide_row, q_len, c)
    place = output_row(first_row + wide_row, q_start, kv_head, c)
    gl.store(
        out + place[:, None] * c.HEAD_DIM + wide_column[None, :],
        acc.to(out.dtype.element_ty),
        mask=exists[:, None] & (wide_column < c.HEAD_DIM)[None, :],
    )
    if c.LSE:
        log_sum = gl.where(saw_nothing, float("-inf"), m + gl.log2(total)) * _LN_2
        exists = row_exists(first_row + row, q_len, c)
        gl.store(lse + output_row(first_row + row, q_start, kv_head, c), log_sum, mask=exists)


@gluon.constexpr_function
def queries_on_n(group):
    """Return the N dimension of the products of a group's queries with keys on M: at least 8 columns."""
    return max(8, rows_of_token(group))


@gluon.constexpr_function
def parts_at_once(rows, columns, few_registers):
    """Return the number of parts of [rows, columns] that a merge holds at once."""
    elements = _FEW_ELEMENTS if few_registers else _MERGE_ELEMENTS
    return max(1, min(16, elements // (rows * columns)))


@gluon.constexpr_function
def merge_layout(parts, rows):
    """Return the layout of [parts, rows, columns] in 4 warps: parts within a thread, rows over the warps."""
    warps = min(4, rows)
    return gl.BlockedLayout([parts, 1, 4], [1, 1, 32], [1, warps, 4 // warps], [2, 1, 0])


@gluon.jit
def _rows_of(values, plane: gl.constexpr):
    """Convert one value per row to the layout `plane`, in which each row's elements are held."""
    return gl.convert_layout(values, gl.SliceLayout(1, plane))
