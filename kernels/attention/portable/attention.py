"""Attention in Triton: one kernel for prompts, decodes, shared prefixes, and for equal bits in every batch.

A program computes attention of one tile of query rows of a key-value head to a range of the keys of a sequence. Which
tile and which range is data, except where the host knows it:

    KIND        list            keys of a program           result
    "tiles"     `tile_list`     all that the rows see       written
    "splits"    `split_list`    a split of a sequence's     merged by the last program of the tile to finish
    "prefix"    none            a part of the shared        float32, merged by a kernel of its own (`combine`)
    "parts"     `part_list`     all parts, or one           merged in order, by that program or the last to finish

Of "parts" a part has PART keys from a multiple of PART on, in tiles of BLOCK_N keys, all of them masked. Each is
divided by its own sum and merged with the parts before it, from position 0 on. Keys that a query does not see leave its
sums as they are, bit for bit, so it does not matter which other queries share its tile, or where its window or its
chunk begins. Merging in registers and from memory are the same operations, so which of the two it is may depend on the
batch.

Source: Dao, "FlashAttention-2", 2023 for the loop; packing the query heads that share a key-value head into one tile as
in Shah et al., "FlashAttention-3", 2024; Dao et al., "Flash-Decoding", 2023; the last block merging as in Osama et al.,
"Stream-K", 2023; fixed parts as in He et al., "Defeating Nondeterminism in LLM Inference", 2025.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.attention.portable.combine import combine_columns
from kernels.attention.portable.part_list import RECORD_FIELDS
from kernels.attention.portable.split_list import SPLIT_FIELDS
from kernels.attention.portable.tile import LN_2, attend, load_rows, normalize, store_rows
from kernels.attention.portable.tile_fp8 import attend_pairs
from kernels.attention.portable.tile_list import TILE_FIELDS

_UNROLLED = tl.constexpr(8)
"""Parts that a merge loads at once."""


@triton.jit(do_not_specialize=[
    "table_stride", "window", "num_seqs", "num_keys", "num_parts", "row_tiles", "lines",
])  # fmt: skip
def attention(
    q, k, v, k_scale, v_scale, out, lse, work, arrivals, partial_out, partial_lse, table, table_stride, num_seqs,
    num_keys, num_parts, row_tiles, lines, q_stride, q_head_stride, k_stride, v_stride, kv_head_stride, scale, window,
    softcap,
    KIND: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D1: tl.constexpr,
    D2: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, LSE: tl.constexpr, ONE_LOOP: tl.constexpr,
    FP8: tl.constexpr, PAIRS: tl.constexpr = False, ROW_TILES: tl.constexpr = 0, MERGE_ROWS: tl.constexpr = 0,
    MERGE_PARTS: tl.constexpr = 0, PART: tl.constexpr = 0, PDL: tl.constexpr = False,
):  # fmt: skip
    """Compute attention of one row tile to a range of keys.

    The programs of a split or part are adjacent: its heads lie side by side in the same blocks, and its row tiles read
    the same keys.

    Args:
        q: shapes as in `kernels.prefill_attention`, as for `k`, `v`, `out` and `lse`; of "prefix" [P, L, D] and [P, L].
        k_scale: scales of the keys, as is `v_scale` of the values; anything without FP8.
        work: the list, as `KIND` says; of "prefix" the query offsets [B + 1].
        arrivals: programs of a tile that have finished, as in `SplitList` and `PartList`.
        partial_out: as in `SplitList`; of "parts" [parts, KV_HEADS, lines, D] float32, of which only a tile's first
            `lines` rows may hold queries. `partial_lse` is the same without D, in units of log2.
        table: [B, columns], the block table.
        num_seqs: B, as are `num_keys`, `num_parts`, `row_tiles` and `lines` (L) of "prefix".
        k_stride: elements between two keys, as is `kv_head_stride` between two heads; of "tiles" only.
        v_stride: elements between two values. It equals `k_stride`, but if the compiler knew that, it would hold the
            offsets of the keys until it loads the values: 255 registers and spills in place of 184 (float32, head dim
            80, sm_89).
        window: 0 for none.
    """
    D: tl.constexpr = D1 + D2
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    record = work
    # Numbers of Python until a kind loads them, for mypy too, which therefore misses their `to` below.
    k_start = 0
    begin = 0
    end = 0
    part = 0
    count = 0
    if KIND == "prefix":
        first_row = program % row_tiles * BLOCK_M
        kv_head = program // row_tiles % KV_HEADS
        part = program // (row_tiles * KV_HEADS)
        seq = 0
        q_start = 0
        q_len = tl.load(work + num_seqs)
        if first_row >= q_len * GROUP:
            return
        tiles = (num_keys + BLOCK_N - 1) // BLOCK_N
        begin = part * tiles // num_parts * BLOCK_N
        end = tl.minimum((part + 1) * tiles // num_parts * BLOCK_N, num_keys)
    elif KIND == "splits":
        kv_head = program % (KV_HEADS * ROW_TILES) // ROW_TILES
        first_row = program % ROW_TILES * BLOCK_M
        record = work + program // (KV_HEADS * ROW_TILES) * SPLIT_FIELDS
        seq = tl.load(record)
        if seq < 0:
            return
        q_start = tl.load(record + 1)
        q_len = tl.load(record + 2)
        num_keys = tl.load(record + 3)
        begin = tl.load(record + 4)
        end = tl.load(record + 5)
        part = tl.load(record + 6)
        count = tl.load(record + 7)
    else:
        kv_head = tl.program_id(1)
        record = work + program * TILE_FIELDS
        if KIND == "parts":
            kv_head = program
            record = work + (tl.program_id(1) + 1) * RECORD_FIELDS
        seq = tl.load(record)
        if seq < 0:
            return
        first_row = tl.load(record + 1)
        q_start = tl.load(record + 2)
        q_len = tl.load(record + 3)
        if KIND == "parts":
            num_keys = tl.load(record + 4)
            part = tl.load(record + 5)
        else:
            k_start = tl.load(record + 4)
            num_keys = tl.load(record + 5)

    row = first_row + tl.arange(0, BLOCK_M)
    token = row // GROUP
    exists = token < q_len
    head = kv_head * GROUP + row % GROUP
    q_row = (q_start + token).to(tl.int64)
    q_tile = load_rows(q, q_row * q_stride + head * q_head_stride, exists, D1, D2, True)
    history = num_keys - q_len
    lowest = history + first_row // GROUP
    highest = history + tl.minimum((first_row + BLOCK_M - 1) // GROUP, q_len - 1)
    # Rows past the sequence's end use the causal limit of its last token, so that they need no extra mask.
    last_seen = history + tl.minimum(token, q_len - 1)
    if KIND == "tiles":
        # If there are more queries than keys, the first queries see no key.
        end = tl.maximum(tl.minimum(highest + 1, num_keys), 0) if CAUSAL else num_keys
        if WINDOW:
            begin = tl.maximum(lowest - window + 1, 0) // BLOCK_N * BLOCK_N

    stride_k = KV_HEADS * D
    stride_v = KV_HEADS * D
    offset = kv_head * D
    value_offset = offset // 2 if PAIRS else offset
    if KIND == "tiles":
        stride_k = k_stride
        stride_v = v_stride
        offset = k_start.to(tl.int64) * k_stride + kv_head.to(tl.int64) * kv_head_stride  # type: ignore[attr-defined]
        value_offset = offset
    first_scale = kv_head * BLOCK_SIZE
    scales = (k_scale + first_scale, v_scale + first_scale, KV_HEADS * BLOCK_SIZE)
    blocks = table + seq.to(tl.int64) * table_stride if KIND != "prefix" else table  # type: ignore[attr-defined]
    if PART > 0:
        if WINDOW:
            begin = tl.maximum(lowest - window + 1, 0) // PART
        end = (highest + PART) // PART
        if part >= 0:
            begin = tl.maximum(begin, part)
            end = tl.minimum(end, part + 1)
        acc1, acc2, m, total = no_parts(BLOCK_M, D1, D2)
        for number in range(begin, end):
            part1, part2, part_m, part_total = attend(
                q_tile, k + offset, v + value_offset, scales, blocks,
                number * PART, tl.minimum((number + 1) * PART, highest + 1), num_keys, last_seen, lowest, highest,
                stride_k, stride_v, scale, window, softcap,
                PAGED, CAUSAL, WINDOW, SOFTCAP, ONE_LOOP, BLOCK_SIZE, BLOCK_M, BLOCK_N, D1, D2, FP8,
            )  # fmt: skip
            part1, part2, log_sum = normalize(part1, part2, part_m, part_total)
            acc1, acc2, m, total = merge_part(acc1, acc2, m, total, part1, part2, log_sum)
    elif PAIRS:
        acc1, acc2, m, total = attend_pairs(
            q_tile, k + offset, v + value_offset, scales, blocks, begin, end, num_keys, last_seen, lowest,
            stride_k, scale, window, softcap,
            CAUSAL, WINDOW, SOFTCAP, BLOCK_SIZE, BLOCK_M, BLOCK_N, D1, D2,
        )  # fmt: skip
    else:
        acc1, acc2, m, total = attend(
            q_tile, k + offset, v + value_offset, scales, blocks, begin, end, num_keys, last_seen, lowest, highest,
            stride_k, stride_v, scale, window, softcap,
            PAGED, CAUSAL, WINDOW, SOFTCAP, ONE_LOOP, BLOCK_SIZE, BLOCK_M, BLOCK_N, D1, D2, FP8,
        )  # fmt: skip

    out_row = q_row * HEADS + head
    if KIND == "parts":
        if part >= 0:
            # A single part was merged into nothing, which left it as it was: `acc` is its result and `m` its
            # log-sum-exp.
            first = tl.load(record + 6).to(tl.int64)
            count = tl.load(record + 7)
            at = ((first + tl.load(record + 9)) * KV_HEADS + kv_head) * lines + tl.arange(
                0, BLOCK_M
            )
            store_rows(partial_out, at * D, exists, acc1, acc2, D1, D2)
            tl.store(partial_lse + at, m, mask=exists)
            if not is_last(arrivals + first * KV_HEADS + kv_head, count):
                return
            acc1, acc2, m, total = merge_parts(
                partial_out, partial_lse, first, count, kv_head, lines, exists, KV_HEADS, BLOCK_M, D1, D2
            )  # fmt: skip
        inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
        write_rows(out, out_row, exists, acc1 * inverse[:, None], acc2 * inverse[:, None], D1, D2)
    else:
        acc1, acc2, log_sum = normalize(acc1, acc2, m, total)
        if KIND == "prefix":
            out_row += part.to(tl.int64) * lines  # type: ignore[attr-defined]
        elif KIND == "splits":  # noqa: SIM102 - unlike the next one, the compiler evaluates it
            if count != 1:
                # At most MERGE_ROWS rows exist; with few heads that is less than a tile.
                at = program.to(tl.int64) * MERGE_ROWS + tl.arange(0, BLOCK_M)
                store_rows(partial_out, at * D, exists, acc1, acc2, D1, D2)
                tl.store(partial_lse + at, log_sum, mask=exists)
                tiles = KV_HEADS * ROW_TILES
                if not is_last(arrivals + seq * tiles + program % tiles, count):
                    return
                merged = first_row + tl.arange(0, MERGE_ROWS)
                of_token = merged // GROUP
                mine = of_token < q_len
                target = (
                    (q_start + of_token).to(tl.int64) * HEADS + kv_head * GROUP + merged % GROUP
                )
                first = program - part * tiles
                merged_lse = merge_splits(
                    partial_out, partial_lse, first, count, tiles, out, target, mine, MERGE_ROWS, MERGE_PARTS,
                    0, D1, D,
                )  # fmt: skip
                if LSE:
                    tl.store(lse + target, merged_lse * LN_2, mask=mine)
                if D2 > 0:
                    merge_splits(
                        partial_out, partial_lse, first, count, tiles, out, target, mine, MERGE_ROWS, MERGE_PARTS, D1,
                        D2, D,
                    )  # fmt: skip
                return
        write_rows(out, out_row, exists, acc1, acc2, D1, D2)
        if LSE:
            tl.store(lse + out_row, log_sum * LN_2, mask=exists)


@triton.jit
def write_rows(out, rows, mask, acc1, acc2, D1: tl.constexpr, D2: tl.constexpr):
    """Store rows of D1 + D2 elements in the dtype of `out`."""
    dtype: tl.constexpr = out.dtype.element_ty
    store_rows(out, rows * (D1 + D2), mask, acc1.to(dtype), acc2.to(dtype), D1, D2)


@triton.jit
def is_last(counter, count):
    """Count a program's arrival after its stores; return whether it is the last of `count`, which resets `counter`."""
    # The stores of all threads of this program must precede its arrival.
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)  # for the next layer
    return last


