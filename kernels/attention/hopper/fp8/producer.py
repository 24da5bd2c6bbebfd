"""Producer warp of the FP8 Hopper prefill kernel: like `producer`, for tiles of keys and values that are contiguous."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from kernels.attention.hopper.pipeline import key_range, post
from kernels.attention.hopper.producer import copy_queries, finish, read_item
from kernels.attention.portable.tile_list import TILE_FIELDS


@gluon.jit
def produce(
    pipe, q_desc, k_desc, v_desc, tiles, first_tiles, num_tiles, counter, num_entries, late_heads, num_items,
    c,
):  # fmt: skip
    """Fetch items and issue their copies until none is left.

    `first_tiles` and `num_tiles` as in `tiles`, other arguments as in `producer`.
    """
    item = gl.program_id(0)
    done = 0
    loaded = 0
    queries = 0
    num_long = gl.load(tiles + 2 * num_entries * TILE_FIELDS)
    while item < num_items:
        # The atomic is issued now, so that its result is available when this item is finished.
        following = gl.atomic_add(counter, 1) + gl.num_programs(0)
        seq, head, first_row, q_start, q_len, _, num_keys = read_item(
            tiles, item, num_entries, late_heads, num_long, c
        )
        if seq >= 0:
            first_tile = gl.load(first_tiles + seq) + head * num_tiles
            post(pipe, done, (head, first_row, q_start, q_len, num_keys, first_tile))
            done += 1
            last, count, _, _ = key_range(first_row, q_len, num_keys, 0, c)
            if count > 0:
                copy_queries(pipe, q_desc, queries, q_start + first_row // c.BOX, head, c)
                queries += 1
                for i in range(count):
                    tile = first_tile + last - 1 - i
                    buffer = loaded % c.STAGES
                    phase = ((loaded // c.STAGES) & 1) ^ 1
                    mbarrier.wait(pipe.k_empty.index(buffer), phase)
                    full = pipe.k_full.index(buffer)
                    copy_tile(k_desc, tile * c.BLOCK_N, full, pipe.k.index(buffer), c)
                    mbarrier.wait(pipe.v_empty.index(buffer), phase)
                    full = pipe.v_full.index(buffer)
                    copy_tile(v_desc, tile * c.D, full, pipe.v.index(buffer), c)
                    loaded += 1
        item = following
    post(pipe, done, (-1,))
    finish(counter)


@gluon.jit
def copy_tile(desc, row, full, tile, c):
    """Issue the copy of a tile of keys or values; mbarrier `full` completes with its last byte."""
    mbarrier.expect(full, c.BLOCK_N * c.D * c.OPERAND_BYTES)
    tma.async_copy_global_to_shared(desc, [row, 0], full, tile)
