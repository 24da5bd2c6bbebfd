"""Warp roles of the batch-invariant attention on Hopper: those of the prefill, for items that visit keys in parts.

An item is a row tile with all of its parts or with one part (`portable.part_list`). The key tiles of all parts are
visited from last to first, as in the prefill; after the last visited tile of a part, a consumer merges its result into
that of the parts before (`part_results`).

The bits of a row depend on positions alone: rows of a WGMMA do not change each other, tiles begin at multiples of
their length, and a tile without a key that a row sees leaves its maximum, sum and output as they are.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from kernels.attention.hopper.consumer import (
    consume_tile,
    finish_item,
    pass_over,
    start_item,
    store_output,
)
from kernels.attention.hopper.part_results import (
    keep,
    merge_kept,
    merge_parts,
    normalized,
    store_part,
)
from kernels.attention.hopper.ping_pong import barrier_arrive, barrier_sync, consumer_barrier
from kernels.attention.hopper.pipeline import (
    ROWS,
    first_kept,
    peek_item,
    post,
    range_of_rows,
    release_item,
)
from kernels.attention.hopper.producer import copy_keys, finish
from kernels.attention.hopper.scores import all_of
from kernels.attention.portable.part_list import RECORD_FIELDS

_FIELDS = gl.constexpr(7)
"""Fields of an item: head, first row, first query token, query tokens, keys, its part (-1 for all), its entry."""


@gluon.jit
def item_tiles(first_row, rows: gl.constexpr, q_len, num_keys, part, window, c):
    """Return the key tiles of some rows of an item, as `key_range` does; only those of `part` if it is not negative."""
    last, count, edge, inside = range_of_rows(first_row, rows, q_len, num_keys, window, c)
    begin = gl.maximum(last - count, gl.where(part < 0, 0, part * c.PART_TILES))
    end = gl.minimum(last, gl.where(part < 0, last, (part + 1) * c.PART_TILES))
    later = last - end
    return end, gl.maximum(end - begin, 0), edge - later, inside - later


@gluon.jit
def produce_parts(
    pipe, q_desc, k_desc, v_desc, records, block_table, table_stride, counter, k_head_stride,
    window, PDL: gl.constexpr, c,
):  # fmt: skip
    """Fetch items and issue their copies until none is left; `counter` as in `producer.produce`.

    The heads of an entry come together, so that the items with the most keys come first, whatever their head. If PDL,
    the producer alone waits for the preceding kernel: consumers have no item before.
    """
    if PDL:
        gdc_wait()
    HEADS: gl.constexpr = c.HEADS // c.GROUP
    num_items = gl.load(records) * HEADS
    item = gl.program_id(0)
    done = 0
    loaded = 0
    queries = 0
    while item < num_items:
        # The atomic is issued now, so that its result is available when this item is finished.
        following = gl.atomic_add(counter, 1) + gl.num_programs(0)
        entry = item // HEADS
        head = item % HEADS
        record = records + (entry + 1) * RECORD_FIELDS
        seq = gl.load(record)
        first_row = gl.load(record + 1)
        q_start = gl.load(record + 2)
        q_len = gl.load(record + 3)
        num_keys = gl.load(record + 4)
        part = gl.load(record + 5)
        post(pipe, done, (head, first_row, q_start, q_len, num_keys, part, entry))
        done += 1
        last, count, _, _ = item_tiles(first_row, c.BLOCK_M, q_len, num_keys, part, window, c)
        if count > 0:
            token = q_start + first_row // c.BOX
            copy_own_queries(pipe, q_desc, queries, token, head, q_len * c.BOX - first_row, c)
            queries += 1
            # In 32 bits, which hold all entries of a table: the producer has few registers.
            table = block_table + seq * table_stride
            column = head // c.KEY_SHARES * k_head_stride
            first = 0
            if c.WINDOW:
                first = first_kept(q_len, num_keys, window)
            loaded = copy_keys(
                pipe, k_desc, v_desc, table, column, 0, last, count, first, num_keys, loaded, c
            )
        item = following
    post(pipe, done, (-1,))
    finish(counter)


@gluon.jit
def copy_own_queries(pipe, q_desc, queries, token, head, rows, c):
    """Issue the copies of an item's queries, for those consumers that have some of its `rows`."""
    stage = queries % c.QUERY_STAGES
    full = pipe.q_full.index(stage)
    mbarrier.wait(pipe.q_empty.index(stage), ((queries // c.QUERY_STAGES) & 1) ^ 1)
    if rows > ROWS:
        mbarrier.expect(full, c.BLOCK_M * c.D * c.OPERAND_BYTES)
        for part in gl.static_range(c.CONSUMERS):
            _copy_queries(pipe, q_desc, token, head, full, stage, part, c)
    else:
        mbarrier.expect(full, ROWS * c.D * c.OPERAND_BYTES)
        _copy_queries(pipe, q_desc, token, head, full, stage, 0, c)


@gluon.jit
def _copy_queries(pipe, q_desc, token, head, full, stage, part: gl.constexpr, c):
    tokens: gl.constexpr = ROWS // c.BOX
    own = pipe.q.index(stage * c.CONSUMERS + part)
    target = own._reinterpret(q_desc.dtype, [tokens, c.BOX, c.D], q_desc.layout)
    where = [token + part * tokens, head * c.GROUP, 0]
    tma.async_copy_global_to_shared(q_desc, where, full, target)


@gluon.jit
def consume_parts(pipe, o_desc, out, results, scale, window, softcap, INDEX: gl.constexpr, c):
    """Compute attention for the rows of consumer `INDEX` of every item.

    `results` is (running, partial_out, partial_sums, records, arrivals): `running` is
    [programs, CONSUMERS, ROWS, D + 4] float32, see `part_results.keep`; partial_out [parts, heads of items, part_rows,
    HEAD_DIM] float32, partial_sums [parts, heads of items, part_rows, 2] float32, and arrivals
    [parts, heads of items, CONSUMERS] int32, for the parts that have items of their own.
    """
    MINE: gl.constexpr = "" if c.CONSUMERS == 1 else consumer_barrier(INDEX)
    NEXT: gl.constexpr = "" if c.CONSUMERS == 1 else consumer_barrier((INDEX + 1) % c.CONSUMERS)
    if INDEX == c.CONSUMERS - 1:
        barrier_arrive(NEXT)
    done = 0
    consumed = 0
    queries = 0
    head, first_row, q_start, q_len, num_keys, part, entry = peek_item(pipe, done, _FIELDS)
    while head >= 0:
        tiles = item_tiles(first_row, c.BLOCK_M, q_len, num_keys, part, window, c)
        m, total, acc, consumed = attend_parts(
            pipe, tiles, first_row + INDEX * ROWS, q_len, num_keys, part, consumed, queries,
            results[0], scale, window, softcap, INDEX, MINE, NEXT, c,
        )  # fmt: skip
        queries += (tiles[1] > 0).to(gl.int32)
        # Read again, so that the fields take no registers in between.
        head, first_row, q_start, q_len, num_keys, part, entry = peek_item(pipe, done, _FIELDS)
        my_row = first_row + INDEX * ROWS
        if part < 0:
            acc = normalized(acc, total)
            store_output(pipe, o_desc, out, acc, my_row, head, q_start, q_len, tiles[1], INDEX, c)
            if not c.OWN_OUTPUT:
                tma.store_wait(0)
        elif my_row < q_len * c.BOX:
            finish_part(
                out, results, acc, m, total, entry, my_row, head, q_start, q_len, num_keys, INDEX, c
            )
        release_item(pipe, done)
        if not c.OWN_OUTPUT:
            mbarrier.arrive(pipe.q_empty.index(0), count=1, pred=tiles[1] > 0)
        done += 1
        head, first_row, q_start, q_len, num_keys, part, entry = peek_item(pipe, done, _FIELDS)
    tma.store_wait(0)
    if INDEX == 0:
        barrier_sync(MINE)


@gluon.jit
def finish_part(
    out, results, acc, m, total, entry, my_row, head, q_start, q_len, num_keys,
    INDEX: gl.constexpr, c,
):  # fmt: skip
    """Write the result of a part; if all other parts of the sequence have finished, merge them."""
    HEADS: gl.constexpr = c.HEADS // c.GROUP
    PART: gl.constexpr = c.PART_TILES * c.BLOCK_N
    _, partial_out, partial_sums, records, arrivals = results
    record = records + (entry + 1) * RECORD_FIELDS
    part = gl.load(record + 5)
    first_part = gl.load(record + 6)
    parts = gl.load(record + 7)
    part_rows = gl.load(record + 8)
    first_line = (first_part.to(gl.int64) * HEADS + head) * part_rows + my_row
    stride = HEADS * part_rows
    line = first_line + (part - (num_keys + PART - 1) // PART + parts) * stride
    store_part(partial_out, partial_sums, line, acc, m, total, my_row, q_len, c)
    # The stores of all threads of this consumer must precede its arrival.
    gl.thread_barrier()
    arrived = arrivals + (first_part * HEADS + head) * c.CONSUMERS + INDEX
    if gl.atomic_add(arrived, 1, sem="acq_rel") == parts - 1:
        gl.store(arrived, 0)  # for the next layer
        merge_parts(
            out, partial_out, partial_sums, first_line, stride, parts, my_row, head, q_start, q_len, c,
        )  # fmt: skip


@gluon.jit
def attend_parts(
    pipe, tiles, my_row, q_len, num_keys, part, consumed, queries, running, scale, window,
    softcap, INDEX: gl.constexpr, MINE: gl.constexpr, NEXT: gl.constexpr, c,
):  # fmt: skip
    """Compute attention of this consumer's rows of an item, from `my_row` on, over the item's key tiles, part by part.

    Returns:
        (row maximum, row sum of exponentials, output before the division by that sum, `consumed` plus the tiles).
    """
    row_layout: gl.constexpr = gl.SliceLayout(1, c.S_LAYOUT)
    factor = scale
    if c.SOFTCAP:
        factor = 1.0
    stage = queries % c.QUERY_STAGES
    q = pipe.q.index(stage * c.CONSUMERS + INDEX)
    q_empty = pipe.q_empty.index(stage)
    last, count, edge, inside = tiles
    passed = 0
    left = 0
    if c.OWN_RANGE:
        last, count, edge, inside = item_tiles(my_row, ROWS, q_len, num_keys, part, window, c)
        count = gl.where(my_row < q_len * c.BOX, count, 0)
        passed = gl.where(count > 0, tiles[0] - last, 0)
        left = tiles[1] - passed - count
    acc = gl.zeros([ROWS, c.D], gl.float32, layout=c.O_LAYOUT)
    total = gl.full([ROWS], 0.0, gl.float32, layout=row_layout)
    m = gl.full([ROWS], float("-inf"), gl.float32, layout=row_layout)
    if tiles[1] > 0:
        mbarrier.wait(pipe.q_full.index(stage), (queries // c.QUERY_STAGES) & 1)
        for i in range(passed):
            pass_over(pipe, consumed + i, MINE, NEXT, c)
        consumed += passed
    if count > 0:
        token = (my_row + gl.arange(0, ROWS, layout=row_layout)) // c.BOX
        # Rows past the sequence's end use the causal limit of its last token, so that they need no extra mask.
        last_seen = num_keys - q_len + gl.minimum(token, q_len - 1)
        is_first = True
        while count > 0:
            # The tiles of this part that are visited; `last`, `count`, `edge` and `inside` are those of the rest.
            size = gl.minimum((last - 1) % c.PART_TILES + 1, count)
            m, sums, p = start_item(
                q, q_empty, pipe, consumed, last, count, last_seen, num_keys, window, factor, scale,
                softcap, MINE, NEXT, c,
            )  # fmt: skip
            state = (m, sums, gl.zeros([ROWS, c.D], gl.float32, layout=c.O_LAYOUT), p)
            for i in range(1, size):
                state = consume_tile(
                    i, state, q, q_empty, pipe, consumed, last, count, edge, inside, last_seen,
                    num_keys, window, factor, scale, softcap, MINE, NEXT, c,
                )  # fmt: skip
            m, sums, acc, p = state
            consumed += size
            last -= size
            count -= size
            edge -= size
            inside -= size
            acc = finish_item(
                pipe, p, acc, last * c.BLOCK_N, consumed - 1, q_len, num_keys, window, c
            )
            total = all_of(sums, c)
            if not is_first:
                acc, m, total = merge_kept(running, acc, m, total, INDEX, c)
            if count > 0:
                keep(running, acc, m, total, INDEX, c)
            is_first = False
    elif tiles[1] > 0:
        mbarrier.arrive(q_empty, count=1, pred=c.OWN_OUTPUT)
    for i in range(left):
        pass_over(pipe, consumed + i, MINE, NEXT, c)
    return m, total, acc, consumed + left
