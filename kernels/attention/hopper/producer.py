"""Producer warp of the Hopper prefill kernel: copies queries, keys and values for the consumers.

It fetches work items from a counter that all thread blocks share, posts them to the consumers, and issues TMA copies
to shared memory, a few stages ahead of the consumers. One copy moves a cache block of a paged cache (at most a tile),
or a tile of packed keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.attention.hopper.pipeline import PART_COLUMNS, ROWS, first_kept, key_range, post
from kernels.attention.portable.tile_list import TILE_FIELDS


@gluon.jit
def produce(
    pipe, q_desc, k_desc, v_desc, tiles, block_table, table_stride, counter, num_entries, late_heads,
    num_items, k_head_stride, window, c,
):  # fmt: skip
    """Fetch items and issue their copies until none is left.

    `counter` is [2] int32: items fetched, thread blocks finished.
    """
    item = gl.program_id(0)
    done = 0
    loaded = 0
    queries = 0
    num_long = gl.load(tiles + 2 * num_entries * TILE_FIELDS)
    while item < num_items:
        # The atomic is issued now, so that its result is available when this item is finished.
        following = gl.atomic_add(counter, 1) + gl.num_programs(0)
        seq, head, first_row, q_start, q_len, k_start, num_keys = read_item(
            tiles, item, num_entries, late_heads, num_long, c
        )
        if seq >= 0:
            post(pipe, done, (head, first_row, q_start, q_len, num_keys))
            done += 1
            last, count, _, _ = key_range(first_row, q_len, num_keys, window, c)
            if count > 0:
                copy_queries(pipe, q_desc, queries, q_start + first_row // c.BOX, head, c)
                queries += 1
                table = block_table + seq.to(gl.int64) * table_stride
                column = head // c.KEY_SHARES * k_head_stride
                kept = 0
                if c.WINDOW:
                    kept = first_kept(q_len, num_keys, window)
                loaded = copy_keys(
                    pipe, k_desc, v_desc, table, column, k_start, last, count, kept, num_keys, loaded, c,
                )  # fmt: skip
        item = following
    post(pipe, done, (-1,))
    finish(counter)


@gluon.jit
def copy_keys(
    pipe, k_desc, v_desc, table, column, k_start, last, count, kept, num_keys, loaded, c
):  # fmt: skip
    """Issue the copies of an item's `count` key tiles, from tile `last - 1` down; return `loaded` plus their number.

    `loaded` tiles were copied before, which gives the stage and the phase.
    """
    for i in range(count):
        start = (last - 1 - i) * c.BLOCK_N
        rows = rows_of_tile(table, k_start, start, kept, num_keys, c)
        buffer = loaded % c.STAGES
        phase = ((loaded // c.STAGES) & 1) ^ 1
        mbarrier.wait(pipe.k_empty.index(buffer), phase)
        copy_tile(k_desc, rows, column, pipe.k_full.index(buffer), pipe.k.index(buffer), c)
        mbarrier.wait(pipe.v_empty.index(buffer), phase)
        copy_tile(v_desc, rows, column, pipe.v_full.index(buffer), pipe.v.index(buffer), c)
        loaded += 1
    return loaded


@gluon.jit
def read_item(tiles, item, num_entries, late_heads, num_long, c):
    """Look up an item: (sequence, head, first row, first query token, query tokens, first key, keys).

    The order is that of `work_items`: the first list for all heads but the last `late_heads`; for those, the
    `num_long` long tiles of the second list head by head, then its short tiles, the heads of a tile together.
    """
    first_late = c.HEADS // c.GROUP - late_heads
    late = item - first_late * num_entries
    short = late - late_heads * num_long
    number = gl.where(late < 0, item, gl.where(short < 0, late, short))
    divisor = gl.where(late < 0, num_entries, gl.where(short < 0, num_long, late_heads))
    divisor = gl.maximum(divisor, 1)
    quotient = number // divisor
    rest = number % divisor
    head = gl.where(late < 0, 0, first_late) + gl.where(short < 0, quotient, rest)
    entry = gl.where(late < 0, 0, num_entries) + gl.where(short < 0, rest, num_long + quotient)
    record = tiles + entry * TILE_FIELDS
    seq = gl.load(record)
    first_row = gl.load(record + 1)
    q_start = gl.load(record + 2)
    q_len = gl.load(record + 3)
    k_start = gl.load(record + 4)
    num_keys = gl.load(record + 5)
    return seq, head, first_row, q_start, q_len, k_start, num_keys


@gluon.jit
def finish(counter):
    """Reset the counters for the next layer if this is the last thread block to finish."""
    if gl.atomic_add(counter + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def copy_queries(pipe, q_desc, queries, token, head, c):
    """Issue the copies of an item's queries, one part for each consumer, once their stage is free."""
    tokens: gl.constexpr = ROWS // c.BOX
    buffer = queries % c.QUERY_STAGES
    full = pipe.q_full.index(buffer)
    mbarrier.wait(pipe.q_empty.index(buffer), ((queries // c.QUERY_STAGES) & 1) ^ 1)
    mbarrier.expect(full, c.BLOCK_M * c.D * c.OPERAND_BYTES)
    for part in gl.static_range(c.CONSUMERS):
        target = pipe.q.index(buffer * c.CONSUMERS + part)._reinterpret(
            q_desc.dtype, [tokens, c.BOX, c.D], q_desc.layout
        )
        where = [token + part * tokens, head * c.GROUP, 0]
        tma.async_copy_global_to_shared(q_desc, where, full, target)


@gluon.jit
def rows_of_tile(table, k_start, start, kept, num_keys, c):
    """Return the first row of each part of a tile, counted over all keys of the cache or of the packed tensor.

    All entries of the block table are loaded before the first copy, so that their latencies overlap.
    """
    rows = ()
    for j in gl.static_range(c.BLOCK_N // c.PAGE):
        key = start + j * c.PAGE
        row = k_start + key
        if c.PAGED:
            # Other entries of the table are undefined. Block 0 is copied in their place; no row sees its keys.
            needed = (key < num_keys) & (key + c.PAGE > kept)
            block = gl.load(table + key // c.BLOCK_SIZE, mask=needed, other=0)
            row = block * c.BLOCK_SIZE + key % c.BLOCK_SIZE
        rows = rows + (row,)  # type: ignore[assignment]  # Gluon cannot unpack
    return rows


@gluon.jit
def copy_tile(desc, rows, column, full, tile, c):
    """Issue the copies of a tile of keys or values, part by part; mbarrier `full` completes with the last byte.

    `desc` has [rows, columns of all heads]; if heads are padded, [rows, heads, HEAD_DIM] and `column` is a head.
    """
    mbarrier.expect(full, c.BLOCK_N * c.D * c.OPERAND_BYTES)
    for part in gl.static_range(copies_of_tile(c)):
        copy_part(desc, rows, column, full, tile, part, c)


@gluon.jit
def copy_tiles(k_desc, v_desc, rows, column, k_full, v_full, k, v, c):
    """Issue the copies of a tile of keys and one of values, in turn.

    The compiler puts a barrier of the thread block between copies that complete on the same mbarrier. In turn, two
    copies share one.
    """
    mbarrier.expect(k_full, c.BLOCK_N * c.D * c.OPERAND_BYTES)
    mbarrier.expect(v_full, c.BLOCK_N * c.D * c.OPERAND_BYTES)
    for part in gl.static_range(copies_of_tile(c)):
        copy_part(k_desc, rows, column, k_full, k, part, c)
        copy_part(v_desc, rows, column, v_full, v, part, c)


@gluon.constexpr_function
def copies_of_tile(c):
    """Return the number of copies of a tile: one for each page, of each swizzled row if heads are padded."""
    widths = 1 if c.HEAD_DIM == c.D else c.D // PART_COLUMNS
    return widths * (c.BLOCK_N // c.PAGE)


@gluon.jit
def copy_part(desc, rows, column, full, tile, part: gl.constexpr, c):
    """Issue one copy of a tile, number `part` of `copies_of_tile`."""
    PAGES: gl.constexpr = c.BLOCK_N // c.PAGE
    if c.HEAD_DIM == c.D:
        target = tile.slice(part * c.PAGE, c.PAGE, dim=0)
        tma.async_copy_global_to_shared(desc, [rows[part], column], full, target)
    else:
        # The tile's memory holds a swizzled row's columns of all keys, then the next such columns.
        parts = tile._reinterpret(
            desc.dtype, [copies_of_tile(c), c.PAGE, 1, PART_COLUMNS], desc.layout
        )
        where = [rows[part % PAGES], column, part // PAGES * PART_COLUMNS]
        tma.async_copy_global_to_shared(desc, where, full, parts.index(part))