@triton.jit
def merge_splits(
    partial_out, partial_lse, first, count, step, out, rows, mask, ROWS: tl.constexpr, PARTS: tl.constexpr,
    COLUMN: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Merge COLUMNS columns of the partial results `first`, `first` + `step` and so on of ROWS rows into `out`.

    Returns the rows' log-sum-exps in units of log2.
    """
    result, log_sum = combine_columns(
        partial_out, partial_lse, first, count, step, COLUMN, ROWS, COLUMNS, D, PARTS
    )
    columns = COLUMN + tl.arange(0, COLUMNS)
    target = out + rows[:, None] * D + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=mask[:, None])
    return log_sum


@triton.jit
def no_parts(BLOCK_M: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Return accumulators, maximum and total of nothing."""
    acc1 = tl.zeros([BLOCK_M, D1], dtype=tl.float32)
    acc2 = tl.zeros([BLOCK_M, D2 if D2 > 0 else 1], dtype=tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    return acc1, acc2, m, tl.zeros([BLOCK_M], dtype=tl.float32)


@triton.jit
def merge_part(acc1, acc2, m, total, part1, part2, lse):
    """Merge the next part, divided by its own sum, into the parts before it; a part with a sum of 0 changes nothing.

    The multiplications and additions to fuse are explicit, because the compiler's choice depends on the code around.
    """
    new_m = tl.maximum(m, lse)
    base = tl.where(new_m == -float("inf"), 0.0, new_m)
    fade = tl.exp2(m - base)
    weight = tl.exp2(lse - base)
    acc1 = tl.fma(acc1, tl.broadcast_to(fade[:, None], acc1.shape), part1 * weight[:, None])
    acc2 = tl.fma(acc2, tl.broadcast_to(fade[:, None], acc2.shape), part2 * weight[:, None])
    return acc1, acc2, new_m, tl.fma(total, fade, weight)


@triton.jit
def merge_parts(
    partial_out, partial_lse, first, count, kv_head, lines, exists, KV_HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    """Merge `count` parts of a tile from memory, from number `first` on."""
    D: tl.constexpr = D1 + D2
    acc1, acc2, m, total = no_parts(BLOCK_M, D1, D2)
    for start in range(0, count, _UNROLLED):
        for i in tl.static_range(_UNROLLED):
            is_part = exists & (start + i < count)
            at = ((first + start + i) * KV_HEADS + kv_head) * lines + tl.arange(0, BLOCK_M)
            # Other programs wrote these, so the loads must bypass the L1 cache.
            lse = tl.load(partial_lse + at, mask=is_part, other=-float("inf"), cache_modifier=".cg")
            part1 = load_columns(partial_out, at * D, is_part, 0, D1)
            part2 = acc2
            if D2 > 0:
                part2 = load_columns(partial_out, at * D, is_part, D1, D2)
            acc1, acc2, m, total = merge_part(acc1, acc2, m, total, part1, part2, lse)
    return acc1, acc2, m, total


@triton.jit
def load_columns(base, offsets, mask, column, COLUMNS: tl.constexpr):
    """Load [rows, COLUMNS] at base + offsets + column, past the L1 cache."""
    columns = column + tl.arange(0, COLUMNS)
    at = base + offsets[:, None] + columns[None, :]
    return tl.load(at, mask=mask[:, None], other=0.0, cache_modifier=".cg")
