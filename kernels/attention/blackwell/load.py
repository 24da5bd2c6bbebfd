"""Loading warp of the Blackwell prefill: fetches work items and issues the TMA copies of queries, keys and values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier, tma

from kernels.attention.blackwell.pipeline import GROUPS, ROWS
from kernels.attention.hopper.pipeline import first_kept, key_range, post
from kernels.attention.hopper.producer import copy_tile, finish, read_item, rows_of_tile
from kernels.attention.portable.tile_list import TILE_FIELDS


@gluon.jit
def load_items(
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
            table = block_table + seq.to(gl.int64) * table_stride
            column = head // c.KEY_SHARES * k_head_stride
            kept = 0
            if c.WINDOW:
                kept = first_kept(q_len, num_keys, window)
            for i in range(count):
                start = (last - 1 - i) * c.BLOCK_N
                rows = rows_of_tile(table, k_start, start, kept, num_keys, c)
                buffer = loaded % c.STAGES
                phase = ((loaded // c.STAGES) & 1) ^ 1
                mbarrier.wait(pipe.k_empty.index(buffer), phase)
                copy_tile(k_desc, rows, column, pipe.k_full.index(buffer), pipe.k.index(buffer), c)
                if i == 0:
                    # The queries' buffer is in use for longer than the first stage of the keys.
                    copy_queries(pipe, q_desc, queries, q_start + first_row // c.BOX, head, c)
                    queries += 1
                mbarrier.wait(pipe.v_empty.index(buffer), phase)
                copy_tile(v_desc, rows, column, pipe.v_full.index(buffer), pipe.v.index(buffer), c)
                loaded += 1
        item = following
    post(pipe, done, (-1,))
    finish(counter)


@gluon.jit
def copy_queries(pipe, q_desc, queries, token, head, c):
    """Issue the copies of an item's queries, one part for each softmax group, once their buffer is free."""
    tokens: gl.constexpr = ROWS // c.BOX
    full = pipe.q_full.index(0)
    mbarrier.wait(pipe.q_empty.index(0), (queries & 1) ^ 1)
    mbarrier.expect(full, c.BLOCK_M * c.D * c.OPERAND_BYTES)
    for part in gl.static_range(GROUPS):
        target = pipe.q.index(part)._reinterpret(q_desc.dtype, [tokens, c.BOX, c.D], q_desc.layout)
        where = [token + part * tokens, head * c.GROUP, 0]
        tma.async_copy_global_to_shared(q_desc, where, full, target)
